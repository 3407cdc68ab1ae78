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
    "pipeline_assets": "project_assets",
    "reconcile_sensor": "sensors",
    "script_assets": "scripts",
    "spark_job": "spark.jobs",
    "today_schedules": "schedules",
}
"""Public name → the module that has it."""

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


TYPE_CHECKING = False  # type checkers take it for true; importing `typing` would cost a cron line
if TYPE_CHECKING:
    from .assets import dataflow_assets as dataflow_assets
    from .assets import dataflow_specs as dataflow_specs
    from .assets import external_assets as external_assets
    from .build import build_definitions as build_definitions
    from .checks import dataflow_check as dataflow_check
    from .component import OpenDataFlowComponent as OpenDataFlowComponent
    from .dataflow.catalog import Catalog as Catalog
    from .dataflow.produce import Checked as Checked
    from .dataflow.produce import Chunk as Chunk
    from .dataflow.produce import Place as Place
    from .dataflow.produce import Result as Result
    from .io_manager import DataflowIOManager as DataflowIOManager
    from .launching import catch_up_sensor as catch_up_sensor
    from .project_assets import pipeline_assets as pipeline_assets
    from .resource import DataflowResource as DataflowResource
    from .schedules import today_schedules as today_schedules
    from .scripts import script_assets as script_assets
    from .sensors import reconcile_sensor as reconcile_sensor
    from .spark.jobs import SparkJob as SparkJob
    from .spark.jobs import spark_job as spark_job
    from .spark_resource import SparkResource as SparkResource
    from .translator import DataflowTranslator as DataflowTranslator


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        from .dataflow.errors import what_installs

        try:
            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if (line := what_installs(error)) is None:
                raise
            raise ModuleNotFoundError(f"{name}: {line}", name=error.name) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
