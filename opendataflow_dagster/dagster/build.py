"""A code location in one call: from a flow, or from what is registered in the tables."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack

import dagster as dg

from ..errors import WrongUse
from ..flow.catalog import catalog_of
from ..flow.file import FILE
from ..flow.flow import CARRIED, Flow
from ..store.catalog import Catalog
from ..util.text import did_you_mean, typed
from .assets import DECLARED
from .checks import ChunkCheck
from .events import OutsideOptions
from .job_assets import JobOptions, readable_catalog
from .launch import CATCH_UP_SECONDS, CatchUp, today_schedules
from .location import LocationPart, SharedTables
from .operator_jobs import operator_jobs
from .pipeline_assets import ProjectFolder, Projects, tables_of
from .resources import PYSPARK_KEY, RESOURCE_KEY, DataflowResource, LocationRegistration
from .runners import JobRunners, Path, Script
from .step import DEFAULT_BATCH_CHUNKS
from .translator import DataflowTranslator

_log = logging.getLogger("opendataflow_dagster")

IO_MANAGER_KEY = "dataflow_io_manager"
"""The key of the IO manager, so that the project's own stays unchanged."""

ALL = "*"
"""In `elsewhere`: all datasets that no job here writes."""

OWN_JOBS = (None, "dagster")
"""The values of `runs_in` of jobs that the catch-up sensor launches."""


class LaunchOptions(TypedDict, total=False):
    """What watches the tables of a code location, and what launches runs."""

    sensors: bool
    """Whether to add the sensors; True by default."""
    schedules: bool
    """Whether to add schedules for jobs that read `today`; True by default."""
    operators: bool
    """Whether to add the jobs of `operator_jobs`, with which a person resubmits, holds or releases
    chunks in the UI; True by default."""
    automatic: bool
    """Whether what launches runs, the catch-up sensor and the schedules, is on from the start.
    Otherwise you switch it on in the UI."""
    apply: bool | None
    """Whether the reconcile sensor registers what the tables lack of the flow; it changes and
    removes nothing. By default, it registers only in the embedded SQLite."""
    outside: OutsideOptions | None
    """What happens to the runs that show work done outside Dagster."""
    runs_per_job: int
    """How many runs of a job the catch-up sensor keeps at a time; 1 by default."""
    batch: int
    """How many chunks such a run claims; 500 by default."""


def build_definitions(
    dataflow: DataflowResource | None = None,
    *,
    flow: Flow | Path | None = None,
    assets: Iterable[Any] = (),
    functions: Mapping[str, Callable[..., Any]] | None = None,
    scripts: Mapping[str, Script] | Path | None = None,
    options: Mapping[str, JobOptions] = MappingProxyType({}),
    checks: Iterable[ChunkCheck] = (),
    jobs: Iterable[str] | None = None,
    elsewhere: Iterable[str] = (),
    projects: Iterable[ProjectFolder] = (),
    catalog: Catalog | None = None,
    translator: DataflowTranslator | None = None,
    io_manager: Any = None,
    pyspark: Any = None,
    executor: dg.ExecutorDefinition | None = None,
    **launch: Unpack[LaunchOptions],
) -> dg.Definitions:
    """Build definitions for the datasets of a flow, or of the tables, and the jobs that run here.

    A dataset that no job here writes is shown as an external asset. With a flow, no database is
    read until a sensor ticks or a run begins.

    Args:
        dataflow: The tables; by default those that `odf` would use here, or the first project's.
        flow: A flow.yml, or a `Flow`: its jobs run as it says. Jobs that are declared by
            `@dataflow_assets(inputs=…, outputs=…)` are added to it.
        assets: Assets of `@dataflow_assets`, and any other assets of your own.
        functions: By job, the function that runs it: `fn(chunk)` or `fn(chunk, context)`.
        scripts: By job, the script that runs it; or a folder, whose executable files are used if
            they are named like a job.
        options: By job, Dagster's options for its step and assets, such as
            `{"report": {"pool": "few", "retry_policy": dg.RetryPolicy()}}`, see `JobOptions`.
        checks: Checks of the datasets that functions and scripts write.
        jobs: Show only the datasets of these jobs.
        elsewhere: Jobs that another call in this code location runs, and datasets that it shows.
            `["*"]` means all datasets that no job here writes.
        projects: Folders with a project.yml, whose pipelines are jobs and assets, see
            `pipeline_assets`. With them, the steps of a run share one process and its Spark
            session, unless `executor` says otherwise.
        catalog: What is registered, if you have read it already.
        pyspark: Provides the session for functions of DataFrames, for pipelines and for the IO
            manager: a `SparkResource`, or a `LazyPySparkResource` of dagster-pyspark.
        executor: Runs the steps of the location's runs.
        launch: What watches the tables and launches runs, see `LaunchOptions`.

    Raises:
        WrongUse: Arguments contradict each other, name an unknown job, or define an asset twice.
        FlowError: The flow can't be read, or isn't valid.

    Example:
        defs = build_definitions(flow="flow.yml")
    """
    given, others = list(assets), set(elsewhere)
    chosen = None if jobs is None else set(jobs)
    code = _code(flow, given, caller=sys._getframe(1).f_code.co_filename)
    source = _source(code, flow, dataflow, catalog, list(projects))
    runners = JobRunners(
        source.catalog,
        translator or DataflowTranslator(),
        checks,
        pyspark=pyspark is not None,
        command=code.command if code else "",
        options=options,
    )
    source.add_to(runners, chosen, given, functions or {}, scripts)
    definitions = dg.Definitions(
        assets=[*runners.assets, *(() if ALL in others else runners.external(chosen, others))],
        executor=executor or (dg.in_process_executor if source.pipelines else None),
        **_Launch(source, runners, launch).definitions(io_manager, pyspark),
    )
    if code is not None:
        setattr(definitions, CARRIED, code.flow)  # for `odf apply --file`
    return definitions


