"""The body of a step: claim the chunks of a run as the tables allow, produce them, report them."""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import dagster as dg

from ..errors import DataflowError
from ..explain.explain import explain
from ..model import FAILED, PENDING, READY, RESUBMIT, Claim, Stop, read_status
from ..runner.environment import EnvironmentCache, JobEnvironment
from ..runner.heartbeat import Pulse
from ..runner.produce import Maker, Produced, make
from ..runner.run import LOST, nothing_to_do
from ..runner.waiting_claims import WaitingClaims
from ..store.claimable import batch_size
from ..store.claims import interrupt_soon
from ..store.database import briefly
from ..store.operations import resubmit
from ..store.store import PLAN_AGE_SECONDS, Store, new_owner
from ..util.text import first_line, printable
from .checks import ChunkCheck, evaluation
from .events import RESUBMIT_TAG, produced_event, run_log, skipped_event
from .resources import DataflowResource
from .translator import DataflowTranslator

CATCH_UP_TAG = "opendataflow/catch-up"

DIAL_POLL_SECONDS = 2.0
"""Seconds between two looks at a dial that holds back all that is left of a run."""

LEASE_RENEWAL_SECONDS = 60.0
"""Seconds that other workers have, after an outage of the database, to renew their leases."""

LOCK_WAIT_SECONDS = 10.0
"""Seconds for which a chunk is claimed again and again that somebody else works on."""

TERMINATED_STATUSES = dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED
"""The run of a process that something else ended becomes FAILURE, and never one of these."""

Context = dg.AssetExecutionContext | dg.OpExecutionContext


class Claimer:
    """One step that claims chunks of one job."""

    pulse: Pulse

    def __init__(
        self,
        context: Context,
        store: Store,
        jobid: str,
        translator: DataflowTranslator,
        *,
        secrets: bool = False,
    ) -> None:
        self.context, self.store, self.jobid = context, store, jobid
        self.translator = translator
        self.taken: dict[int, tuple[Claim, str]] = {}
        self.runid = context.run.run_id
        self.owner = f"{new_owner()} of run {self.runid}"  # history tells which run it was
        self.waited = False
        self.locked: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.log = run_log(self.runid)
        self.again = is_on(context, RESUBMIT_TAG)
        self._environment = EnvironmentCache(store, jobid, secrets=secrets)
        self._recovered = 0.0

    def environment(self) -> JobEnvironment:
        """The variables of the job, at most a second old; raises what forbids to claim."""
        return self._environment.read()

    def claim(self, dataid: str | None, k: int = 1) -> list[Claim]:
        """Claims; if there are none, lost ones are settled first, which is tried once a second."""
        if self.pulse.dismissed:  # Dagster can force a run to its end, but not its process
            raise dg.Failure(
                f"Run {self.runid} was ended by others (canceled, or taken for dead), so it makes "
                "no more chunks.",
                allow_retries=False,
            )
        claims = self._claim(dataid, k)
        due = time.monotonic() - self._recovered > PLAN_AGE_SECONDS
        if not claims and due and self.pulse.is_steady(LEASE_RENEWAL_SECONDS):
            self._recovered = time.monotonic()
            if self.store.recover(self.jobid):
                claims = self._claim(dataid, k)
        return claims

    def _claim(self, dataid: str | None, k: int) -> list[Claim]:
        found = self.store.claim(self.jobid, owner=self.owner, runid=self.runid, only=dataid, k=k)
        # After a lost connection the store tells of all that this owner has got.
        return [claim for claim in found if claim.generation not in self.taken]

    def ready_already(self, dataid: str, key: str) -> list[dg.AssetMaterialization]:
        """The events of a chunk that is READY already; none if it has to be produced."""
        db = self.store.db
        rows, _ = db.insist(lambda: db.run("produce.outputs", jobid=self.jobid, dataid=dataid))
        ready = {row[0]: row for row in rows if row[2] == READY}
        busy = any(row[2] != READY for row in rows)
        if busy or self.again or set(ready) != set(self.store.plan(self.jobid).outputs):
            return []
        return [
            skipped_event(row, dataid, key, self.translator, self.log) for row in ready.values()
        ]

    def refuse(self, dataid: str) -> list[Claim] | None:
        """Count a chunk as refused, with the reason; or return the claim if it is free now.

        None if it has to wait: for the job's dial, or a few seconds for another worker.
        """
        answer = self.store.db.insist(lambda: explain(self.store, self.jobid, dataid))[0]
        reason = "somebody else changed it at this moment: launch the run again"
        if answer.reasons:
            reason = f"{answer.reasons[0].code}: {answer.reasons[0].text}"
            reason += f". Run: {answer.action}" if answer.action else ""
        if answer.may_run and (claims := self.claim(dataid)):
            return claims
        if answer.reasons and self._passes(answer.reasons[0].code, dataid):
            if not self.waited:
                self.say(f"{printable(dataid)} of job {self.jobid} waits for its turn: {reason}")
            self.waited = True
            return None
        self.refused[dataid] = reason
        self.context.log.error(f"{printable(dataid)} of job {self.jobid} is refused: {reason}")
        return []

    def _passes(self, code: str, dataid: str) -> bool:
        """Whether what forbids a chunk may pass soon: another run may be nearly through with it."""
        since = self.locked.setdefault(dataid, time.monotonic())
        shortly = time.monotonic() - since < LOCK_WAIT_SECONDS
        return code == "AT_CONCURRENCY" or (code == "LOCKED" and shortly)

    def send_back(self, dataid: str) -> None:
        send_back(self.store, self.jobid, dataid, self.runid)

    def give_up(self, error: BaseException) -> None:
        """Settle the claims of this worker that it hasn't started to work on."""
        store = self.store
        store.db.drop()  # the interrupt may have cut off a reply on the old connection
        try:
            stop = self.interrupted(error)
            claims = briefly(store.db, lambda: store._adopt(self.jobid, self.owner, 0.0))
            interrupt_soon(store, claims, stop)
        except Exception as trouble:
            self.say(f"What was in hand is settled later: {first_line(trouble)}")

    def interrupted(self, error: BaseException) -> Stop:
        return interrupted(self.context.instance, self.runid, error)

    def say(self, message: str) -> None:
        with suppress(Exception):  # Dagster's storage may be away too: the work goes on
            self.context.log.warning(message)


