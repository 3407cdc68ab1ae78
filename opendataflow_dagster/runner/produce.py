"""One claimed chunk: produced by a Python function or a script, checked, published, settled."""

import signal
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from typing import Any, Generic, NamedTuple, TypeVar

from ..chunk import (
    WARN,
    Checked,
    Chunk,
    ChunkFailed,
    Result,
    as_results,
    facts_of,
    failed_checks,
    note_failed_checks,
    open_chunk,
    reason_of,
)
from ..errors import DataflowError, Overtaken, SessionError, StaleClaim
from ..explain.answers import ChunkEvidence, Consumed, place_line
from ..model import READY, Claim, Fact, Say, Stop
from ..storage.chunks import publishing
from ..store.claims import (
    GiveBack,
    batch_size,
    give_back,
    give_back_soon,
    interrupt,
    interrupt_soon,
)
from ..store.store import Store, stale_claim
from ..util.text import first_line, printable
from .environment import JobEnvironment
from .heartbeat import Pulse, WaitingClaims
from .run import HAS_FAILED, IS_COMPLETE, LOST, WAS_INTERRUPTED, ChunkOutcome, Runner
from .script import Scripts, code_of_function

Compute = Callable[[Chunk], Result | Mapping[str, Result | None] | None]
Check = Callable[[Chunk], Checked]
Publish = Callable[[Chunk], Result | Mapping[str, Result | None] | None]


class Verdict(NamedTuple):
    """The new status of a chunk whose work failed, and the reason."""

    reason: str
    again: bool | None = None
    """Whether it becomes RESUBMIT, as the judge retries it, or FAILED; None: as its policy says."""


Judge = Callable[[Claim, BaseException | None, str], Verdict]
"""Judges a failure by the claim, the error of the work if there is one, and the reason."""


def by_policy(claim: Claim, error: BaseException | None, reason: str) -> Verdict:
    """Leave it to the job's policy whether a chunk is tried again."""
    return Verdict(reason)


class Produced(NamedTuple):
    """How a chunk ended: READY, FAILED, RESUBMIT, HOLD, or LOST to another worker."""

    claim: Claim
    status: str
    reason: str
    seconds: float
    facts: list[Fact]
    results: dict[str, Result]
    checks: list[Checked]
    retry_in: float | None = None
    chunk: Chunk | None = None
    error: BaseException | None = None
    interrupted: bool = False


def by_error(error: BaseException) -> Stop:
    """Return the interruption that an error represents."""
    return Stop(f"interrupted: {first_line(error)}")


def produce(
    store: Store,
    claim: Claim,
    environment: JobEnvironment,
    compute: Compute,
    *,
    checks: Sequence[Check] = (),
    publish: Publish | None = None,
    pulse: Pulse,
    interrupted: Callable[[BaseException], Stop] = by_error,
    stopping: Callable[[], object] = lambda: None,
    code: str | None = None,
    judge: Judge = by_policy,
) -> Produced:
    """Produce a claimed chunk: compute, check, publish, and settle the claim.

    What the work raises fails the chunk; while we are `stopping` it has interrupted the chunk. What
    isn't an `Exception` (a cancellation) interrupts it too, and is raised again. `interrupted`
    tells why. `judge` says what becomes of a chunk that failed. Errors of the tables are raised as
    they are; so is a `SessionError`, for which the claim is given back.
    """
    started = time.monotonic()
    made = _Work(store, claim, environment, pulse, code, judge)
    pulse.hold(claim)
    try:
        if pulse.lost(claim):  # while it waited for its turn
            raise stale_claim([claim])
        try:
            made.work(compute, checks, publish)
        except SessionError as error:
            give_back(store, [claim], str(error))
            raise
        except Exception as error:
            if store.db.trouble(error) and made.in_tables:
                raise
            made.failed(error)
            if stopping():
                made.stop = interrupted(error)
                made.reason = made.stop.why
        status, retry_in = made.settle()
    except StaleClaim as error:
        return made.produced(LOST, started, reason=str(error))
    except BaseException as error:
        if not isinstance(error, Exception):
            made.cancel(interrupted(error))
        raise
    finally:
        pulse.let_go(claim)
    return made.produced(status, started, retry_in)


