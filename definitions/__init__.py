"""This repository's own code location: the demo's datasets, its scripts as assets; wiring only."""

import os

import dagster as dg

from opendataflow_dagster import DataflowResource, build_definitions

demo = os.path.abspath(os.environ.get("ODF_DEMO") or "odf-demo")

defs = build_definitions(
    DataflowResource(url=f"sqlite:///{demo}/.dataflow/dataflow.db"),
    scripts=demo,
    executor=dg.in_process_executor,
)
