"""Computes and publishes the chunks of a Spark job."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..chunk import Checked, Chunk, ChunkFailed, Place, Result, Unpublished, reason_of
from ..config.settings import Settings
from ..errors import DataflowError, SessionError, StaleClaim
from ..formats import format_of
from ..location import DEFAULT_FORMAT, Folder, Table, chunk_place
from ..model import Claim, Plan, Say
from ..runner.produce import Check, Maker, MakerRunner
from ..runner.run import Outcome, Tell, run_chunks
from ..runner.script import code_of_function
from ..storage.chunks import bounds_of, failing, publish, with_code
from ..store.store import Store
from .batch import ChunkBatch, sweep_folders, with_dataid
from .chunk_files import KnownSchema
from .chunks import StagedFrame, read_chunk_frame, result_of, stage, unchanged
from .evidence import Evidence, LastChunks, confirm, fit
from .expectations import rules_of
from .job import (
    CHUNK,
    CONTEXT,
    FRAME,
    INPUTS,
    SESSION,
    SingleChunkFrame,
    SparkJob,
    outputs_of,
    send_modules,
)
from .postgres import looking
from .progress import Watch, describe_chunks, working_on
from .rules import Rule
from .schema import ANY, MERGE
from .session import (
    ended_meanwhile,
    has_ended,
    in_a_line,
    is_spark_frame,
    let_go,
    spark_session,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SCHEMA_DECLARATION = '@spark_job(schema="{}")'


class RunInterrupted(BaseException):
    """The work of a thread was ended because the whole run was."""


class StagedOutput(NamedTuple):
    """An output of a chunk that is staged, and the results of its rules."""

    staged: StagedFrame
    checked: Sequence[Checked]


class SparkWork(Maker):
    """Computes the chunks of one job in one session, which starts when the first chunk needs it."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        job: SparkJob,
        session: Callable[[], "SparkSession"],
        *,
        format: str = DEFAULT_FORMAT,
        context: Any = None,
        say: Callable[[str], Any] = lambda line: None,
        stopping: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.say, self._watch = say, Watch(say, stopping)
        self.store, self.plan, self.job, self.format = store, plan, job, format
        self._arguments = job.arguments(plan)
        self._session, self._context = session, context
        self.rules = rules_of(job.expect, plan.outputs)
        self.batch, self.threads = job.batch, job.threads
        self.code = code_of_function(job.fn)
        self.keyed = job.batch > 1
        super().__init__(self.compute, self.publish, [self._check(rule) for rule in self.rules])
        self._made: dict[int, dict[str, StagedOutput]] = {}
        self._rest: dict[int, dict[str, Any]] = {}
        self._last: dict[str, LastChunks] = {}
        self._swept: set[str] = set()
        self._lock = threading.Lock()
        self._none: SessionError | None = None
        self._sent_to: SparkSession | None = None

    def spark(self) -> "SparkSession":
        """The session; raises `SessionError` if there is none, which isn't any chunk's fault."""
        with self._lock:  # one session for all threads
            if self._none:  # threads that waited for it don't try again
                raise self._none
            try:
                session = self._session()
                # A new session, after Java has ended, lacks the files that were sent to the last
                # one.
                if session is not self._sent_to:
                    send_modules(session, self.job.fn)
                    self._sent_to = session
                return session
            except (ChunkFailed, StaleClaim):
                raise
            except Exception as error:
                if not isinstance(error, SessionError):
                    cause = error if isinstance(error, DataflowError) else in_a_line(error)
                    reason = str(cause or f"Spark started no session: {reason_of(error)}")
                    error = SessionError(reason).with_traceback(error.__traceback__)
                self._none = error
                raise error from None

    # --- one chunk ---

    def compute(self, chunk: Chunk) -> Mapping[str, Result]:
        """Compute a chunk and stage it, unless a batch already did."""
        if chunk.generation in self._made and self._is_outdated(chunk):
            self.forget(chunk.claim)
        if chunk.generation not in self._made:
            with self.watched([chunk]):
                self._make(chunk)
        made, rest = self._made[chunk.generation], self._rest.get(chunk.generation, {})
        results = {name: value for name, value in rest.items() if isinstance(value, Result)}
        objects = {name: Unpublished() for name in rest if name not in results}
        staged = {name: Unpublished(*result_of(output.staged)) for name, output in made.items()}
        return results | objects | staged

    def publish(self, chunk: Chunk) -> dict[str, Result]:
        """Publish what is staged; the claim is confirmed right before each output."""
        results = {}
        made, rest = self._made[chunk.generation], self._rest.get(chunk.generation, {})
        with ExitStack() as showing:
            showing.enter_context(working_on([chunk.claim]))
            # All are announced before one is shown: a chunk that another thread publishes meanwhile
            # is compared with these, and a refusal comes before anything of this chunk is visible.
            for name, output in made.items():
                showing.enter_context(self._next(chunk, name, output.staged.evidence))
            for name in sorted([*made, *rest], key=lambda name: self._turn(chunk, name)):
                if name in made:
                    staged = made[name].staged
                    with failing():
                        results[name] = result_of(
                            staged, staged.show(lambda: self.store.confirm(chunk.claim))
                        )
                elif not isinstance(obj := rest[name], Result):
                    place = chunk.outputs[name]
                    results[name] = publish(self.store, place, chunk, obj, format=self.format)
        return results

    def _turn(self, chunk: Chunk, datasetid: str) -> int:
        """Return the order in which to publish outputs: first those that can still fail."""
        target = chunk_place(datasetid, chunk.outputs[datasetid].columns, self.format)
        if isinstance(target, Table):
            return 0  # a transaction
        if datasetid not in self._made[chunk.generation]:
            return 1  # written only now
        is_renamed = isinstance(target, Folder) and not format_of(target.format).is_lake
        return 3 if is_renamed else 2

    def forget(self, claim: Claim) -> None:
        self._rest.pop(claim.generation, None)
        for datasetid, made in self._made.pop(claim.generation, {}).items():
            try:
                made.staged.discard()
            except Exception as error:  # Spark may be gone; the run continues with a new session
                self.say(
                    f"Staged files of {datasetid} couldn't be removed (`odf clean` does it later): "
                    f"{in_a_line(error) or reason_of(error)}"
                )

    def why_stopping(self) -> str | None:
        return self._watch.ended()

    def interrupt(self) -> None:
        self._watch.interrupt()

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        ChunkBatch(self, chunks).make()

    def close(self) -> None:
        self._watch.close()
        for generation in list(self._made):
            for made in self._made.pop(generation).values():
                with suppress(Exception):  # `odf clean` removes it later
                    made.staged.discard()

    @contextmanager
    def watched(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Let Spark's jobs be ended from outside, and report in a line what ended them."""
        claims = [chunk.claim for chunk in chunks]
        limit = sum(chunk.claim.time_limit or 0 for chunk in chunks)
        due = time.monotonic() + limit if limit else math.inf

        def over() -> str | None:
            """Return what should end the work on these chunks alone."""
            if time.monotonic() > due:
                return f"stopped by its time limit of {limit:g} s"
            return None if all(chunk.alive() for chunk in chunks) else "recovered by another worker"

        spark = self.spark()
        try:
            with (
                working_on(claims),
                self._watch.block(spark, describe_chunks(claims), over),
                looking(),  # all parts of a read use one snapshot
            ):
                yield
        except (StaleClaim, ChunkFailed, SessionError):
            raise
        except DataflowError as error:
            raise ChunkFailed(with_code(error)) from error
        except Exception as error:
            if self._watch.interrupted:
                raise RunInterrupted(str(error).partition("\n")[0]) from error
            if why := self._watch.ended() or over():
                raise ChunkFailed(why) from None
            if why := ended_meanwhile(spark):
                raise ChunkFailed(why) from None
            if (reason := in_a_line(error)) is None:
                raise
            raise ChunkFailed(reason) from error

    # --- computing and checking ---

    def call(self, chunk: Chunk | None, frames: Mapping[str, "DataFrame"]) -> dict[str, Any]:
        """Return what the function returns, by dataset."""
        given = {CHUNK: chunk, SESSION: self.spark(), CONTEXT: self._context, INPUTS: dict(frames)}
        arguments = {
            name: frames[argument.datasetid] if argument.what == FRAME else given[argument.what]
            for name, argument in self._arguments.items()
        }
        return outputs_of(self.job, self.plan, self.job(**arguments))

    def keep(self, chunk: Chunk, datasetid: str, staged: StagedFrame) -> None:
        """Apply the rules to a staged output, and keep both until it is published."""
        outputs = self._made.setdefault(chunk.generation, {})
        outputs[datasetid] = StagedOutput(staged, [])  # dropped with the chunk if a rule raises
        checked = [
            self._judge(at, staged, chunk)
            for at, rule in enumerate(self.rules)
            if rule.datasetid == datasetid and not rule.is_late
        ]
        outputs[datasetid] = StagedOutput(staged, checked)

    def sweep(self, place: Place) -> None:
        """Remove, once, what a killed batch has left."""
        target = chunk_place(place.datasetid, place.columns, self.format)
        if isinstance(target, Folder) and target.root not in self._swept:
            self._swept.add(target.root)
            sweep_folders(self.store, target.root)

    def extra(self, datasetid: str, df: "DataFrame") -> list[str]:
        """Return the aggregates of the rules, computed in the pass that writes an output."""
        found: list[str] = []
        for at, rule in enumerate(self.rules):
            if rule.datasetid == datasetid and not rule.wrong(df):
                found += rule.observes(f"r{at}_")
        return found

    def fit(self, datasetid: str, dataid: str, df: "DataFrame") -> "DataFrame":
        """The frame with the dataset's schema, as far as the job declares how to get there."""
        return fit(df, self._last_of(datasetid), dataid, self.job.schema, SCHEMA_DECLARATION)

    @property
    def takes_chunk(self) -> bool:
        """Whether the function wants to know which chunk it produces."""
        return any(given.what == CHUNK for given in self._arguments.values())

    def inputs_of(self, chunk: Chunk) -> list[str]:
        """Return the inputs whose frames the function receives."""
        given = self._arguments.values()
        if any(argument.what == INPUTS for argument in given):
            return list(chunk.inputs)
        return list(
            dict.fromkeys(argument.datasetid for argument in given if argument.what == FRAME)
        )

    def _is_outdated(self, chunk: Chunk) -> bool:
        """Whether the published schema has changed since a chunk was staged with others."""
        try:
            for datasetid, made in self._made[chunk.generation].items():
                self._confirm(chunk, datasetid, made.staged.evidence)
        except ChunkFailed:
            return True
        return False

    def _next(
        self, chunk: Chunk, datasetid: str, evidence: Evidence
    ) -> AbstractContextManager[None]:
        return self._last_of(datasetid).next(
            chunk.dataid, evidence, lambda: self._confirm(chunk, datasetid, evidence)
        )

    def _confirm(self, chunk: Chunk, datasetid: str, evidence: Evidence) -> None:
        last, rule = self._last_of(datasetid), self.job.schema
        confirm(evidence.schema, last, chunk.dataid, rule, SCHEMA_DECLARATION, jobid=chunk.jobid)

    def _make(self, chunk: Chunk) -> None:
        inputs = self.inputs_of(chunk)
        with unchanged([chunk], inputs, self.format):
            self._make_of(chunk, inputs)

    def _make_of(self, chunk: Chunk, inputs: Sequence[str]) -> None:
        spark = self.spark()
        frames = {name: self._read(spark, chunk, name) for name in inputs}
        if self.keyed:
            frames = {
                name: with_dataid(
                    df,
                    chunk.dataid,
                    chunk.inputs[name],
                    bounds_of(self.store, name, chunk.dataid),
                    self.format,
                )
                for name, df in frames.items()
            }
        returned = self.call(chunk, frames)
        rest = self._rest.setdefault(chunk.generation, {})
        self._made.setdefault(chunk.generation, {})
        for datasetid, obj in returned.items():
            if not is_spark_frame(obj):
                rest[datasetid] = obj
                continue
            mine = SingleChunkFrame(self.job, datasetid, chunk.dataid, obj) if self.keyed else None
            df = self.fit(datasetid, chunk.dataid, mine.frame if mine else obj)
            extra = self.extra(datasetid, df)
            place = chunk.outputs[datasetid]
            self.sweep(place)
            staged = stage(spark, self.store, chunk, place, df, extra, self.format)
            self.keep(chunk, datasetid, staged)  # to be dropped with the chunk
            if mine:
                mine.check()

    def _read(self, spark: "SparkSession", chunk: Chunk, datasetid: str) -> "DataFrame":
        return read_chunk_frame(
            spark,
            chunk.inputs[datasetid],
            chunk.dataid,
            lambda: chunk.password(datasetid),
            lambda: bounds_of(self.store, datasetid, chunk.dataid),
            self.format,
            self._known(chunk, datasetid),
        )

    def _known(self, chunk: Chunk, datasetid: str) -> KnownSchema | None:
        """Return what is known of an input's schema, unless the job accepts each chunk's own."""
        if self.job.schema in (MERGE, ANY):
            return None
        generation = chunk.inputs[datasetid].generation
        return KnownSchema(self.store, datasetid, chunk.dataid, generation)

    def _judge(self, at: int, staged: StagedFrame, chunk: Chunk) -> Checked:
        rule = self.rules[at]
        last = self._last_of(rule.datasetid).rows(chunk.dataid) if rule.is_late else []
        return rule.judge(f"r{at}_", staged.evidence, staged.frame, last, chunk)

    def _check(self, rule: Rule) -> Check:
        def answer(chunk: Chunk) -> Checked:
            output = self._made.get(chunk.generation, {}).get(rule.datasetid)
            if output and rule.is_late:
                return self._judge(self.rules.index(rule), output.staged, chunk)
            for checked in output.checked if output else ():
                if checked.name == rule.name:
                    return checked
            return Checked(
                rule.name,
                rule.datasetid,
                False,
                "the function returned no DataFrame that could be checked",
                {},
                rule.severity,
            )

        return answer

    def _last_of(self, datasetid: str) -> LastChunks:
        with self._lock:
            return self._last.setdefault(datasetid, LastChunks(self.store, datasetid))


# --- odf run --spark ---


class OwnSession:
    """A session that starts when it is first needed, and again if its Java has ended."""

    def __init__(self, app: str, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._session: SparkSession | None = None

    def get(self, runner: "SparkRunner") -> "SparkSession":
        """Return the session; a runner that is stopping starts no other one."""
        if self._session is not None and has_ended(self._session):
            self.end()
            if name := runner.stopping():
                raise ChunkFailed(f"stopped by {name}")
            runner.tell("Spark has ended: starting another session for the next chunk")
        if self._session is None:
            self._session = spark_session(app=self._app, settings=self._settings)
        return self._session

    def end(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            let_go(session)


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
    checks: Sequence[Check] = (),
) -> Outcome:
    """Run a function for the next chunk of a job, or with `all_chunks` until nothing is left.

    `batch` and `workers` override the job's declared batch and threads, and `batch` overrides the
    job's dial, too. Without a `session`, one starts with the first chunk, and ends at the end.
    """
    if batch is not None:
        job = replace(job, batch=batch, threads=1)
    workers = workers if workers > 1 else job.threads
    job = replace(job, threads=1)  # the workers are the threads
    own = OwnSession(f"odf {jobid}", settings)
    runner = SparkRunner(
        store,
        jobid,
        named,
        job,
        session or (lambda: own.get(runner)),
        say=say,
        environ=environ,
        batch=batch,
    )
    runner.waits = wait
    runner.work.checks = [*runner.work.checks, *checks]
    try:
        return run_chunks(
            runner, all_chunks=all_chunks, workers=workers if all_chunks else 1, progress=progress
        )
    finally:
        runner.work.close()
        own.end()
