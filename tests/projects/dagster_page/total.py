from opendataflow_dagster import Chunk, Dataset, build_definitions, dataflow_assets

@dataflow_assets(inputs=["checked"], outputs=[Dataset("total", hostname="./data/total", format="csv")])
def total(chunk: Chunk) -> bytes:
    with open(f"{chunk.inputs['checked'].location}/{chunk.dataid}.csv") as file:
        return f"lines,{len(file.readlines())}\n".encode()

defs = build_definitions(flow="flow.yml", assets=[total])
