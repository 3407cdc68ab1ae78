"""A code location in one call, from what is registered in the tables."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dagster as dg

from ..errors import DataflowError, NoDatabase, WrongUse
from ..runner.script import CannotStart, check
from ..spark.job import is_spark_function
from ..store.catalog import Catalog
from ..util.text import first_line, printable, typed
from .assets import (
    dataflow_assets,
    external_assets,
    one_producer_each,
    registered_plan,
    script_assets,
)
from .checks import ChunkCheck
from .io_manager import DataflowIOManager
from .launch import catch_up_sensor, today_schedules
from .pipeline_assets import ProjectFolder, Projects, assets_of, tables_of
from .resources import PYSPARK_KEY, RESOURCE_KEY, DataflowResource
from .sensors import reconcile_sensor, settlement_sensors
from .translator import DataflowTranslator

IO_MANAGER_KEY = "dataflow_io_manager"
"""The key of the IO manager, so that a project's own stays what it is."""

MAX_NAMED_JOBS = 10
"""How many jobs an error names."""

Path = str | os.PathLike[str]
Script = Path | Sequence[Path]


def build_definitions(
    dataflow: DataflowResource | None = None,
    *,
    assets: Iterable[Any] = (),
    functions: Mapping[str, Callable[..., Any]] | None = None,
    scripts: Mapping[str, Script] | Path | None = None,
    checks: Iterable[ChunkCheck] = (),
    jobs: Iterable[str] | None = None,
    projects: Iterable[ProjectFolder] = (),
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

    A dataset that no job here writes is shown as an external asset.

    Args:
        dataflow: The tables; by default those that `odf` would use here, or the first project's.
        assets: Assets of `@dataflow_assets`, and any other assets of yours.
        functions: By job, the function that runs it: `fn(chunk)` or `fn(chunk, context)`.
        scripts: By job, the script that runs it; or a folder, of which every executable file
            counts that is called like a job.
        checks: Checks of the datasets that functions and scripts write.
        jobs: Show only the datasets of these jobs.
        projects: Folders with a project.yml, whose pipelines are jobs and assets, see
            `pipeline_assets`. With them, the steps of a run share one process and its session of
            Spark, unless `executor` says otherwise.
        catalog: What is registered, if that is known already.
        pyspark: What has the session for functions of DataFrames, for pipelines and for the IO
            manager: a `SparkResource`, or a `LazyPySparkResource` of dagster-pyspark.
        automatic: Switch on from the start what launches runs: the catch-up sensor and the
            schedules of `today`. Otherwise you do so in the UI.
        runs_per_job: How many runs of a job the catch-up sensor has at a time.
        batch: How many chunks such a run claims.
    """
    folders = list(projects)
    dataflow = dataflow or _default_tables(folders, make=catalog is None)
    translator = translator or DataflowTranslator()
    pipelines = Projects(folders) if folders else None
    catalog = _known_jobs(dataflow, catalog, pipelines)
    chosen = None if jobs is None else {registered_plan(catalog, jobid).jobid for jobid in jobs}

    runners = JobRunners(catalog, translator, checks, pyspark=pyspark is not None)
    for definition in assets:
        runners.add_assets(definition)
    for jobid, function in (functions or {}).items():
        runners.add_function(jobid, function)
    by_job = scripts_by_job(scripts, catalog.jobs if chosen is None else chosen)
    for jobid, argv in by_job.items():
        runners.add_script(jobid, argv)
    if pipelines is not None:
        runners.add_pipelines(pipelines)
        executor = executor or dg.in_process_executor
    runners.check()

    launch = _Launch(dataflow, runners, pipelines, automatic, runs_per_job, batch)
    return dg.Definitions(
        assets=[*runners.assets, *runners.external(chosen)],
        sensors=launch.sensors() if sensors else [],
        schedules=launch.schedules() if schedules else [],
        resources=_resources(dataflow, translator, io_manager, pyspark),
        executor=executor,
    )


def _default_tables(folders: Sequence[ProjectFolder], *, make: bool) -> DataflowResource:
    """The tables of the first project, or else those that `odf` would use here."""
    return tables_of(folders[0], make=make) if folders else DataflowResource()


def _known_jobs(
    dataflow: DataflowResource, catalog: Catalog | None, pipelines: Projects | None
) -> Catalog:
    """The registered jobs and those that the pipelines are.

    With a `catalog` given, the database is left alone: a code location loads without it.
    """
    known = catalog or _read_catalog(dataflow)
    if pipelines is None:
        return known
    known = pipelines.known_to(known)
    if catalog is None:
        pipelines.register(dataflow)
    return known


def _read_catalog(dataflow: DataflowResource) -> Catalog:
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


def _resources(
    dataflow: DataflowResource, translator: DataflowTranslator, io_manager: Any, pyspark: Any
) -> dict[str, Any]:
    return {
        RESOURCE_KEY: dataflow,
        IO_MANAGER_KEY: io_manager
        or DataflowIOManager(dataflow=dataflow, translator=translator, pyspark=pyspark),
        **({PYSPARK_KEY: pyspark} if pyspark is not None else {}),
    }


class _Launch(NamedTuple):
    """What launches runs of a code location's jobs by itself."""

    dataflow: DataflowResource
    runners: "JobRunners"
    pipelines: Projects | None
    automatic: bool
    runs_per_job: int
    batch: int

    def sensors(self) -> list[dg.SensorDefinition]:
        """The sensors that follow the tables are on at once; the one that launches runs waits."""
        status = dg.DefaultSensorStatus
        return [
            reconcile_sensor(self.dataflow, translator=self.runners.translator),
            *settlement_sensors(self.dataflow),
            catch_up_sensor(
                self.dataflow,
                self.runners.targets,
                translator=self.runners.translator,
                runs_per_job=self.runs_per_job,
                batch=self.batch,
                default_status=status.RUNNING if self.automatic else status.STOPPED,
                projects=self.pipelines,
            ),
        ]

    def schedules(self) -> list[dg.ScheduleDefinition]:
        status = dg.DefaultScheduleStatus
        return today_schedules(
            self.dataflow,
            self.runners.targets,
            catalog=self.runners.catalog,
            translator=self.runners.translator,
            batch=self.batch,
            default_status=status.RUNNING if self.automatic else status.STOPPED,
        )


class JobRunners:
    """What this code location runs, job by job."""

    def __init__(
        self,
        catalog: Catalog,
        translator: DataflowTranslator,
        checks: Iterable[ChunkCheck],
        *,
        pyspark: bool = False,
    ) -> None:
        self.catalog, self.translator, self._pyspark = catalog, translator, pyspark
        self.assets: list[Any] = []
        self.targets: dict[str, dg.AssetsDefinition] = {}
        self._by: dict[str, str] = {}
        self._checks, self._checked = list(checks), set[str]()
        self._keys: dict[dg.AssetKey, str] = {}
        for datasetid in catalog.datasets:
            other = self._keys.setdefault(translator.asset_key(datasetid), datasetid)
            if other != datasetid:
                raise WrongUse(
                    f"Datasets {other!r} and {datasetid!r} are both called "
                    f"{translator.asset_key(datasetid).to_user_string()!r} by the translator. Give "
                    "each a key of its own."
                )

    def add_assets(self, given: Any) -> None:
        """Take assets as they are; the metadata of those that run a job name it."""
        self.assets.append(given)
        if isinstance(given, dg.AssetsDefinition):
            jobid = self._job_of(given)
            if jobid is not None:
                self._take(jobid, given, "the assets of @dataflow_assets")

    def add_pipelines(self, pipelines: Projects) -> None:
        """Take the assets of pipelines; each is the job of the same name."""
        definitions = assets_of(pipelines, self.catalog, self.translator, pyspark=self._pyspark)
        for jobid, definition in zip(pipelines.shown, definitions, strict=True):
            self._take(jobid, definition, f"pipeline {jobid}")
            self.assets.append(definition)

    def add_function(self, jobid: str, function: Callable[..., Any]) -> None:
        inner = getattr(function, "fn", function)  # of a SparkJob
        name = getattr(inner, "__name__", type(inner).__name__)
        if not callable(function) or isinstance(function, dg.AssetsDefinition):
            raise WrongUse(
                f"What runs job {jobid!r}, a {type(function).__name__}, isn't a function. Assets "
                "that are made already go into `assets`."
            )
        self._registered(jobid, f"function {name}")
        options = {"pyspark": True} if self._pyspark and is_spark_function(function) else {}
        definition = dataflow_assets(
            job=jobid,
            dataflow=self.catalog,
            translator=self.translator,
            checks=self._for(jobid),
            **options,
        )(function)
        self._take(jobid, definition, f"function {name}")
        self.assets.append(definition)

    def add_script(self, jobid: str, argv: list[str]) -> None:
        self._registered(jobid, f"script {argv[0]}")
        try:
            check(argv[0], os.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            raise WrongUse(f"The script of job {jobid!r} {refusal}.") from None
        definition = script_assets(
            jobid, argv, dataflow=self.catalog, translator=self.translator, checks=self._for(jobid)
        )
        self._take(jobid, definition, f"script {argv[0]}")
        self.assets.append(definition)

    def check(self) -> None:
        """Refuse what Dagster would refuse in more words, or not at all."""
        one_producer_each(self.catalog, self.targets)
        seen: dict[dg.AssetKey, Any] = {}
        for definition in self.assets:
            for key in _keys(definition):
                if seen.setdefault(key, definition) is not definition:
                    raise WrongUse(
                        f"Asset {key.to_user_string()!r} is defined twice. Leave one of them out, "
                        "or rename the dataset's by a DataflowTranslator."
                    )
        for chunk_check in self._checks:
            if chunk_check.name not in self._checked:
                of = (
                    f"dataset {chunk_check.dataset!r}"
                    if chunk_check.dataset
                    else "no dataset in particular"
                )
                raise WrongUse(
                    f"Check {chunk_check.name!r} is for {of}, which no function or script here "
                    "writes. Use @dataflow_check(dataset=…), or give it to "
                    "@dataflow_assets(checks=…)."
                )

    def external(self, chosen: set[str] | None) -> list[dg.AssetSpec]:
        """The assets of all other datasets, or of those that the chosen jobs read or write."""
        here = {key for definition in self.assets for key in _keys(definition)}
        produced = {datasetid for key, datasetid in self._keys.items() if key in here}
        specs = external_assets(self.catalog, produced, self.translator)
        if chosen is None:
            return specs
        plans = [self.catalog.jobs[jobid] for jobid in {*chosen, *self.targets}]
        near = {
            self.translator.asset_key(datasetid)
            for plan in plans
            for datasetid in (*plan.reads, *plan.outputs)
        }
        return [
            spec.replace_attributes(deps=[dep for dep in spec.deps if dep.asset_key in near | here])
            for spec in specs
            if spec.key in near
        ]

    def _take(self, jobid: str, definition: dg.AssetsDefinition, by: str) -> None:
        if jobid in self._by:
            raise WrongUse(
                f"Job {jobid!r} is given twice: by {self._by[jobid]} and by {by}. Leave out one."
            )
        self._by[jobid] = by
        self.targets[jobid] = definition

    def _for(self, jobid: str) -> list[ChunkCheck]:
        outputs = self.catalog.jobs[jobid].outputs
        found = [check for check in self._checks if check.dataset in outputs]
        self._checked.update(check.name for check in found)
        return found

    def _registered(self, jobid: str, by: str) -> None:
        """Refuse a job that the tables don't know, with those that they do."""
        if jobid in self.catalog.jobs:
            registered_plan(self.catalog, jobid)
            return
        known = sorted(self.catalog.jobs)
        more = f" and {len(known) - MAX_NAMED_JOBS} more" if len(known) > MAX_NAMED_JOBS else ""
        names = ", ".join(map(printable, known[:MAX_NAMED_JOBS])) + more if known else "none"
        raise WrongUse(
            f"Job {jobid!r}, which {by} is given for, isn't registered (these are: {names}). "
            f"Run: odf job add {typed(jobid)} --in DATASET --out DATASET"
        )

    def _job_of(self, given: dg.AssetsDefinition) -> str | None:
        """The job that assets run; None: they run none of ours."""
        if RESOURCE_KEY not in given.required_resource_keys:
            return None
        outputs = set()
        for spec in given.specs:
            datasetid = spec.metadata.get("opendataflow/dataset", self._keys.get(spec.key))
            if datasetid in self.catalog.datasets and (
                self.translator.asset_key(datasetid) != spec.key
            ):
                raise WrongUse(
                    f"Asset {spec.key.to_user_string()!r} of dataset {datasetid!r} is called "
                    f"{self.translator.asset_key(datasetid).to_user_string()!r} by the translator. "
                    "Give the same translator to @dataflow_assets and to build_definitions."
                )
            outputs.add(datasetid)
        jobids = {spec.metadata.get("opendataflow/job") for spec in given.specs}
        for jobid, plan in self.catalog.jobs.items():
            named = jobids == {jobid}
            unnamed = jobids == {None} and given.node_def.name == self.translator.op_name(jobid)
            if set(plan.outputs) == outputs and (named or unnamed):
                return jobid
        return None


def scripts_by_job(
    scripts: Mapping[str, Script] | Path | None, jobs: Collection[str]
) -> dict[str, list[str]]:
    """By job, the program to run and its arguments; of a folder, those that are called like a job.

    A path that is relative now stays the same file later.
    """
    if scripts is None:
        return {}
    if isinstance(scripts, Mapping):
        return {jobid: _argv(jobid, script) for jobid, script in scripts.items()}
    found: dict[str, list[str]] = {}
    try:
        names = sorted(os.listdir(scripts))
    except OSError as error:
        raise WrongUse(
            f"The folder of scripts {os.fspath(scripts)!r} can't be read: {error.strerror}. Name a "
            "folder, or map jobs to scripts: {'loadbob': './loadbob.sh'}."
        ) from None
    for name in names:
        path = os.path.abspath(os.path.join(scripts, name))
        jobid = os.path.splitext(name)[0]  # as `odf run` and RunJob name a script's job
        if jobid not in jobs or name.endswith("~"):
            continue
        if os.path.isfile(path) and os.access(path, os.X_OK):
            if jobid in found:
                raise WrongUse(
                    f"Job {jobid!r} is given twice: by script {found[jobid][0]} and by script "
                    f"{path}. Leave out one."
                )
            found[jobid] = [path]
    return found


def _argv(jobid: str, script: Script) -> list[str]:
    words = [script] if isinstance(script, str | os.PathLike) else list(script)
    argv = [os.fspath(word) for word in words]
    if not argv or not argv[0]:
        raise WrongUse(f"The script of job {jobid!r} is empty. Name a program.")
    if "/" in argv[0] or isinstance(words[0], os.PathLike):
        argv[0] = os.path.abspath(argv[0])
    return argv


def _keys(given: Any) -> Iterable[dg.AssetKey]:
    if isinstance(given, dg.AssetsDefinition):
        return given.keys
    key = getattr(given, "key", None)
    return [key] if isinstance(key, dg.AssetKey) else []
