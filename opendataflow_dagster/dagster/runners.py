"""What runs the jobs of a code location, job by job: assets, functions, scripts, pipelines."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import dagster as dg

from ..errors import FlowError, WrongUse
from ..flow.flow import Flow, Job
from ..runner.script import CannotStart, check
from ..spark.job import as_spark_job, function_in, is_spark_function
from ..storage.presence import expectations_of
from ..store.catalog import Catalog
from ..util.text import did_you_mean, printable
from .assets import DECLARED, DeclaredAssets, dataflow_assets, script_assets
from .checks import ChunkCheck
from .job_assets import (
    UNREGISTERED,
    JobOptions,
    external_assets,
    one_producer_each,
    refuse_unknown_options,
    what_registers,
    why_unregistered,
)
from .pipeline_assets import Projects, assets_of
from .resources import RESOURCE_KEY
from .translator import DataflowTranslator

_log = logging.getLogger("opendataflow_dagster")

MAX_NAMED_JOBS = 10
"""Jobs that a line names."""

Path = str | os.PathLike[str]
Script = Path | Sequence[Path]


class JobRunners:
    """What this code location runs, job by job."""

    def __init__(
        self,
        catalog: Catalog,
        translator: DataflowTranslator,
        checks: Iterable[ChunkCheck],
        *,
        pyspark: bool = False,
        command: str = "",
        options: Mapping[str, JobOptions] = MappingProxyType({}),
    ) -> None:
        self.catalog, self.translator, self._pyspark = catalog, translator, pyspark
        self.command = command
        """The command that registers the jobs that are declared in code."""
        self.assets: list[Any] = []
        self.targets: dict[str, dg.AssetsDefinition] = {}
        self._by: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Job → why nothing runs it here: it isn't registered."""
        self._checks, self._checked = list(checks), set[str]()
        self._options, self._with_options = dict(options), set[str]()
        for jobid, some in self._options.items():
            refuse_unknown_options(jobid, some)
        self._expected: list[ChunkCheck] = []
        self._keys: dict[dg.AssetKey, str] = {}
        for datasetid in catalog.datasets:
            other = self._keys.setdefault(translator.asset_key(datasetid), datasetid)
            if other != datasetid:
                raise WrongUse(
                    f"The translator gives datasets {other!r} and {datasetid!r} the same asset "
                    f"key, {translator.asset_key(datasetid).to_user_string()!r}. Give each a key "
                    "of its own."
                )

    def add_given(
        self,
        assets: Iterable[Any],
        functions: Mapping[str, Callable[..., Any]],
        scripts: Mapping[str, Script] | Path | None,
        chosen: Collection[str] | None,
    ) -> None:
        """Add what a call names; of a folder of scripts, only those of the chosen jobs."""
        for jobid in sorted(chosen or ()):
            self._is_registered(jobid, "`jobs`")
        for definition in assets:
            self.add_assets(definition)
        for jobid, function in functions.items():
            self.add_function(jobid, function)
        by_job = scripts_by_job(scripts, self.catalog.jobs if chosen is None else chosen)
        for jobid, argv in by_job.items():
            self.add_script(jobid, argv)

    def add_assets(self, given: Any) -> None:
        """Add assets unchanged; those that run a job name it in their metadata.

        Assets of a job that is declared in Python are built again: only now is the domain known.
        """
        if (missing := getattr(given, UNREGISTERED, None)) is not None:
            self.left_out[missing] = why_unregistered(self.catalog, missing)
            return
        declared: DeclaredAssets | None = getattr(given, DECLARED, None)
        if declared is not None:
            catalog = self.catalog._replace(registered_by=self.command)
            given = declared.assets_in(catalog, declared.translator or self.translator)
        self.assets.append(given)
        if isinstance(given, dg.AssetsDefinition):
            jobid = self._job_of(given)
            if jobid is not None:
                self._take(jobid, given, "the assets of @dataflow_assets")

    def expect(self, flow: Flow) -> None:
        """Add what a flow expects of datasets, as checks of whatever produces them here."""
        for dataset in flow.datasets:
            for rule in expectations_of(dataset.datasetid, dataset.expect):
                self._expected.append(
                    ChunkCheck(rule.name, rule, rule.datasetid, True, rule.meaning)
                )

    def add_flow(self, flow: Flow, chosen: Collection[str] | None) -> None:
        """Add the jobs of a flow, except those that the call has given already."""
        for job in flow.jobs:
            if job.jobid in self._by or not (chosen is None or job.jobid in chosen):
                continue
            named = job.python or job.spark
            if not (job.run or named) or self._is_made_by_another(job):
                continue
            try:
                if job.run:
                    self.add_script(job.jobid, command_of(flow, job))
                elif named:
                    function = function_in(named, flow.folder, f"Job {job.jobid!r}")
                    self.add_function(job.jobid, as_spark_job(function) if job.spark else function)
            except WrongUse as error:
                where = f"{job.where}: " if job.where else ""
                raise FlowError(f"{where}{error}") from error.__cause__

    def _is_made_by_another(self, job: Job) -> bool:
        """Whether another job here writes a dataset of this job: an asset has one definition."""
        for other in self.targets:
            if both := set(self.catalog.jobs[other].outputs) & set(job.outputs):
                _log.warning(
                    "Jobs %r and %r both write %r. One of them produces the asset, so Dagster "
                    "doesn't run %r. Its chunks are shown all the same.",
                    other,
                    job.jobid,
                    min(both),
                    job.jobid,
                )
                return True
        return False

    def add_pipelines(self, pipelines: Projects) -> None:
        """Add the assets of pipelines; each is the job of the same name."""
        definitions = assets_of(pipelines, self.catalog, self.translator, pyspark=self._pyspark)
        for jobid, definition in zip(pipelines.shown, definitions, strict=True):
            self._take(jobid, definition, f"pipeline {jobid}")
            self.assets.append(definition)

    def add_function(self, jobid: str, function: Callable[..., Any]) -> None:
        inner = getattr(function, "fn", function)  # a SparkJob wraps its function
        name = getattr(inner, "__name__", type(inner).__name__)
        if not callable(function) or isinstance(function, dg.AssetsDefinition):
            raise WrongUse(
                f"Job {jobid!r} needs a function, but got: {type(function).__name__}. Pass "
                "finished assets in `assets`."
            )
        if not self._is_registered(jobid, f"function {name}"):
            return
        options: dict[str, Any] = {}
        if self._pyspark and is_spark_function(function):
            options["pyspark"] = True
        definition = dataflow_assets(
            job=jobid,
            dataflow=self.catalog,
            translator=self.translator,
            checks=self._for(jobid),
            **options,
            **self._options_of(jobid),
        )(function)
        self._take(jobid, definition, f"function {name}")
        self.assets.append(definition)

    def add_script(self, jobid: str, argv: list[str]) -> None:
        if not self._is_registered(jobid, f"script {argv[0]}"):
            return
        try:
            check(argv[0], os.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            raise WrongUse(f"The script of job {jobid!r} {refusal}.") from None
        definition = script_assets(
            jobid,
            argv,
            dataflow=self.catalog,
            translator=self.translator,
            checks=self._for(jobid),
            **self._options_of(jobid),
        )
        self._take(jobid, definition, f"script {argv[0]}")
        self.assets.append(definition)

    def check(self) -> None:
        """Refuse what Dagster would refuse in a longer message, or not at all."""
        one_producer_each(self.catalog, self.targets)
        seen: dict[dg.AssetKey, Any] = {}
        for definition in self.assets:
            for key in _keys(definition):
                if seen.setdefault(key, definition) is not definition:
                    raise WrongUse(
                        f"Asset {key.to_user_string()!r} is defined twice. Leave out one of them, "
                        "or rename the dataset's asset with a DataflowTranslator."
                    )
        for chunk_check in self._checks:
            if chunk_check.name not in self._checked:
                self._refuse_unused(chunk_check)
        for jobid in self._options.keys() - self._with_options - self.left_out.keys():
            self._refuse_unused_options(jobid)

    def _refuse_unused(self, chunk_check: ChunkCheck) -> None:
        """Refuse a check that applies to nothing here; its dataset may have been left out."""
        dataset = chunk_check.dataset
        of = f"dataset {dataset!r}" if dataset else "no particular dataset"
        line = (
            f"Check {chunk_check.name!r} is for {of}, which no function or script here "
            "writes. Use @dataflow_check(dataset=…), or give it to "
            "@dataflow_assets(checks=…)."
        )
        if not self.left_out:
            raise WrongUse(line)
        _log.warning("%s", line)

    def _options_of(self, jobid: str) -> JobOptions:
        """Return the call's options for a job's step and assets."""
        self._with_options.add(jobid)
        return self._options.get(jobid, {})

    def _refuse_unused_options(self, jobid: str) -> None:
        if by := self._by.get(jobid):
            where = "Give them to @dataflow_assets." if "assets" in by else "It takes none."
            raise WrongUse(f"Options are given for job {jobid!r}, run by {by}. {where}")
        like = did_you_mean(jobid, self.catalog.jobs)
        raise WrongUse(
            f"Options are given for job {jobid!r}, which no function or script here "
            f"runs{like or '.'}"
        )

    def external(
        self, chosen: set[str] | None, elsewhere: Collection[str] = ()
    ) -> list[dg.AssetSpec]:
        """Return the assets of all other datasets, or of those that the chosen jobs read or write.

        Datasets that are produced elsewhere in the location, or by jobs that run there, are
        omitted.
        """
        here = {key for definition in self.assets for key in _keys(definition)}
        produced = {datasetid for key, datasetid in self._keys.items() if key in here}
        plans = self.catalog.jobs
        produced |= {out for name in elsewhere if name in plans for out in plans[name].outputs}
        specs = external_assets(self.catalog, produced | set(elsewhere), self.translator)
        if chosen is None:
            return specs
        plans = [
            self.catalog.jobs[jobid]
            for jobid in {*chosen, *self.targets}
            if jobid in self.catalog.jobs
        ]
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
        return [*found, *(check for check in self._expected if check.dataset in outputs)]

    def _is_registered(self, jobid: str, by: str) -> bool:
        """Whether a job can be an asset; if not, log a warning and load the others."""
        flaw = why_unregistered(self.catalog, jobid)
        if not flaw:
            return True
        if jobid not in self.catalog.jobs and not self.catalog.unread:
            known = sorted(self.catalog.jobs)
            more = f" and {len(known) - MAX_NAMED_JOBS} more" if len(known) > MAX_NAMED_JOBS else ""
            names = ", ".join(map(printable, known[:MAX_NAMED_JOBS])) + more if known else "none"
            like = did_you_mean(jobid, known)
            flaw = (
                f"Job {jobid!r} isn't registered, but {by} is for it{like or '.'} Registered: "
                f"{names}. {what_registers(self.catalog, jobid)}"
            )
        _log.warning("%s. Its assets are left out until it is.", flaw)
        self.left_out[jobid] = flaw
        return False

    def _job_of(self, given: dg.AssetsDefinition) -> str | None:
        """Return the job that assets run; None if they run no registered job."""
        if RESOURCE_KEY not in given.required_resource_keys:
            return None
        outputs = set()
        for spec in given.specs:
            datasetid = spec.metadata.get("opendataflow/dataset", self._keys.get(spec.key))
            if datasetid in self.catalog.datasets and (
                self.translator.asset_key(datasetid) != spec.key
            ):
                raise WrongUse(
                    f"The translator names the asset of dataset {datasetid!r} "
                    f"{self.translator.asset_key(datasetid).to_user_string()!r}, but it is "
                    f"{spec.key.to_user_string()!r}. Give the same translator to @dataflow_assets "
                    "and to build_definitions."
                )
            outputs.add(datasetid)
        jobids = {spec.metadata.get("opendataflow/job") for spec in given.specs}
        for jobid, plan in self.catalog.jobs.items():
            named = jobids == {jobid}
            unnamed = jobids == {None} and given.node_def.name == self.translator.op_name(jobid)
            if set(plan.outputs) == outputs and (named or unnamed):
                return jobid
        return None


def command_of(flow: Flow, job: Job) -> list[str]:
    """The program that a flow names for a job, and its arguments; paths start at the flow."""
    program, *arguments = job.words()
    path = os.path.join(flow.folder, program)
    if "/" in program or os.path.isfile(path):
        program = os.path.normpath(path)
    return [program, *arguments]


def scripts_by_job(
    scripts: Mapping[str, Script] | Path | None, jobs: Collection[str]
) -> dict[str, list[str]]:
    """Return the program of each job and its arguments; of a folder, the scripts named like jobs.

    Relative paths are made absolute, so that they still name the same file later.
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
