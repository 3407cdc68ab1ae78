import dagster as dg
from opendataflow_dagster import build_definitions

defs = dg.Definitions.merge(
    build_definitions(flow="sales/flow.yml"),
    build_definitions(flow="stock/flow.yml", elsewhere=["checked"]),
)
