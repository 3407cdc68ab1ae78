from opendataflow_dagster import Chunk, dataflow_check

@dataflow_check(dataset="checked")
def has_rows(chunk: Chunk) -> bool | str:
    return chunk.results["checked"].rows != 0 or "no row is left"