class _Code(NamedTuple):
    """The jobs that files and Python declare, and the command that registers them."""

    flow: Flow
    command: str


class _Source(NamedTuple):
    """What definitions are built from: the catalog of datasets and jobs, and the tables."""

    dataflow: DataflowResource
    catalog: Catalog
    code: _Code | None
    pipelines: Projects | None

    def add_to(
        self,
        runners: JobRunners,
        chosen: set[str] | None,
        assets: Iterable[Any],
        functions: Mapping[str, Callable[..., Any]],
        scripts: Mapping[str, Script] | Path | None,
    ) -> None:
        """Add what runs jobs; arguments of the call override the flow."""
        if self.code is not None:
            runners.expect(self.code.flow)
        runners.add_given(assets, functions, scripts, chosen)
        if self.code is not None:
            runners.add_flow(self.code.flow, chosen)
        if self.pipelines is not None:
            runners.add_pipelines(self.pipelines)
        runners.check()


def _code(flow: Flow | Path | None, assets: Iterable[Any], *, caller: str) -> _Code | None:
    """Return the flow plus the jobs that assets declare; without a flow, these jobs form one."""
    declared = [found.flow for item in assets if (found := getattr(item, DECLARED, None))]
    if flow is None and not declared:
        return None
    command = typed("odf", "apply", "--file", f"{_shown(caller)}:defs")
    if flow is None:
        flow = Flow(os.path.basename(os.path.dirname(os.path.abspath(caller))) or "flow")
    elif not isinstance(flow, Flow):
        flow = Flow.load(flow)
    if flow.file is not None and not declared:
        path = _shown(flow.file)
        command = "odf apply" if path == FILE else typed("odf", "apply", "--file", path)
    for own in declared:
        flow = _joined(flow, own)
    return _Code(flow, command)


def _shown(path: str) -> str:
    """Return a path as a person in this folder would write it."""
    below = os.path.relpath(path)
    return os.path.abspath(path) if below.startswith(os.pardir) else below


def _joined(flow: Flow, own: Flow) -> Flow:
    """Return a flow extended by the job that is declared in Python, and its datasets."""
    datasets = {dataset.datasetid: dataset for dataset in flow.datasets}
    for dataset in own.datasets:
        if datasets.setdefault(dataset.datasetid, dataset) != dataset:
            raise WrongUse(
                f"Dataset {dataset.datasetid!r} is declared twice, with different values. In one "
                "of the places, refer to it by its id."
            )
    for job in own.jobs:
        if (other := flow.job(job.jobid)) is not None:
            raise WrongUse(
                f"Job {job.jobid!r} is declared twice: by @dataflow_assets(outputs=…) and "
                f"{f'in {other.where}' if other.where else 'in Python'}. Leave out one of them."
            )
    return replace(flow, datasets=list(datasets.values()), jobs=[*flow.jobs, *own.jobs])


def _source(
    code: _Code | None,
    flow: Flow | Path | None,
    dataflow: DataflowResource | None,
    catalog: Catalog | None,
    folders: list[ProjectFolder],
) -> _Source:
    """Choose the source: a flow if one is given, or if all jobs are declared in Python."""
    if flow is not None and catalog is not None:
        raise WrongUse("Definitions are built from a flow or from a catalog. Leave one out.")
    if code is None or (flow is None and (dataflow or catalog or folders)):
        return _from_tables(code, dataflow, catalog, folders)
    return _from_code(code, dataflow, folders)