def interrupted(instance: dg.DagsterInstance, runid: str, error: BaseException) -> Stop:
    """Whether a person terminated the run of a step, or something else ended its process."""
    with suppress(Exception):  # Dagster's storage may be away
        found = instance.get_run_by_id(runid)
        if found and found.status in TERMINATED_STATUSES:
            return Stop(terminated(runid), hold=True)
    return Stop(f"run {runid} was interrupted ({first_line(error)})")


def send_back(store: Store, jobid: str, dataid: str, runid: str) -> None:
    """Resubmit a chunk that is READY or has failed, for a run with the tag; HOLD stays."""
    rows, _ = store.db.insist(lambda: store.db.run("produce.outputs", jobid=jobid, dataid=dataid))
    statuses = {read_status(row[2]) for row in rows if row[1] == jobid}
    if statuses & {READY, FAILED} and statuses <= {READY, FAILED, RESUBMIT, PENDING}:
        why = f"run {runid} has the tag {RESUBMIT_TAG}"
        resubmit(store, jobid, [dataid], who=f"dagster run {runid}", why=why)


def terminated(runid: str) -> str:
    """Why chunks of a run are on HOLD that was terminated."""
    return f"terminated by a person in Dagster: run {runid}"


def failure_reason(store: Store, error: Exception) -> str | None:
    """A line for an error of the tables; None: it is no such error."""
    if store.db.trouble(error) == "gone":
        return (
            f"The database of OpenDataFlow is away: {first_line(error)}. The run ended; what "
            "was in hand is made again once its lease is over."
        )
    return str(error) if isinstance(error, DataflowError) else None


def requested_partitions(context: Context) -> list[str] | None:
    """The partitions that a run names; None: whatever the tables offer."""
    if is_on(context, CATCH_UP_TAG):
        return None
    if context.has_partition_key:
        return [context.partition_key]
    return list(context.partition_keys) if context.has_partition_key_range else None


def is_on(context: Context, tag: str) -> bool:
    """Whether a run has a tag that says true."""
    return context.run.tags.get(tag, "").lower() == "true"


BATCH_TAG = "opendataflow/batch"
DEFAULT_BATCH_CHUNKS = 500

