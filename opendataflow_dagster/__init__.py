"""OpenDataFlow for Dagster: run the next chunk of data that is ready.

Nothing is imported here: a cron line that runs one script pays only for what it uses. The public
names come from their modules on first use.
"""

__version__ = "0.1.0"

_HOMES = {
    "Catalog": "store.catalog",
    "Checked": "chunk",
    "Chunk": "chunk",
    "DataflowIOManager": "dagster.io_manager",
    "DataflowResource": "dagster.resources",
    "DataflowTranslator": "dagster.translator",
    "Dataset": "flow.flow",
    "Flow": "flow.flow",
    "Job": "flow.flow",
    "OpenDataFlowComponent": "dagster.component",
    "OutsideOptions": "dagster.events",
    "Place": "chunk",
    "Result": "chunk",
    "SparkJob": "spark.job",
    "SparkResource": "dagster.spark_resource",
    "build_definitions": "dagster.build",
    "catch_up_sensor": "dagster.launch",
    "dataflow_assets": "dagster.assets",
    "dataflow_check": "dagster.checks",
    "dataflow_specs": "dagster.job_assets",
    "external_assets": "dagster.job_assets",
    "pipeline_assets": "dagster.pipeline_assets",
    "reconcile_sensor": "dagster.sensors",
    "script_assets": "dagster.assets",
    "spark_job": "spark.job",
    "today_schedules": "dagster.launch",
}
"""Public name → the module that has it."""

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


TYPE_CHECKING = False  # type checkers take it for true; importing `typing` would cost a cron line
if TYPE_CHECKING:
    from .chunk import Checked as Checked
    from .chunk import Chunk as Chunk
    from .chunk import Place as Place
    from .chunk import Result as Result
    from .dagster.assets import dataflow_assets as dataflow_assets
    from .dagster.assets import script_assets as script_assets
    from .dagster.build import build_definitions as build_definitions
    from .dagster.checks import dataflow_check as dataflow_check
    from .dagster.component import OpenDataFlowComponent as OpenDataFlowComponent
    from .dagster.events import OutsideOptions as OutsideOptions
    from .dagster.io_manager import DataflowIOManager as DataflowIOManager
    from .dagster.job_assets import dataflow_specs as dataflow_specs
    from .dagster.job_assets import external_assets as external_assets
    from .dagster.launch import catch_up_sensor as catch_up_sensor
    from .dagster.launch import today_schedules as today_schedules
    from .dagster.pipeline_assets import pipeline_assets as pipeline_assets
    from .dagster.resources import DataflowResource as DataflowResource
    from .dagster.sensors import reconcile_sensor as reconcile_sensor
    from .dagster.spark_resource import SparkResource as SparkResource
    from .dagster.translator import DataflowTranslator as DataflowTranslator
    from .flow.flow import Dataset as Dataset
    from .flow.flow import Flow as Flow
    from .flow.flow import Job as Job
    from .spark.job import SparkJob as SparkJob
    from .spark.job import spark_job as spark_job
    from .store.catalog import Catalog as Catalog


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        from .errors import what_installs

        try:
            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if (line := what_installs(error)) is None:
                raise
            raise ModuleNotFoundError(f"{name}: {line}", name=error.name) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
