"""`odf run --spark`: the next chunks of a job, made by a function of DataFrames."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..chunk import ChunkFailed
from ..config.settings import Settings
from ..model import Say
from ..runner.produce import MakerRunner
from ..runner.run import Outcome, Tell, run_chunks
from ..store.store import Store
from .job import SparkJob
from .worker import SparkWork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkRunner(MakerRunner[SparkWork]):
    """Runs one function for chunks of one job, with one session for all of them."""

    def __init__(
        self,
        store: Store,
        jobid: str,
        named: str,
        job: SparkJob,
        session: Callable[[], "SparkSession"],
        *,
        say: Say,
        environ: Mapping[str, str],
        batch: int | None = None,
    ) -> None:
        self._batch = batch
        super().__init__(store, jobid, [named], say=say, environ=environ)
        self.work = SparkWork(
            store, store.plan(jobid), job, session, say=self.tell, stopping=self.stopping
        )

    def at_once(self) -> int:
        return self._batch or super().at_once()


def run_spark_job(
    store: Store,
    jobid: str,
    named: str,
    job: SparkJob,
    settings: Settings,
    *,
    say: Say,
    environ: Mapping[str, str],
    all_chunks: bool = False,
    workers: int = 1,
    batch: int | None = None,
    wait: bool = False,
    progress: Tell | None = None,
    session: Callable[[], "SparkSession"] | None = None,
) -> Outcome:
    """Run a function for the next chunk of a job, or with `all_chunks` until nothing is left.

    `batch` and `workers` beat what the job says of batches and threads, and `batch` the job's dial
    too. Without a `session`, one is
    started with the first chunk, and ended; another one, if it ends before.
    """
    from .session import spark_session
    from .session_health import has_ended, let_go

    if batch is not None:
        job = replace(job, batch=batch, threads=1)
    workers = workers if workers > 1 else job.threads
    job = replace(job, threads=1)  # the workers are the threads
    started: list[SparkSession] = []

    def own_session() -> "SparkSession":
        if started and has_ended(started[-1]):
            let_go(started.pop())
            if name := runner.stopping():
                raise ChunkFailed(f"stopped by {name}")
            runner.tell("Spark has ended: another session is started for the next chunk")
        if not started:
            started.append(spark_session(app=f"odf {jobid}", settings=settings))
        return started[0]

    runner = SparkRunner(
        store, jobid, named, job, session or own_session, say=say, environ=environ, batch=batch
    )
    runner.waits = wait
    try:
        return run_chunks(
            runner, all_chunks=all_chunks, workers=workers if all_chunks else 1, progress=progress
        )
    finally:
        runner.work.close()
        for each in started:
            let_go(each)
