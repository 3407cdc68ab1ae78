"""One claimed chunk, made by a Python function or a script, checked, published and settled."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ..chunk import (
    ERROR,
    WARN,
    Checked,
    Chunk,
    ChunkFailed,
    Place,
    Result,
    as_results,
    open_chunk,
    reason_of,
)
from ..errors import DataflowError, Overtaken, SessionError, StaleClaim
from ..explain.answers import Consumed, answers_of_chunk, place_line
from ..model import READY, Claim, Fact, Stop
from ..store.claim_return import give_back, interrupt, interrupt_soon
from ..store.store import Store, taken_over
from ..util.text import first_line, tidy
from .environment import JobEnvironment
from .heartbeat import Pulse
from .run import LOST

__all__ = [
    "ERROR",
    "WARN",
    "Check",
    "Checked",
    "Chunk",
    "ChunkFailed",
    "Compute",
    "Place",
    "Produced",
    "Publish",
    "Result",
    "as_results",
    "five_answers",
    "open_chunk",
    "produce",
    "reason_of",
    "tidy",
]

Compute = Callable[[Chunk], Result | Mapping[str, Result | None] | None]
Check = Callable[[Chunk], Checked]
Publish = Callable[[Chunk], Result | Mapping[str, Result | None] | None]


class Produced(NamedTuple):
    """How a chunk ended: READY, FAILED, RESUBMIT, HOLD, or LOST to somebody else."""

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
    """The interruption that an error tells of, without knowing more."""
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
) -> Produced:
    """Make a claimed chunk: compute, check, publish, and settle the claim.

    What the work raises fails the chunk; while we are `stopping` it has interrupted the chunk. What
    isn't an `Exception` (a cancellation) interrupts it too, and is raised again. `interrupted`
    tells why. Errors of the tables are raised as they are; so is a `SessionError`, for which the
    claim is given back.
    """
    started = time.monotonic()
    made = _Work(store, claim, environment, pulse)
    pulse.hold(claim)
    try:
        if pulse.lost(claim):  # while it waited for its turn
            raise taken_over([claim])
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
        self, store: Store, claim: Claim, environment: JobEnvironment, pulse: Pulse
    ) -> None:
        self.store, self.claim, self.environment, self.pulse = store, claim, environment, pulse
        self.chunk: Chunk | None = None
        self.results: dict[str, Result] = {}
        self.checks: list[Checked] = []
        self.reason = ""
        self.error: BaseException | None = None
        self.stop: Stop | None = None
        self.overtaken = False
        self.in_tables = False
        """Whether it was us who asked the tables, not the user's code."""

    def work(self, compute: Compute, checks: Sequence[Check], publish: Publish | None) -> None:
        outputs = self.environment.plan.outputs
        self.in_tables = True
        chunk = self.chunk = open_chunk(self.store, self.claim, self.environment, self.pulse)
        self.in_tables = False
        self.results = as_results(compute(chunk), outputs)
        chunk = self.chunk = replace(chunk, results=self.results)
        for check in checks:
            self.checks.append(check(chunk))
        wrong = [each for each in self.checks if not each.passed and each.severity == ERROR]
        if wrong:
            told = "; ".join(f"{each.name}: {each.message}".rstrip(": ") for each in wrong)
            self.reason = tidy(f"NOT_VALIDATED: {told}")
            return
        if publish:
            self.in_tables = True
            self.store.confirm(self.claim)
            self.in_tables = False
            more = as_results(publish(chunk), outputs)
            self.results |= {each: told for each, told in more.items() if told != Result()}
            self.chunk = replace(chunk, results=self.results)

    def failed(self, error: Exception) -> None:
        if isinstance(error, StaleClaim) or not self.alive():
            raise error if isinstance(error, StaleClaim) else taken_over([self.claim])
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
        status, retry_in = self.store.fail(self.claim, self.reason)
        if any(not each.passed for each in self.checks):
            self.store.db.insist(self._note)
        return status, retry_in

    def cancel(self, stop: Stop) -> None:
        """Settle the claim as interrupted, as far as the database can be reached now."""
        with suppress(Exception):  # who looks after ended runs settles it too, or else its lease
            interrupt_soon(self.store, [self.claim], stop)

    def facts(self) -> list[Fact]:
        return [
            Fact(
                datasetid,
                self.claim.dataid,
                self.results.get(datasetid, Result()).location
                or self.environment.locations.get(datasetid),
                *self.results.get(datasetid, Result())[:3],
                *_judged([each for each in self.checks if each.datasetid == datasetid]),
                self.results.get(datasetid, Result()).schema,
                self.results.get(datasetid, Result()).replaces,
            )
            for datasetid in self.environment.plan.outputs
        ]

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

    def _note(self) -> None:
        for fact in self.facts():
            if fact.validated is not None:
                self.store.db.change(
                    "produce.note_invalid",
                    jobid=self.claim.jobid,
                    generation=self.claim.generation,
                    **fact._asdict(),
                )


def five_answers(produced: Produced, datasetid: str) -> dict[str, str | None]:
    """The five questions of a chunk that has just been made, from what is at hand."""
    chunk, fact = (
        produced.chunk,
        next(each for each in produced.facts if each.datasetid == datasetid),
    )
    inputs = list(chunk.inputs.values()) if chunk else []
    ready = [f"{each.datasetid} READY" for each in inputs]
    ready += ["today"] if chunk and chunk.reads_today else []
    claim = produced.claim
    return answers_of_chunk(
        "; ".join(ready) or "it reads nothing",
        [Consumed(each.datasetid, each.generation, each.rows, each.fingerprint) for each in inputs],
        validated=fact.validated,
        checks=fact.checks,
        location=place_line(fact.location, chunk.outputs[datasetid].location if chunk else None),
        safe=f"claimed by {claim.owner}, attempt {claim.attempts}",
    )


def _judged(checks: Sequence[Checked]) -> tuple[bool | None, str | None]:
    """Whether a chunk passed what gates it, and the checks in a line."""
    if not checks:
        return None, None
    told = "; ".join(
        f"{each.name} {'passed' if each.passed else 'failed'}"
        + (f": {each.message}" if each.message and not each.passed else "")
        for each in checks
    )
    return all(each.passed or each.severity != ERROR for each in checks), tidy(told)