class _Work:
    """The state of one chunk's production."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        environment: JobEnvironment,
        pulse: Pulse,
        code: str | None,
        judge: Judge,
    ) -> None:
        self.store, self.claim, self.environment, self.pulse = store, claim, environment, pulse
        self.code, self.judge = code, judge
        self.chunk: Chunk | None = None
        self.results: dict[str, Result] = {}
        self.checks: list[Checked] = []
        self.reason = ""
        self.error: BaseException | None = None
        self.stop: Stop | None = None
        self.overtaken = False
        self.in_tables = False
        """Whether our code asked the tables, not the user's code."""

    def work(self, compute: Compute, checks: Sequence[Check], publish: Publish | None) -> None:
        outputs = self.environment.plan.outputs
        self.in_tables = True
        chunk = self.chunk = open_chunk(self.store, self.claim, self.environment, self.pulse)
        self.in_tables = False
        self.results = as_results(compute(chunk), outputs)
        chunk = self.chunk = chunk.with_results(self.results)
        for result in self.results.values():
            self.checks += result.checks
        for check in checks:
            self.checks.append(check(chunk))
        self.reason = failed_checks(self.checks)
        if self.reason:
            return
        if publish:
            # Computing may have taken hours: without this, a worker that lost its claim would
            # publish over the one that has it now.
            self.in_tables = True
            self.store.confirm(self.claim)
            self.in_tables = False
            more = as_results(publish(chunk), outputs)
            self.results |= {
                datasetid: result for datasetid, result in more.items() if result != Result()
            }
            self.chunk = chunk.with_results(self.results)

    def failed(self, error: Exception) -> None:
        if isinstance(error, StaleClaim) or not self.alive():
            raise error if isinstance(error, StaleClaim) else stale_claim([self.claim])
        self.reason = reason_of(error)
        self.overtaken = isinstance(error, Overtaken)
        cause = error.__cause__ if isinstance(error, ChunkFailed) else error
        self.error = None if isinstance(cause, DataflowError) else cause

    def alive(self) -> bool:
        return not self.pulse.lost(self.claim)

    def settle(self) -> tuple[str, float | None]:
        if not self.reason:
            self.store.finish(self.claim, self.facts())
            return READY, None
        if self.stop:
            return interrupt(self.store, self.claim, self.stop), None
        if self.overtaken:
            return interrupt(self.store, self.claim, Stop(self.reason, hold=True)), None
        self.reason, again = self.judge(self.claim, self.error, self.reason)
        status, retry_in = self.store.fail(
            self.claim, self.reason, may_retry=again is None, at_once=bool(again)
        )
        if any(not check.passed for check in self.checks):
            note_failed_checks(self.store, self.claim, self.facts())
        return status, retry_in

    def cancel(self, stop: Stop) -> None:
        """Settle the claim as interrupted, as far as the database can be reached now."""
        with suppress(Exception):  # who looks after ended runs settles it too, or else its lease
            interrupt_soon(self.store, [self.claim], stop)

    def facts(self) -> list[Fact]:
        return facts_of(self.claim, self.environment, self.results, self.checks, self.code)

    def produced(
        self, status: str, started: float, retry_in: float | None = None, reason: str = ""
    ) -> Produced:
        return Produced(
            self.claim,
            status,
            reason or self.reason,
            time.monotonic() - started,
            self.facts(),
            self.results,
            self.checks,
            retry_in,
            self.chunk,
            self.error,
            self.stop is not None,
        )


def evidence_of(produced: Produced, datasetid: str) -> ChunkEvidence:
    """What is known of a dataset's chunk that has just been produced."""
    claim, chunk = produced.claim, produced.chunk
    [fact] = [fact for fact in produced.facts if fact.datasetid == datasetid]
    inputs = list(chunk.inputs.values()) if chunk else []
    ready = [f"{place.datasetid} READY" for place in inputs]
    ready += ["today"] if chunk and chunk.reads_today else []
    return ChunkEvidence(
        datasetid,
        claim.generation,
        "; ".join(ready) or "it reads nothing",
        [
            Consumed(place.datasetid, place.generation, place.rows, place.fingerprint)
            for place in inputs
        ],
        rows=fact.rows,
        bytes=fact.bytes,
        fingerprint=fact.fingerprint,
        location=place_line(fact.location, chunk.outputs[datasetid].location if chunk else None),
        validated=fact.validated,
        checks=fact.checks,
        schema=fact.schema,
        safe=f"claimed by {claim.owner}, attempt {claim.attempts}",
        code=fact.code,
    )


