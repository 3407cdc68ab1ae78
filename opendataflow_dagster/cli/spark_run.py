"""`odf run --spark`: a function of DataFrames instead of a script."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config.settings import Settings, load_settings
from ..runner.produce import Check
from ..runner.run import Outcome
from ..store import open_from
from ..store.store import refuse_flawed
from .fast_run import RunLine, narration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..spark.job import SparkJob


def run_spark(line: RunLine, batch: int | None, checks: Sequence[Check] = ()) -> Outcome:
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
    checks: Sequence[Check],
) -> Outcome:
    from ..spark.worker import run_spark_job

    store = open_from(settings)
    try:
        refuse_flawed(store, store.plan(jobid))  # before its function is asked what it takes
        progress, say = narration(store, jobid, line.all_chunks)
        outcome = run_spark_job(
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
        if progress:
            progress.end()
    finally:
        store.close()
    return outcome
