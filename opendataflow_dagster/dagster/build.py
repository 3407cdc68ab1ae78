"""Everything in one call: a code location made of what the tables say."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from ..errors import DataflowError, NoDatabase, WrongUse
from ..runner.script import CannotStart, check
from ..spark.job import is_spark_function
from ..store.catalog import Catalog
from ..util.text import first_line, printable, typed
from .assets import (
    PYSPARK,
    RESOURCE,
    dataflow_assets,
    external_assets,
    one_producer_each,
    registered,
    script_assets,
)
from .catch_up_sensor import catch_up_sensor
from .checks import ChunkCheck
from .io_manager import DataflowIOManager
from .pipeline_assets import Folder, Projects, assets_of, tables_of
from .resources import DataflowResource
from .schedules import today_schedules
from .sensors import reconcile_sensor, settlement_sensors
from .translator import DataflowTranslator

NAMED = 10
"""How many jobs an error names."""

Path = str | os.PathLike[str]
Script = Path | Sequence[Path]


class Runners:
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
        for each in catalog.datasets:
            other = self._keys.setdefault(translator.asset_key(each), each)
            if other != each:
                raise WrongUse(
                    f"Datasets {other!r} and {each!r} are both called "
                    f"{translator.asset_key(each).to_user_string()!r} by the translator. Give each "
                    "a key of its own."
                )

    def add_assets(self, given: Any) -> None:
        """Take assets as they are; those that run a job are told by what they say of themselves."""
        self.assets.append(given)
        if isinstance(given, dg.AssetsDefinition):
            jobid = self._job_of(given)
            if jobid is not None:
                self._take(jobid, given, "the assets of @dataflow_assets")

    def add_pipeline(self, jobid: str, made: dg.AssetsDefinition) -> None:
        """Take the asset of a pipeline, which is the job called as it."""
        self._take(jobid, made, f"pipeline {jobid}")
        self.assets.append(made)

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
        made = dataflow_assets(
            job=jobid,
            dataflow=self.catalog,
            translator=self.translator,
            checks=self._for(jobid),
            **options,
        )(function)
        self._take(jobid, made, f"function {name}")
        self.assets.append(made)

    def add_script(self, jobid: str, argv: list[str]) -> None:
        self._registered(jobid, f"script {argv[0]}")
        try:
            check(argv[0], os.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            raise WrongUse(f"The script of job {jobid!r} {refusal}.") from None
        made = script_assets(
            jobid, argv, dataflow=self.catalog, translator=self.translator, checks=self._for(jobid)
        )
        self._take(jobid, made, f"script {argv[0]}")
        self.assets.append(made)

    def check(self) -> None:
        """Refuse what Dagster would refuse in more words, or not at all."""
        one_producer_each(self.catalog, self.targets)
        seen: dict[dg.AssetKey, Any] = {}
        for each in self.assets:
            for key in _keys(each):
                if seen.setdefault(key, each) is not each:
                    raise WrongUse(
                        f"Asset {key.to_user_string()!r} is defined twice. Leave one of them out, "
                        "or rename the dataset's by a DataflowTranslator."
                    )
        for each in self._checks:
            if each.name not in self._checked:
                of = f"dataset {each.dataset!r}" if each.dataset else "no dataset in particular"
                raise WrongUse(
                    f"Check {each.name!r} is for {of}, which no function or script here writes. "
                    "Use @dataflow_check(dataset=…), or give it to @dataflow_assets(checks=…)."
                )

    def elsewhere(self, shown: set[str] | None) -> list[dg.AssetSpec]:
        """The assets of all other datasets, or of those that have to do with some jobs."""
        here = {key for each in self.assets for key in _keys(each)}
        made = {datasetid for key, datasetid in self._keys.items() if key in here}
        specs = external_assets(self.catalog, made, self.translator)
        if shown is None:
            return specs
        plans = [self.catalog.jobs[jobid] for jobid in {*shown, *self.targets}]
        near = {
            self.translator.asset_key(each)
            for plan in plans
            for each in (*plan.reads, *plan.outputs)
        }
        return [
            spec.replace_attributes(deps=[dep for dep in spec.deps if dep.asset_key in near | here])
            for spec in specs
            if spec.key in near
        ]

    def _take(self, jobid: str, made: dg.AssetsDefinition, by: str) -> None:
        if jobid in self._by:
            raise WrongUse(
                f"Job {jobid!r} is given twice: by {self._by[jobid]} and by {by}. Leave out one."
            )
        self._by[jobid] = by
        self.targets[jobid] = made

    def _for(self, jobid: str) -> list[ChunkCheck]:
        outputs = self.catalog.jobs[jobid].outputs
        found = [each for each in self._checks if each.dataset in outputs]
        self._checked.update(each.name for each in found)
        return found

    def _registered(self, jobid: str, by: str) -> None:
        """Refuse a job that the tables don't know, with those that they do."""
        if jobid in self.catalog.jobs:
            registered(self.catalog, jobid)
            return
        known = sorted(self.catalog.jobs)
        more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
        names = ", ".join(map(printable, known[:NAMED])) + more if known else "none"
        raise WrongUse(
            f"Job {jobid!r}, which {by} is given for, isn't registered (these are: {names}). "
            f"Run: odf job add {typed(jobid)} --in DATASET --out DATASET"
        )

    def _job_of(self, given: dg.AssetsDefinition) -> str | None:
        """The job that assets run; None: they run none of ours."""
        if RESOURCE not in given.required_resource_keys:
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
        told = {spec.metadata.get("opendataflow/job") for spec in given.specs}
        for jobid, plan in self.catalog.jobs.items():
            named = told == {jobid}
            unnamed = told == {None} and given.node_def.name == self.translator.op_name(jobid)
            if set(plan.outputs) == outputs and (named or unnamed):
                return jobid
        return None


def by_job(
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
