"""`odf run --spark`: the next chunks of a job, made by a function of DataFrames."""

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..dataflow.config import Settings
from ..dataflow.environment import JobEnvironment
from ..dataflow.maker import make
from ..dataflow.model import READY, Claim
from ..dataflow.names import printable
from ..dataflow.process import Scripts
from ..dataflow.produce import Produced
from ..dataflow.pulse import Pulse
from ..dataflow.runjob import LOST, Outcome, Result, Runner, Say, Tell, run_chunks, settled
from ..dataflow.store import Store
from .jobs import SparkJob
from .work import SparkWork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkRunner(Runner):
    """Runs one function for chunks of one job, with one session for all of them."""

    secrets = False  # they are decrypted where a place is opened

    def __init__(
        self, store: Store, jobid: str, named: str, job: SparkJob,
        session: Callable[[], "SparkSession"], *, say: Say, environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.store, self.jobid, self.argv, self.environ = store, jobid, [named], environ
        self._say = say
        self._environment: tuple[float, JobEnvironment] | None = None
        self.scripts: Scripts | None = None
        self.work = SparkWork(
            store, store.plan(jobid), job, session, say=self.tell, stopping=self._stopping
        )

    def claim(self, owner: str, k: int = 1) -> tuple[list[Claim], JobEnvironment] | None:
        return super().claim(owner, max(k, self.work.batch))

    def run(
        self, claims: Sequence[Claim], environment: JobEnvironment, scripts: Scripts, *,
        stdin_null: bool = False,
    ) -> Iterator[tuple[Claim, Result]]:  # fmt: skip
        """Make each claimed chunk, and settle it."""
        self.scripts = scripts
        for claim in claims:
            self.tell(f"Launching {self.argv[0]} with dataid {printable(claim.dataid)}")
        with Pulse(self.store, claims[0].owner, say=self.tell) as pulse:
            for produced in make(self.store, claims, environment, self.work, pulse=pulse):
                yield produced.claim, self._told(produced, environment)

    def _told(self, produced: Produced, environment: JobEnvironment) -> Result:
        """Say how a chunk ended, as it is said of a script."""
        status, reason = produced.status, produced.reason
        if status == LOST:
            self.tell(reason)
            return Result(1, LOST, None, reason)
        if status == READY:
            self.tell(f"Job {self.argv[0]} is complete. Updating status")
        else:
            self.tell(f"Job {self.argv[0]} has failed. Updating status")
            if produced.error:
                for line in "".join(traceback.format_exception(produced.error)).splitlines():
                    self._say(line)
            self.tell(f"Reason: {printable(reason)}")
        for checked in produced.checks:
            if not checked.passed and checked.severity != "ERROR":
                self.tell(f"Warning: {checked.name}: {printable(checked.message)}")
        self._say(settled(produced.claim, environment.plan, status))
        if produced.retry_in:
            self.tell(f"The next attempt is due in {produced.retry_in:g} s")
        return Result(0 if status == READY else 1, status, produced.retry_in, reason)

    def _stopping(self) -> str | None:
        number = self.scripts.stopping if self.scripts else None
        return None if number is None else signal.Signals(number).name


def run_spark_job(
    store: Store, jobid: str, named: str, job: SparkJob, settings: Settings, *, say: Say,
    environ: Mapping[str, str], all_chunks: bool = False, workers: int = 1,
    batch: int | None = None, progress: Tell | None = None,
    session: Callable[[], "SparkSession"] | None = None,
) -> Outcome:  # fmt: skip
    """Run a function for the next chunk of a job, or with `all_chunks` until nothing is left.

    `batch` and `workers` beat what the job says of batches and threads. Without a `session`, one is
    started with the first chunk, and ended.
    """
    from .session import spark_session

    if batch is not None:
        job = replace(job, batch=batch, threads=1)
    workers = workers if workers > 1 else job.threads
    job = replace(job, threads=1)  # the workers are the threads
    started: list[SparkSession] = []

    def own_session() -> "SparkSession":
        if not started:
            started.append(spark_session(app=f"odf {jobid}", settings=settings))
        return started[0]

    runner = SparkRunner(store, jobid, named, job, session or own_session, say=say, environ=environ)
    if not all_chunks:
        runner.work.batch = 1  # one chunk is asked for
    try:
        return run_chunks(
            runner, all_chunks=all_chunks, workers=workers if all_chunks else 1, progress=progress
        )
    finally:
        runner.work.close()
        for each in started:
            each.stop()