# --- a job's chunks: one by one, several at once, or many in one go ---


class Maker:
    """Produces chunks with a function; subclasses override single steps."""

    batch = 1
    """How many chunks `prepare` wants to see at once, unless the job's dial says otherwise."""
    threads = 1
    """How many chunks may be computed at once."""
    code: str | None = None
    """The version of the code, recorded with each chunk."""

    def __init__(
        self, compute: Compute, publish: Publish | None = None, checks: Sequence[Check] = ()
    ) -> None:
        self.compute, self.publish, self.checks = compute, publish, checks

    @property
    def works_together(self) -> bool:
        """Whether it takes many chunks at once; else chunks are produced one after another."""
        return self.batch > 1 or self.threads > 1

    def at_once(self, dial: int | None = None) -> int:
        """How many claims to take in one go; the job's dial, where it is set, decides."""
        # Twice the threads, so that none of them waits for the last chunk of a handful.
        return dial or max(self.batch, 2 * self.threads if self.threads > 1 else 1)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Do for many chunks what is cheaper at once; `compute` comes for each of them then.

        What goes wrong here is left to `compute`, so that a bad chunk fails alone.
        """

    def forget(self, claim: Claim) -> None:
        """Let go of what was kept for a chunk, however it ended."""

    def why_stopping(self) -> str | None:
        """What forbids to begin with another chunk, if something does."""

    def interrupt(self) -> None:
        """End the work that other threads are doing; they raise."""

    def close(self) -> None:
        """Let go of everything: there are no more chunks."""


def make(
    store: Store,
    claims: Sequence[Claim],
    environment: JobEnvironment,
    maker: Maker,
    *,
    checks: Sequence[Check] = (),
    pulse: Pulse,
    interrupted: Callable[[BaseException], Stop] = by_error,
    stopping: Callable[[], object] = lambda: None,
    judge: Judge = by_policy,
) -> Generator[Produced]:
    """Produce claimed chunks with `produce`, and settle them one by one.

    An error, a stopping maker, or a caller that stops iterating ends the loop: chunks that haven't
    started are given back. After a cancellation they are given back too, or put on HOLD if a person
    wanted that.
    """
    left = {claim.generation: claim for claim in claims}
    for claim in claims:
        pulse.hold(claim)

    def one(claim: Claim) -> Produced:
        try:
            return produce(
                store,
                claim,
                environment,
                maker.compute,
                checks=[*maker.checks, *checks],
                publish=maker.publish,
                pulse=pulse,
                interrupted=interrupted,
                stopping=lambda: stopping() or maker.why_stopping(),
                code=maker.code,
                judge=judge,
            )
        finally:
            left.pop(claim.generation, None)
            maker.forget(claim)

    try:
        if len(claims) > 1 and maker.batch > 1:
            maker.prepare([open_chunk(store, claim, environment, pulse) for claim in claims])
        if len(claims) > 1 and maker.threads > 1:
            yield from _at_once(store, claims, one, maker)
            return
        for claim in claims:
            if why := maker.why_stopping():
                _return(store, left.values(), maker, why)
                return
            yield one(claim)
    except BaseException as error:
        _hand_back(store, list(left.values()), maker, error, interrupted)
        raise
    finally:
        for claim in claims:
            pulse.let_go(claim)


def _at_once(
    store: Store, claims: Sequence[Claim], one: Callable[[Claim], Produced], maker: Maker
) -> Generator[Produced]:
    def work(claim: Claim) -> Produced:
        try:
            return one(claim)
        finally:
            store.db.drop()  # a thread's own connection ends with its work

    with ThreadPoolExecutor(maker.threads, thread_name_prefix="chunk") as pool:
        futures: list[Future[Produced]] = [pool.submit(work, claim) for claim in claims]
        try:
            for done in as_completed(futures):
                yield done.result()
        except BaseException:
            for future in futures:
                future.cancel()
            maker.interrupt()
            raise


def _return(
    store: Store, claims: Collection[Claim], maker: Maker, why: str, how: GiveBack = give_back
) -> None:
    """Give back chunks that weren't started."""
    for claim in claims:
        maker.forget(claim)
    how(store, list(claims), why)


