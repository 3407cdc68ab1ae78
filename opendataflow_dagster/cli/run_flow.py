"""Jobs as flow.yml describes them (`odf run JOB`, `--all-jobs`), and `odf run --spark`."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from graphlib import TopologicalSorter
from inspect import signature
from shutil import which
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk
from ..config.settings import Settings, load_settings
from ..errors import Refused, WrongUse
from ..flow.flow import FILE, Flow, Job
from ..runner.run import Outcome, run_chunks
from ..spark.job import function_in
from ..store import open_configured, open_from
from ..store.store import Store, refuse_flawed
from ..util.text import did_you_mean, printable, typed
from .fast_run import (
    RunLine,
    complain,
    execute,
    exit_code,
    narrated,
    narrator,
    refuse_own_options,
    run_script,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..runner.produce import Check
    from ..spark.job import SparkJob
    from ..storage.presence import Expectation


OWN = (None, "work")
"""The values of `runs_in` of jobs that `--all-jobs` starts."""

STOPPED_CODE = 128
"""The least exit code of a run that a signal has ended."""


def run_named(line: RunLine) -> int:
    """Run the job of the flow with this name, or else the script."""
    flow = Flow.load(FILE)
    job = flow.job(line.script)
    if job is None:
        if which(line.script) is None:
            like = did_you_mean(line.script, [job.jobid for job in flow.jobs]) or "."
            error = WrongUse(
                f"{FILE} has no job {line.script!r}, and PATH has no such program{like} "
                f"For a script in this folder, run: odf run {typed('./' + line.script)}"
            )
            error.exit_code = 127  # a shell's, as of any script that isn't found
            raise error
        return execute(line)
    refuse_own_options(line)
    return exit_code(_run(job, flow, line), strict=line.strict)


def run_all_jobs(line: RunLine) -> int:
    """Run all that can be claimed of the flow's jobs, in the order in which they depend on
    each other, until nothing is left; the exit code.
    """
    say = narrator(sys.stderr)
    flow = Flow.load(FILE)
    jobs = [job for job in in_order(flow) if job.runs_in in OWN]
    lines = {job.jobid: line._replace(script=job.jobid, all_chunks=True) for job in jobs}
    store = open_configured(line.config)
    total = Outcome(0)
    try:
        while True:
            outcome = Outcome(0)
            for job in jobs:
                if _has_work(store, job):
                    outcome = outcome.and_then(_run_guarded(job, flow, lines[job.jobid]))
                if outcome.code >= STOPPED_CODE:
                    break
            total = total.and_then(outcome)
            if not (outcome.done or outcome.failed) or outcome.code >= STOPPED_CODE:
                break
    finally:
        store.close()
    say(f"All jobs of {printable(flow.name)!r}: done {total.done}, failed {total.failed}")
    return exit_code(total, strict=line.strict)


def in_order(flow: Flow) -> list[Job]:
    """The jobs, each after those that write what it reads."""
    writers: dict[str, list[str]] = {}
    for job in flow.jobs:
        for datasetid in job.outputs:
            writers.setdefault(datasetid, []).append(job.jobid)
    above = {
        job.jobid: [writer for datasetid in job.inputs for writer in writers.get(datasetid, ())]
        for job in flow.jobs
    }
    named = {job.jobid: job for job in flow.jobs}
    return [named[jobid] for jobid in TopologicalSorter(above).static_order()]


def _run(job: Job, flow: Flow, line: RunLine) -> Outcome:
    """Run one job by what the flow says of it."""
    jobid = line.job or job.jobid
    if job.run is not None:
        script, *arguments = script_of(job)
        arguments = (*arguments, *line.arguments)
        line = line._replace(script=script, arguments=arguments, job=jobid)
        return run_script(line, expectations(flow, job))
    if job.python is not None:
        _refuse_arguments(job, line)
        return _run_function(job, flow, line._replace(job=jobid))
    if job.spark is not None:
        _refuse_arguments(job, line)
        many = line.all_chunks or line.workers > 1
        line = line._replace(script=job.spark, job=jobid, all_chunks=many)
        return run_spark(line, None, expectations(flow, job))
    if job.pipeline is not None:
        _refuse_arguments(job, line)
        return _run_pipeline(job, flow, line)
    raise without_script(job)


def script_of(job: Job) -> list[str]:
    """The script of a job and its arguments; a file of this folder needs no `./`."""
    script, *arguments = job.words()
    if "/" not in script and os.path.isfile(script):
        script = f"./{script}"
    return [script, *arguments]


def without_script(job: Job) -> Refused:
    """What says that nothing is known to run a job."""
    return Refused(
        f"Job {job.jobid!r} of {FILE} has no script. Add run: SCRIPT to it in {FILE}, or run: "
        f"odf run --job {typed(job.jobid)} SCRIPT.",
        code="NO_SCRIPT",
    )


def expectations(flow: Flow, job: Job) -> "list[Expectation]":
    """The flow's expectations of the chunks that a job produces."""
    expected = flow.expected(job.jobid)
    if not expected:
        return []
    from ..storage.presence import expectations_of

    return [rule for name, expect in expected.items() for rule in expectations_of(name, expect)]


