import dagster as dg
import shop  # your project, as it is
from sums import revenue

from opendataflow_dagster import Chunk, DataflowResource, build_definitions, dataflow_assets

dataflow = DataflowResource()


@dataflow_assets(job="report", dataflow=dataflow)
def report(chunk: Chunk):
    return revenue(chunk.inputs["checked"].location, chunk.outputs["report"].location, chunk.dataid)


defs = dg.Definitions.merge(shop.defs, build_definitions(dataflow, assets=[report], scripts="jobs"))
