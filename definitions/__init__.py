"""This repository's own code location: the demo's, loaded from its folder."""

import os
import runpy
import sys

import dagster as dg

from opendataflow_dagster import DataflowResource, build_definitions

demo = os.path.abspath(os.environ.get("ODF_DEMO") or "odf-demo")
written = os.path.join(demo, "definitions.py")

if os.path.exists(written):
    sys.path.insert(0, demo)  # where jobs.py is
    defs: dg.Definitions = runpy.run_path(written)["defs"]
else:  # `odf demo --scripts`
    defs = build_definitions(
        DataflowResource(url=f"sqlite:///{demo}/.dataflow/dataflow.db"),
        scripts=demo,
        executor=dg.in_process_executor,
    )
