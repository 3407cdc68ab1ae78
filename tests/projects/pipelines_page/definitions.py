from opendataflow_dagster import build_definitions

defs = build_definitions(projects=["shop"])
