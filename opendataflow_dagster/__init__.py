"""OpenDataFlow for Dagster: run the next chunk of data that is ready.

Nothing is imported here: a cron line that runs one script pays only for what it uses. The public
names come from their modules on first use.
"""

__version__ = "0.1.0"

_HOMES = {
    "Catalog": "dataflow.catalog",
    "Checked": "dataflow.produce",
    "Chunk": "dataflow.produce",
    "DataflowIOManager": "io_manager",
    "DataflowResource": "resource",
    "DataflowTranslator": "translator",
    "OpenDataFlowComponent": "component",
    "Place": "dataflow.produce",
    "Result": "dataflow.produce",
    "SparkJob": "spark.jobs",
    "SparkResource": "spark_resource",
    "build_definitions": "build",
    "catch_up_sensor": "launching",
    "dataflow_assets": "assets",
    "dataflow_check": "checks",
    "dataflow_specs": "assets",
    "external_assets": "assets",
    "reconcile_sensor": "sensors",
    "script_assets": "scripts",
    "spark_job": "spark.jobs",
    "today_schedules": "schedules",
}
"""Public name → the module that has it."""

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
