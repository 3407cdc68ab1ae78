"""Everything in one call: a code location made of what the tables say."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dagster as dg

from ..errors import DataflowError, NoDatabase
from ..store.catalog import Catalog
from ..util.text import first_line
from .assets import RESOURCE, registered
from .catch_up_sensor import catch_up_sensor
from .checks import ChunkCheck
from .io_manager import DataflowIOManager
from .job_runners import Path, Runners, Script, by_job
from .pipeline_projects import Folder, Projects, tables_of
from .resources import DataflowResource
from .schedules import today_schedules
from .sensors import reconcile_sensor
from .settlement import settlement_sensors
from .spark_assets import PYSPARK
from .translator import DataflowTranslator

IO_MANAGER = "dataflow_io_manager"
"""The key of the IO manager, so that a project's own stays what it is."""


def build_definitions(
    dataflow: DataflowResource | None = None,
    *,
    assets: Iterable[Any] = (),
    functions: Mapping[str, Callable[..., Any]] | None = None,
    scripts: Mapping[str, Script] | Path | None = None,
    checks: Iterable[ChunkCheck] = (),
    jobs: Iterable[str] | None = None,
    projects: Iterable[Folder] = (),
    catalog: Catalog | None = None,
    translator: DataflowTranslator | None = None,
    io_manager: Any = None,
    pyspark: Any = None,
    executor: dg.ExecutorDefinition | None = None,
    sensors: bool = True,
    schedules: bool = True,
    automatic: bool = False,
    runs_per_job: int = 1,
    batch: int = 500,
) -> dg.Definitions:
    """Definitions of all datasets in the tables, with what runs their jobs here.

    A job runs by a function of `functions` (`fn(chunk)` or `fn(chunk, context)`), by a script of
    `scripts` (by job, or a folder: the executable files that are called like a job), or by assets
    of `@dataflow_assets`; any other assets of yours may be among `assets`. What no job here makes
    is shown as external. `jobs` leaves out the datasets of other jobs. `projects` are folders with
    a project.yml, whose pipelines are jobs and assets, see `pipeline_assets`; with them, the steps
    of a run share one process and its session of Spark, unless `executor` says otherwise. `catalog`
    is what is registered, if that is known already. `pyspark` has the session for functions of
    DataFrames, for pipelines and for the IO manager: a `SparkResource`, or a `LazyPySparkResource`
    of dagster-pyspark. `automatic` switches on from the start what launches runs: the catch-up
    sensor and the schedules of `today`; else you do so in the UI.
    """
    named = list(projects)
    dataflow = dataflow or (
        tables_of(named[0], make=catalog is None) if named else DataflowResource()
    )
    translator = translator or DataflowTranslator()
    registering = catalog is None
    catalog = catalog or _catalog(dataflow)
    found = Projects(named) if named else None
    if found is not None:
        catalog = found.known_to(catalog)
        if registering:
            found.register(dataflow)
        executor = executor or dg.in_process_executor
    shown = None if jobs is None else {registered(catalog, jobid).jobid for jobid in jobs}

    here = Runners(catalog, translator, checks, pyspark=pyspark is not None)
    for each in assets:
        here.add_assets(each)
    for jobid, function in (functions or {}).items():
        here.add_function(jobid, function)
    for jobid, argv in by_job(scripts, catalog.jobs if shown is None else shown).items():
        here.add_script(jobid, argv)
    if found is not None:
        from .pipeline_assets import assets_of

        made = assets_of(found, catalog, translator, pyspark=pyspark is not None)
        for jobid, each in zip(found.shown, made, strict=True):
            here.add_pipeline(jobid, each)
    here.check()

    launchers: list[Any] = []
    status = dg.DefaultSensorStatus.RUNNING if automatic else dg.DefaultSensorStatus.STOPPED
    if sensors:
        launchers += [
            reconcile_sensor(dataflow, translator=translator),
            *settlement_sensors(dataflow),
            catch_up_sensor(
                dataflow,
                here.targets,
                translator=translator,
                runs_per_job=runs_per_job,
                batch=batch,
                default_status=status,
                projects=found,
            ),
        ]
    timed: list[Any] = []
    if schedules:
        timed = today_schedules(
            dataflow,
            here.targets,
            catalog=catalog,
            translator=translator,
            batch=batch,
            default_status=dg.DefaultScheduleStatus.RUNNING
            if automatic
            else dg.DefaultScheduleStatus.STOPPED,
        )
    return dg.Definitions(
        assets=[*here.assets, *here.elsewhere(shown)],
        sensors=launchers,
        schedules=timed,
        resources={
            RESOURCE: dataflow,
            IO_MANAGER: io_manager
            or DataflowIOManager(dataflow=dataflow, translator=translator, pyspark=pyspark),
            **({PYSPARK: pyspark} if pyspark is not None else {}),
        },
        executor=executor,
    )


def _catalog(dataflow: DataflowResource) -> Catalog:
    try:
        return dataflow.catalog()
    except DataflowError:
        raise
    except Exception as error:
        store = dataflow.patient_store(0.0)
        if not store.db.trouble(error):
            raise
        raise NoDatabase(
            f"What is registered in {store.db.where} can't be read, and no earlier answer was "
            f"kept: {first_line(error)}. Run: odf doctor"
        ) from None