def _refuse_arguments(job: Job, line: RunLine) -> None:
    if line.arguments:
        what = "function" if job.pipeline is None else "pipeline"
        raise WrongUse(f"Job {job.jobid!r} is a {what}, which takes no arguments.")


def _run_function(job: Job, flow: Flow, line: RunLine) -> Outcome:
    """Run the Python function that the flow names for a job."""
    from ..runner.produce import FunctionRunner

    named, jobid = job.python or "", line.job or job.jobid
    function = load_function(job, flow.folder)
    store = open_configured(line.config)
    many = line.all_chunks or line.workers > 1
    with closing(store), narrated(store, jobid, many) as (progress, say):
        checks = expectations(flow, job)
        runner = FunctionRunner(store, jobid, named, function, say=say, checks=checks)
        runner.waits = line.wait
        return run_chunks(runner, all_chunks=many, workers=line.workers, progress=progress)


def _run_pipeline(job: Job, flow: Flow, line: RunLine) -> Outcome:
    """Run a job's pipeline on the tables of the flow.

    With `--all`, no new run is started: waiting runs are run until none is left.
    """
    from ..pipelines.project import find_project, read_project
    from ..pipelines.run import run_pipeline

    settings = load_settings(line.config)
    project = read_project(find_project(os.path.join(flow.folder, job.pipeline or "")))
    store = open_from(settings)
    with closing(store), narrated(store, job.jobid, line.all_chunks) as (_, say):
        return run_pipeline(
            store,
            project.on(job.engine),
            job.jobid,
            settings,
            say=say,
            environ=os.environ,
            all_chunks=line.all_chunks,
            begins=not line.all_chunks,
        )


def load_function(job: Job, folder: str) -> Callable[[Chunk], Any]:
    """Return the function that a job's `python:` names; of assets, the function behind them."""
    found = function_in(job.python or "", folder, f"Job {job.jobid!r}")
    try:
        signature(found).bind(None)
    except TypeError:
        raise WrongUse(
            f"Job {job.jobid!r} names {job.python}, which must take one argument, the chunk. Write "
            f"def {found.__name__}(chunk), or let Dagster run it: runs_in: dagster."
        ) from None
    return found


def _run_guarded(job: Job, flow: Flow, line: RunLine) -> Outcome:
    """Run one job; what is wrong with it doesn't stop the others."""
    try:
        return _run(job, flow, line)
    except (Refused, WrongUse) as error:
        complain(error)
        return Outcome(1)


def _has_work(store: Store, job: Job) -> bool:
    """Whether anything of a job may be claimed, judged, retried or recovered."""
    if "today" in job.inputs:
        return True
    [(is_queued, has_pending)] = store.db.insist(
        lambda: store.db.run("fill.outlook", jobid=job.jobid)
    )[0]
    return is_queued or has_pending or store.next_change(job.jobid, leases=True) is not None


# `odf run --spark`: a function of DataFrames instead of a script.


def run_spark(line: RunLine, batch: int | None, checks: "Sequence[Check]" = ()) -> Outcome:
    """Run a function of DataFrames instead of a script; `checks` come after its own."""
    from ..spark.job import load_job

    settings = load_settings(line.config)
    started: list[SparkSession] = []

    def begin() -> None:
        from ..spark.session import spark_session

        started.append(spark_session(app=f"odf {line.script}", settings=settings))

    try:
        job, function = load_job(line.script, begin)
        return _run_spark(line, batch, settings, job, line.job or function, checks)
    finally:
        for session in started:
            from ..spark.session import let_go

            let_go(session)


def _run_spark(
    line: RunLine,
    batch: int | None,
    settings: Settings,
    job: "SparkJob",
    jobid: str,
    checks: "Sequence[Check]",
) -> Outcome:
    from ..spark.worker import run_spark_job

    store = open_from(settings)
    with closing(store), narrated(store, jobid, line.all_chunks) as (progress, say):
        refuse_flawed(store, store.plan(jobid))  # before its function is asked what it takes
        return run_spark_job(
            store,
            jobid,
            line.script,
            job,
            settings,
            say=say,
            environ=os.environ,
            all_chunks=line.all_chunks,
            workers=line.workers,
            batch=batch,
            wait=line.wait,
            progress=progress,
            checks=checks,
        )
