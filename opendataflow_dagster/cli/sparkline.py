"""`odf run --spark`: a function of DataFrames in the place of a script."""

import os

from ..dataflow.config import load_settings
from ..dataflow.opening import open_from
from ..spark.jobs import load_job
from ..spark.runs import run_spark_job
from .runline import RunLine, exit_code, narration


def execute_spark(line: RunLine, batch: int | None) -> int:
    """Run, and return the exit code."""
    settings = load_settings(line.config)
    job, function = load_job(line.script)
    store, jobid = open_from(settings), line.job or function
    progress, say = narration(store, jobid, line.all_chunks)
    try:
        outcome = run_spark_job(
            store, jobid, line.script, job, settings, say=say, environ=os.environ,
            all_chunks=line.all_chunks, workers=line.workers, batch=batch, progress=progress,
        )  # fmt: skip
        if progress:
            progress.end()
    finally:
        store.close()
    return exit_code(outcome, strict=line.strict)
