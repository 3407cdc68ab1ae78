"""What the benchmarks import from the product: everything is here, and nowhere else.

compare.py runs these programs on other commits, whose modules may be elsewhere: a name is taken
from the first of its modules that exists. It is imported on first use, so that a client which only
claims imports neither Dagster nor Spark.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGE = "opendataflow_dagster"

MODULES = {
    "Chunk": ("",),
    "DataflowResource": ("",),
    "DataflowTranslator": ("translator", "dagster.translator"),
    "Evidence": ("spark.evidence",),
    "Fact": ("dataflow.model", "model"),
    "Mirror": ("mirror", "dagster.grid"),
    "READY": ("dataflow.model", "model"),
    "RunLine": ("cli.runline", "cli.fast_run"),
    "Settings": ("dataflow.config", "config.settings"),
    "Scripts": ("dataflow.process", "runner.script", "runner.script_runner"),
    "SparkRunner": ("spark.runs", "spark.run", "spark.worker"),
    "StagedRows": (
        "spark.postgres",
        "spark.write_table",
        "spark.postgres_write",
        "spark.write",
        "spark.read",
        "spark.chunks",
    ),
    "Store": ("dataflow.store", "store.store"),
    "Table": ("dataflow.targets", "location"),
    "add_dataset": ("dataflow.registry", "store.registry"),
    "add_job": ("dataflow.registry", "store.registry"),
    "as_spark_job": ("spark.jobs", "spark.job"),
    "build_definitions": ("",),
    "dataflow_assets": ("",),
    "by_number": ("dataflow.split", "store.split"),
    "differences": ("reconcile", "dagster.reconcile", "dagster.differences"),
    "execute": ("cli.runline", "cli.fast_run"),
    "fold_items": ("dataflow.folding", "store.item_folding"),
    "hold": ("dataflow.moves", "store.operations"),
    "looking": ("spark.postgres", "spark.postgres_read"),
    "new_owner": ("dataflow.store", "store.store", "store.workers", "model"),
    "new_token": ("dataflow.tokens", "store.items", "store.item_tokens"),
    "observed": ("spark.evidence",),
    "open_store": ("dataflow.store", "store.store", "store.opening", "store"),
    "read_rows": ("spark.postgres", "spark.postgres_read"),
    "ready": ("dataflow.moves", "store.operations"),
    "reconcile": ("reconcile", "dagster.reconcile"),
    "release": ("dataflow.moves", "store.operations"),
    "read_project": ("pipelines.project",),
    "reclaim_room": ("store.item_folding",),
    "rules_of": ("spark.expect", "spark.expectations"),
    "run_pipeline": ("pipelines.running", "pipelines.run"),
    "schema_text": ("spark.evidence", "spark.schema"),
    "set_policy": ("dataflow.registry", "store.registry"),
    "split": ("dataflow.split", "store.split"),
    "spark_job": ("spark.jobs", "spark.job"),
    "spark_session": ("spark.session",),
    "truths": ("dataflow.truth", "store.overview", "store.current_status"),
}
"""The modules in which a name may be, below the package."""

WRITING = ("spark.staging", "spark.write", "spark.read", "spark.chunks")
"""The module that writes a chunk and collects its evidence."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(name)
    for path in MODULES[name]:
        module = f"{PACKAGE}.{path}".rstrip(".")
        if _exists(module) and hasattr(found := import_module(module), name):
            return getattr(found, name)
    raise ImportError(f"No module of {PACKAGE} has {name}: correct MODULES in {__file__}.")


def writing() -> Any:
    """Return the module whose `observed` a benchmark replaces."""
    [path] = [path for path in WRITING if _exists(f"{PACKAGE}.{path}")]
    return import_module(f"{PACKAGE}.{path}")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent doesn't exist
        return False