MAX_NAMED_CHUNKS = 10
"""How many chunks the reason of a failed run names."""

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation


class ScriptStopped(BaseException):
    """A script was ended by a signal that this process got."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_chunks(
    context: dg.AssetExecutionContext,
    dataflow: DataflowResource,
    jobid: str,
    translator: DataflowTranslator,
    maker: Maker,
    checks: Sequence[ChunkCheck] = (),
    *,
    secrets: bool = False,
) -> Iterator[Event]:
    """Make the chunks that a run asks for, or else those that the tables offer; one bad one fails
    itself only, and the run at its end.

    `secrets` puts the passwords into the environment, as scripts expect it.
    """
    try:
        run = _Run(context, dataflow.store, jobid, translator, maker, checks, secrets)
    except DataflowError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    stop: ScriptStopped | None = None
    try:
        with Pulse(
            run.store, run.owner, runid=context.run.run_id, jobid=jobid, say=run.say
        ) as run.pulse:
            keys = requested_partitions(context)
            yield from run.make_offered() if keys is None else run.make_requested(keys)
        run.conclude()
    except (dg.Failure, GeneratorExit):
        raise
    except Exception as error:
        # Failures of ours allow no retry by Dagster: the job's policy in the tables counts the
        # attempts of each chunk, and a retry of the step would start over with all of them.
        reason = failure_reason(run.store, error)
        if reason is None:
            raise
        raise dg.Failure(reason, allow_retries=False) from None
    except BaseException as error:
        run.give_up(error)
        if not isinstance(error, ScriptStopped):
            raise
        stop = error
    finally:
        maker.close()
    if stop:
        signal.raise_signal(stop.number)  # Dagster's handler raises what cancels the run
        raise dg.Failure(f"The run was stopped by {stop}.", allow_retries=False)


class _Run(Claimer):
    """One step at work on one job."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        store: Store,
        jobid: str,
        translator: DataflowTranslator,
        maker: Maker,
        checks: Sequence[ChunkCheck],
        secrets: bool,
    ) -> None:
        super().__init__(context, store, jobid, translator, secrets=secrets)
        self.maker, self.checks = maker, [check.run for check in checks]
        self.produced = self.skipped = 0
        self.failed: dict[str, str] = {}
        self.lost: dict[str, str] = {}

    def make_requested(self, keys: Sequence[str]) -> Iterator[Event]:
        """Produce the chunks of these partitions in order, what a dial holds back last."""
        left, again = list(keys), self.again
        while left:
            held_back: list[str] = []
            for key in left:
                if again:
                    self.send_back(self.translator.dataid(key))
                yield from self._ask(key, held_back)
                if len(self.taken) >= self._at_once():
                    yield from self._make_taken()
            yield from self._make_taken()
            again = False
            if held_back == left:
                time.sleep(DIAL_POLL_SECONDS)
            left = held_back

    def _ask(self, key: str, held_back: list[str]) -> Iterator[Event]:
        """Take the chunk of one partition, unless the tables forbid it."""
        dataid = self.translator.dataid(key)
        self.environment()
        claims = self.claim(dataid)
        if not claims:
            if events := self.ready_already(dataid, key):
                self.skipped += 1
                yield from events
                return
            refused = self.refuse(dataid)
            if refused is None:
                held_back.append(key)
                return
            claims = refused
        self._take(claims, key)

    def _at_once(self) -> int:
        """How many partitions to claim before the first one is made.

        Each is claimed by its name: it pays only for a maker that makes them together.
        """
        return self.maker.at_once(self._dial()) if self.maker.works_together else 1

    def _dial(self) -> int | None:
        return batch_size(self.store, self.jobid)

    def _take(self, claims: Sequence[Claim], key: str) -> None:
        """Keep claims in hand until there are as many as the maker wants at once."""
        for claim in claims:
            self.pulse.hold(claim)
            self.taken[claim.generation] = claim, key

    def _make_taken(self) -> Iterator[Event]:
        """Make the chunks in hand, and those again at once for which the policy grants it."""
        while self.taken:
            claims = [claim for claim, _ in self.taken.values()]
            if len(claims) == 1 or self.maker.works_together:
                yield from self._make(claims)
            else:
                yield from self._make_in_turn(claims)

    def _make_in_turn(self, claims: Sequence[Claim]) -> Iterator[Event]:
        """Make chunks one after the other; what the dials then forbid to begin is given back."""
        mine = {claim.generation for claim in claims}
        try:
            with WaitingClaims(
                self.store,
                claims,
                stopping=lambda: None,
                say=self.say,
                interrupted=self.interrupted,
            ) as waiting:
                while claim := waiting.next():
                    yield from self._make([claim])
                    while again := [
                        one for one, _ in self.taken.values() if one.generation not in mine
                    ]:
                        yield from self._make(again)
        finally:
            for claim in claims:
                self._let_go(claim)

    def _make(self, claims: Sequence[Claim]) -> Iterator[Event]:
        keys = dict(self.taken)
        for produced in make(
            self.store,
            claims,
            self.environment(),
            self.maker,
            checks=self.checks,
            pulse=self.pulse,
            interrupted=self.interrupted,
        ):
            _, key = keys[produced.claim.generation]
            self._let_go(produced.claim)
            yield from self._events(produced, key)
            if produced.status == RESUBMIT and not produced.interrupted:
                self._take(self.claim(produced.claim.dataid), key)

    def _let_go(self, claim: Claim) -> None:
        self.taken.pop(claim.generation, None)
        self.pulse.let_go(claim)

    def make_offered(self) -> Iterator[Event]:
        """Claim and produce what the tables offer now, up to the size of a batch."""
        left = int(self.context.run.tags.get(BATCH_TAG) or DEFAULT_BATCH_CHUNKS)
        while left > 0:
            self.environment()
            claims = self.claim(None, min(left, self.maker.at_once(self._dial())))
            if not claims:
                break
            left -= len(claims)
            for claim in claims:
                self._take([claim], self.translator.partition_key(claim.dataid))
            yield from self._make_taken()

    def _events(self, produced: Produced, key: str) -> Iterator[Event]:
        """Count a chunk that has ended, and report it to Dagster."""
        dataid = produced.claim.dataid
        for chunks in (self.failed, self.lost):
            chunks.pop(dataid, None)
        if produced.status == READY:
            self.produced += 1
            for fact in produced.facts:
                yield produced_event(produced, fact, key, self.translator, self.log)
        elif produced.status == LOST:
            self.pulse.beat()
            self.lost[dataid] = produced.reason
            self.context.log.error(f"{printable(dataid)}: {produced.reason}")
        else:
            retry = produced.retry_in
            reason = produced.reason
            if produced.status == RESUBMIT and not produced.interrupted:
                reason += " (another attempt is granted)"
            elif retry:
                reason += f" (the next attempt is due in {retry:g} s)"
            self.failed[dataid] = reason
            line = f"{printable(dataid)} of job {self.jobid}: {produced.status}: {reason}"
            if produced.error:  # in the text: Dagster doesn't keep `exc_info`
                line += "\n" + "".join(traceback.format_exception(produced.error))
            self.context.log.error(line)
        if produced.status != LOST:
            for checked in produced.checks:
                yield evaluation(checked, self.translator, key)

    def conclude(self) -> None:
        """Log the counts, and fail the run if any chunk wasn't produced."""
        bad = {**self.refused, **self.failed, **self.lost}
        counts = {
            "made": self.produced,
            "skipped": self.skipped,
            "refused": len(self.refused),
            "failed": len(self.failed),
            "lost": len(self.lost),
        }
        summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        summary = summary or nothing_to_do(self.store, self.jobid)
        self.context.log.info(f"{self.jobid}: {summary}")
        if bad:
            named = [
                f"{printable(dataid)}: {bad[dataid]}" for dataid in list(bad)[:MAX_NAMED_CHUNKS]
            ]
            if len(bad) > MAX_NAMED_CHUNKS:
                named.append(f"and {len(bad) - MAX_NAMED_CHUNKS} more")
            every = len(bad) + self.produced + self.skipped
            raise dg.Failure(
                f"{len(bad)} of {every} chunks of job {self.jobid!r} weren't made:\n"
                + "\n".join(named),
                metadata={f"opendataflow/{word}": count for word, count in counts.items()},
                allow_retries=False,
            )


Body = Callable[[dg.AssetExecutionContext], Iterator[Event]]