def _from_code(
    code: _Code,
    dataflow: DataflowResource | None,
    folders: list[ProjectFolder],
) -> _Source:
    """Build from what is declared alone: no database is read."""
    flow = code.flow
    own = {job.jobid: job for job in flow.jobs if job.pipeline is not None}
    folders += dict.fromkeys(os.path.join(flow.folder, job.pipeline or "") for job in own.values())
    engines = {jobid: job.engine for jobid, job in own.items()}
    pipelines = Projects(folders, engines) if folders else None
    known = catalog_of(flow, code.command)
    return _Source(
        dataflow or DataflowResource(),
        known if pipelines is None else pipelines.known_to(known),
        code,
        pipelines,
    )


def _from_tables(
    code: _Code | None,
    dataflow: DataflowResource | None,
    catalog: Catalog | None,
    folders: list[ProjectFolder],
) -> _Source:
    """Build from what is registered, plus the pipelines and the jobs that Python declares.

    With a given `catalog`, the database isn't needed: a code location loads without it.
    """
    if dataflow is None:
        make = catalog is None
        dataflow = tables_of(folders[0], make=make) if folders else DataflowResource()
    known = catalog or readable_catalog(dataflow)
    if code is not None:
        known = known.joined(catalog_of(code.flow))
    for line in known.merge_lines():
        _log.warning("%s", line)
    pipelines = Projects(folders) if folders else None
    if pipelines is not None:
        known = pipelines.known_to(known)
        if catalog is None and not known.unread:
            pipelines.register(dataflow)
    return _Source(dataflow, known, code, pipelines)


class _Launch:
    """What watches a code location's jobs, and launches runs of them."""

    def __init__(self, source: _Source, runners: JobRunners, options: LaunchOptions) -> None:
        if unknown := options.keys() - LaunchOptions.__annotations__:
            name = min(unknown)
            like = did_you_mean(
                name, [*LaunchOptions.__annotations__, *signature(build_definitions).parameters]
            )
            raise WrongUse(f"build_definitions has no parameter {name!r}{like or '.'}")
        self.source, self.runners, self.options = source, runners, options
        self.batch = options.get("batch", DEFAULT_BATCH_CHUNKS)
        self._is_automatic = options.get("automatic", False)

    def definitions(self, io_manager: Any, pyspark: Any) -> dict[str, Any]:
        """Return the resources, and the requested sensors, schedules and jobs."""
        wanted, operators = self.options.get, operator_jobs(self.runners.translator)
        shared = SharedTables.of(self.source.dataflow)
        metadata = shared.add(self._part(), self.source.code.flow.name if self.source.code else "")
        sensors = shared.sensors(automatic=self._is_automatic)
        return {
            "resources": {
                RESOURCE_KEY: shared.dataflow,
                IO_MANAGER_KEY: io_manager or shared.io_manager(pyspark),
                **({PYSPARK_KEY: pyspark} if pyspark is not None else {}),
            },
            "sensors": sensors if wanted("sensors", True) else [],
            "schedules": self._schedules() if wanted("schedules", True) else [],
            "jobs": operators if wanted("operators", True) else [],
            "metadata": metadata,
        }

    def _part(self) -> LocationPart:
        """Return what this call adds to its code location."""
        flow, command = self.source.code or (None, "")
        return LocationPart(
            self.runners.translator,
            self.runners.catalog,
            LocationRegistration(
                flow,
                command,
                self.options.get("apply"),
                self.runners.left_out,
                self.runners.catalog.unread,
            ),
            self.options.get("outside"),
            CatchUp(
                self.source.dataflow,
                self._own_targets(),
                self.runners.translator,
                self.options.get("runs_per_job", 1),
                self.batch,
                CATCH_UP_SECONDS,
                self.source.pipelines,
            ),
        )

    def _schedules(self) -> list[dg.ScheduleDefinition]:
        status = dg.DefaultScheduleStatus
        return today_schedules(
            self.source.dataflow,
            self._own_targets(),
            catalog=self.runners.catalog,
            translator=self.runners.translator,
            batch=self.batch,
            default_status=status.RUNNING if self._is_automatic else status.STOPPED,
        )

    def _own_targets(self) -> dict[str, dg.AssetsDefinition]:
        """What runs the jobs that Dagster starts; the flow may leave some to `odf work` or cron."""
        jobs = self.source.code.flow.jobs if self.source.code else ()
        others = {job.jobid for job in jobs if job.runs_in not in OWN_JOBS}
        return {
            jobid: assets for jobid, assets in self.runners.targets.items() if jobid not in others
        }