def _hand_back(
    store: Store,
    claims: Sequence[Claim],
    maker: Maker,
    error: BaseException,
    interrupted: Callable[[BaseException], Stop],
) -> None:
    """Give back, or hold, chunks that hadn't started when an error ended the work.

    Except after an error of the session, a chunk that can't be settled now waits for its lease, so
    that the caller hears of the error itself.
    """
    if isinstance(error, SessionError):
        _return(store, claims, maker, str(error))
        return
    stop = Stop("the run ended before its turn")
    if not isinstance(error, Exception | GeneratorExit):
        stop = interrupted(error)
    elif isinstance(error, Exception):
        stop = Stop(f"{stop.why}: {first_line(error)}")
    with suppress(Exception):
        if stop.hold:
            for claim in claims:
                maker.forget(claim)
            interrupt_soon(store, claims, stop)
        else:
            _return(store, claims, maker, stop.why, give_back_soon)


# --- the runner of chunks that this process computes itself ---


M = TypeVar("M", bound=Maker)


class MakerRunner(Runner, Generic[M]):
    """Produces the chunks of one job with `work`, and prints the same messages as for a script."""

    secrets = False  # they are decrypted where a place is opened
    scripts: Scripts | None = None
    work: M

    def at_once(self) -> int:
        return self.work.at_once(batch_size(self.store, self.jobid))

    def run(
        self,
        claims: Sequence[Claim],
        environment: JobEnvironment,
        scripts: Scripts,
        *,
        stdin_null: bool = False,
    ) -> Generator[tuple[Claim, ChunkOutcome]]:
        """Produce each claimed chunk and settle it; give back chunks that haven't started."""
        self.scripts, scripts.works_here = scripts, True
        with Pulse(self.store, claims[0].owner, say=self.tell) as pulse:
            if len(claims) == 1 or self.work.works_together:
                yield from self._make(claims, environment, pulse)
                return
            with WaitingClaims(
                self.store, claims, stopping=scripts.why_no_more, say=self.tell
            ) as waiting:
                while claim := waiting.next():
                    yield from self._make([claim], self.environment(), pulse)

    def _make(
        self, claims: Sequence[Claim], environment: JobEnvironment, pulse: Pulse
    ) -> Generator[tuple[Claim, ChunkOutcome]]:
        for claim in claims:
            self.tell(f"Launching {self.argv[0]} with dataid {printable(claim.dataid)}")
        making = make(
            self.store,
            claims,
            environment,
            self.work,
            pulse=pulse,
            interrupted=self.interruption,
            stopping=self.stopping,
        )
        with closing(making):
            for produced in making:
                yield produced.claim, self._outcome_of(produced, environment)

    def stopping(self) -> str | None:
        """The signal that is to end the run, if there was one."""
        number = self.scripts.stopping if self.scripts else None
        return None if number is None else signal.Signals(number).name

    def interruption(self, error: BaseException) -> Stop:
        """Why the current work was interrupted: the signal, or else the error."""
        why = self.scripts.why_stopping() if self.scripts else None
        return Stop(why or f"interrupted: {first_line(error)}")

    def _check(self) -> None:
        """What runs was loaded already."""

    def _outcome_of(self, produced: Produced, environment: JobEnvironment) -> ChunkOutcome:
        status, reason = produced.status, produced.reason
        if status == LOST:
            self.tell(reason)
            return ChunkOutcome(1, LOST, None, reason)
        trace: list[str] = []
        if produced.error and status != READY and not produced.interrupted:
            trace = "".join(traceback.format_exception(produced.error)).splitlines()
        failed = WAS_INTERRUPTED if produced.interrupted else HAS_FAILED
        self._tell_end(IS_COMPLETE if status == READY else failed, reason, trace)
        for checked in produced.checks:
            if not checked.passed and checked.severity == WARN:
                self.tell(f"Warning: {checked.name}: {printable(checked.message)}")
        code = 0 if status == READY else 1
        return self._report_status(
            produced.claim,
            environment,
            ChunkOutcome(code, status, produced.retry_in, reason, produced.interrupted),
        )


class FunctionRunner(MakerRunner[Maker]):
    """Runs a Python function that takes a `Chunk`, and publishes what it returns."""

    def __init__(
        self,
        store: Store,
        jobid: str,
        named: str,
        function: Callable[[Chunk], Any],
        *,
        say: Say,
        checks: Sequence[Check] = (),
    ) -> None:
        super().__init__(store, jobid, [named], say=say)
        self.work = Maker(*publishing(store, function), checks)
        self.work.code = code_of_function(function)
