"""The body of a step: claim the chunks of a run as the tables allow, produce and report them."""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import dagster as dg

from ..errors import DataflowError, Refused
from ..explain.explain import Staleness, explain, staleness
from ..model import (
    FAILED,
    PENDING,
    READY,
    RESUBMIT,
    RUN_SIGNATURE,
    Claim,
    Stop,
    new_owner,
    read_status,
)
from ..runner.environment import EnvironmentCache, JobEnvironment
from ..runner.heartbeat import Pulse, WaitingClaims
from ..runner.produce import Maker, Produced, make
from ..runner.run import LOST, nothing_to_do
from ..store.claims import batch_size, dial, interrupt_soon
from ..store.database import briefly
from ..store.operations import resubmit
from ..store.store import PLAN_AGE_SECONDS, Store
from ..util.text import first_line, first_of, printable
from .checks import ChunkCheck, evaluation
from .events import RESUBMIT_TAG
from .resources import DataflowResource
from .retries import StepRetries, retry_clause
from .translator import DataflowTranslator
from .versions import ChunkEvents, Context, stale_evaluations

CATCH_UP_TAG = "opendataflow/catch-up"
"""The tag of a run that claims any chunks that the tables offer."""

BATCH_TAG = "opendataflow/batch"
"""The tag that limits how many chunks such a run claims."""

DEFAULT_BATCH_CHUNKS = 500

MAX_NAMED_CHUNKS = 10
"""Chunks that the reason of a failed run names."""

DIAL_POLL_SECONDS = 2.0
"""Seconds between two reads of a dial that holds back all remaining chunks of a run."""

LEASE_RENEWAL_SECONDS = 60.0
"""Seconds that other workers get to renew their leases after an outage of the database."""

LOCK_WAIT_SECONDS = 10.0
"""Seconds for which a run keeps trying to claim a chunk that another worker holds."""

AUTOMATION_TAGS = frozenset(
    {
        "dagster/from_automation_condition",
        "dagster/auto_materialize",
        "dagster/sensor_name",
        "dagster/schedule_name",
    }
)
"""The tags of runs, and of backfills' runs, that no person launched."""

BACKFILL_TAG = "dagster/backfill"

TERMINATED_STATUSES = dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED
"""The statuses of a run that a person terminated; a run whose process died becomes FAILURE."""

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation
Body = Callable[[dg.AssetExecutionContext, Mapping[str, Any]], Iterator[Event]]


class Claimer:
    """A step that claims chunks of one job."""

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
        self.runid = context.run.run_id
        self.owner = f"{new_owner()} of run {self.runid}"  # so that history names the run
        self.events = ChunkEvents(context, store, translator)
        self.resubmits = is_on(context, RESUBMIT_TAG)
        self.claims: dict[int, tuple[Claim, str]] = {}
        """By generation: claims that aren't settled yet, each with its partition key."""
        self.refused: dict[str, str] = {}
        self._locked_since: dict[str, float] = {}
        self._said_waiting = False
        self._environment = EnvironmentCache(store, jobid, secrets=secrets)
        self._recovered_at = 0.0

    def environment(self) -> JobEnvironment:
        """The variables of the job, at most a second old; raises what forbids claiming."""
        return self._environment.read()

    def claim(self, dataid: str | None, k: int = 1) -> list[Claim]:
        """Claim chunks; if none is free, settle lost claims and try again, at most once a second.

        During an outage of the database, other workers can't renew their leases either. For
        `LEASE_RENEWAL_SECONDS` after it, no claim counts as lost: its worker may be alive.
        """
        if self.pulse.dismissed:  # Dagster can end a run by force, but not its process
            raise dg.Failure(
                f"Dagster ended run {self.runid} (canceled, or considered dead), so it produces no "
                "more chunks.",
                allow_retries=False,
            )
        is_due = time.monotonic() - self._recovered_at > PLAN_AGE_SECONDS
        recovers = is_due and self.pulse.is_steady(LEASE_RENEWAL_SECONDS)
        claim = self.store.claim_or_recover if recovers else self.store.claim
        found = claim(self.jobid, owner=self.owner, runid=self.runid, only=dataid, k=k)
        if recovers and not found:
            self._recovered_at = time.monotonic()
        # If a connection broke before the answer to a claim arrived, the store answers the next
        # claim with all that this owner holds.
        return [claim for claim in found if claim.generation not in self.claims]

    def ready_already(self, dataid: str) -> list[tuple]:
        """Return the rows of a chunk that is READY already; none if it has to be produced."""
        db = self.store.db
        rows, _ = db.insist(lambda: db.run("produce.outputs", jobid=self.jobid, dataid=dataid))
        ready = {row[0]: row for row in rows if row[2] == READY}
        busy = any(row[2] != READY for row in rows)
        if busy or self.resubmits or set(ready) != set(self.store.plan(self.jobid).outputs):
            return []
        return list(ready.values())

    def staleness(self, dataid: str) -> Staleness:
        """Whether a READY chunk is stale."""
        return self.store.db.insist(lambda: staleness(self.store, self.jobid, dataid))[0]

    def is_made_again(self, stale: Staleness) -> bool:
        """Whether this run produces a READY chunk again, as the job's dial `on_stale` says."""
        if not (stale.line and stale.may_be_made):
            return False
        word = dial(self.store, self.jobid, "on_stale") or "auto"
        return self._is_wanted if word == "auto" else word == "remake"

    @cached_property
    def _is_wanted(self) -> bool:
        """Whether an automation requested the chunks, or a person requested one chunk alone."""
        return is_by_automation(self.context) or is_for_one_chunk(self.context)

    def make_again(self, dataid: str, stale: Staleness) -> list[Claim]:
        """Claim a stale chunk; returns none if the tables refuse to produce it again."""
        self.context.log.info(
            f"{printable(dataid)} is stale, so it is produced again: {stale.line}"
        )
        why = f"it is stale, and run {self.runid} requested it"
        try:
            resubmit(self.store, self.jobid, [dataid], who=RUN_SIGNATURE + self.runid, why=why)
        except Refused as refusal:
            self.say(f"{printable(dataid)} can't be produced again: {refusal}")
        return self.claim(dataid)

    def refuse(self, dataid: str) -> list[Claim] | None:
        """Count a chunk as refused, with the reason; or return its claim if it has become free.

        Returns None if it has to wait: for the job's dial, or a few seconds for another worker.
        """
        answer = self.store.db.insist(lambda: explain(self.store, self.jobid, dataid))[0]
        reason = "another worker changed it at this moment: launch the run again"
        if answer.reasons:
            reason = f"{answer.reasons[0].code}: {answer.reasons[0].text}"
            reason += f". Run: {answer.action}" if answer.action else ""
        if answer.may_run and (claims := self.claim(dataid)):
            return claims
        if answer.reasons and self._may_pass_soon(answer.reasons[0].code, dataid):
            if not self._said_waiting:
                self.say(f"{printable(dataid)} of job {self.jobid} waits for its turn: {reason}")
            self._said_waiting = True
            return None
        self.refused[dataid] = reason
        self.context.log.error(f"{printable(dataid)} of job {self.jobid} is refused: {reason}")
        return []

    def _may_pass_soon(self, code: str, dataid: str) -> bool:
        """Whether waiting helps: another run may be about to finish the chunk."""
        since = self._locked_since.setdefault(dataid, time.monotonic())
        is_recent = time.monotonic() - since < LOCK_WAIT_SECONDS
        return code == "AT_CONCURRENCY" or (code == "LOCKED" and is_recent)

    def send_back(self, dataid: str) -> None:
        send_back(self.store, self.jobid, dataid, self.runid)

    def give_up(self, error: BaseException) -> None:
        """Settle the claims that this worker hasn't started to work on."""
        store = self.store
        store.db.drop()  # the interrupt may have cut off a reply on this connection
        try:
            stop = self.interrupted(error)
            claims = briefly(store.db, lambda: store._adopt(self.jobid, self.owner, 0.0))
            interrupt_soon(store, claims, stop)
        except Exception as trouble:
            self.say(f"Unfinished chunks are settled later: {first_line(trouble)}")

    def interrupted(self, error: BaseException) -> Stop:
        return interrupted(self.context.instance, self.runid, error)

    def say(self, message: str) -> None:
        with suppress(Exception):  # Dagster's storage may be away too: keep working
            self.context.log.warning(message)


def interrupted(instance: dg.DagsterInstance, runid: str, error: BaseException) -> Stop:
    """Return why a step stops: a person terminated its run, or something ended its process."""
    if is_terminated(instance, runid):
        return Stop(terminated(runid), hold=True)
    return Stop(f"run {runid} was interrupted ({first_line(error)})")


def is_terminated(instance: dg.DagsterInstance, runid: str) -> bool:
    """Whether a person terminated a run, as far as Dagster's storage answers."""
    with suppress(Exception):
        found = instance.get_run_by_id(runid)
        return bool(found and found.status in TERMINATED_STATUSES)
    return False


def send_back(store: Store, jobid: str, dataid: str, runid: str) -> None:
    """Resubmit a READY or FAILED chunk for a run with the tag; a chunk on HOLD stays there."""
    rows, _ = store.db.insist(lambda: store.db.run("produce.outputs", jobid=jobid, dataid=dataid))
    statuses = {read_status(row[2]) for row in rows if row[1] == jobid}
    if statuses & {READY, FAILED} and statuses <= {READY, FAILED, RESUBMIT, PENDING}:
        why = f"run {runid} has the tag {RESUBMIT_TAG}"
        resubmit(store, jobid, [dataid], who=RUN_SIGNATURE + runid, why=why)


def terminated(runid: str) -> str:
    """The reason of chunks on HOLD because a person terminated their run."""
    return f"terminated by a person in Dagster: run {runid}"


def failure_reason(store: Store, error: Exception) -> str | None:
    """Return a line for an error of the tables; None for any other error."""
    if store.db.trouble(error) == "gone":
        return (
            f"The database of OpenDataFlow is away: {first_line(error)}. The run ended; its "
            "unfinished chunks are produced again when their leases expire."
        )
    return str(error) if isinstance(error, DataflowError) else None


def requested_partitions(context: Context) -> list[str] | None:
    """The partitions that a run names; None: any that the tables offer."""
    if is_on(context, CATCH_UP_TAG):
        return None
    if context.has_partition_key:
        return [context.partition_key]
    return list(context.partition_keys) if context.has_partition_key_range else None


def is_on(context: Context, tag: str) -> bool:
    """Return whether a tag of a run is true."""
    return context.run.tags.get(tag, "").lower() == "true"


def is_by_automation(context: Context) -> bool:
    """Whether a condition, a sensor or a schedule launched a run, not a person."""
    return not AUTOMATION_TAGS.isdisjoint(context.run.tags)


def is_for_one_chunk(context: Context) -> bool:
    """Whether a run was launched for one partition that isn't part of a larger backfill."""
    if len(requested_partitions(context) or ()) != 1:
        return False
    backfill_id = context.run.tags.get(BACKFILL_TAG)
    return backfill_id is None or _partitions_of_backfill(context, backfill_id) == 1


def _partitions_of_backfill(context: Context, backfill_id: str) -> int | None:
    """How many partitions of this step's assets a backfill has; None if that is unknown."""
    with suppress(Exception):  # how Dagster stores a backfill isn't public
        backfill: Any = context.instance.get_backfill(backfill_id)
        subsets = backfill.asset_backfill_data.target_subset.partitions_subsets_by_asset_key
        return max(len(subsets[key]) for key in context.selected_asset_keys if key in subsets)
    return None


class ScriptStopped(BaseException):
    """A signal to this process ended a script."""

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
    """Produce the chunks that a run requests, or else those that the tables offer.

    A failed chunk doesn't stop the others; it fails the run at the end.
    `secrets` adds passwords to the environment, as scripts expect.
    """
    try:
        run = _Run(context, dataflow.store, jobid, translator, maker, checks, secrets)
        keys = run.requested_keys()
    except DataflowError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    stop: ScriptStopped | None = None
    try:
        with Pulse(
            run.store, run.owner, runid=context.run.run_id, jobid=jobid, say=run.say
        ) as run.pulse:
            yield from run.produce_offered() if keys is None else run.produce_requested(keys)
            run.retries.keep(run.retries.requests, run.claim, run.pulse)
        yield from run.stale_evaluations()
        run.conclude()
    except (dg.Failure, dg.RetryRequested, GeneratorExit):
        raise
    except Exception as error:
        # Dagster must not retry our failures: the job's policy in the tables counts the attempts of
        # each chunk, and a retry of the step would start over with all of them.
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
    """A step that produces chunks of one job and counts how each ended."""

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
        self.retries = StepRetries(context, store)
        self.produced = self.skipped = self.failed_before = 0
        self.failed: dict[str, str] = {}
        self.lost: dict[str, str] = {}

    def requested_keys(self) -> list[str] | None:
        """The partitions to produce; None: any that the tables offer.

        If a run that takes what is offered is retried, the retry produces only the chunks it kept.
        New ones would get retries of their own, in the next run.
        """
        # With a `retry_policy`, Dagster retries even an interrupted step.
        if self.retries.number and is_terminated(self.context.instance, self.runid):
            raise dg.Failure(f"{terminated(self.runid)}. It is over.", allow_retries=False)
        kept = self.retries.take_back(self.jobid)
        keys = requested_partitions(self.context)
        if keys is None and self.retries.failed_before is not None:
            self.failed_before = self.retries.failed_before
            return [self.translator.partition_key(dataid) for dataid in kept]
        return keys

    def produce_requested(self, keys: Sequence[str]) -> Iterator[Event]:
        """Produce the chunks of these partitions in order, except that held back ones come last."""
        reported = self._reported(keys)
        remaining = [key for key in keys if key not in reported]
        self.produced += len(reported)
        resubmits = self.resubmits and self.retries.failed_before is None
        while remaining:
            held_back: list[str] = []
            for key in remaining:
                if resubmits:
                    self.send_back(self.translator.dataid(key))
                yield from self._claim_partition(key, held_back)
                if len(self.claims) >= self._claims_at_once():
                    yield from self._produce_claims()
            yield from self._produce_claims()
            resubmits = False
            if held_back == remaining and not self.retries.give_way(self.pulse):
                time.sleep(DIAL_POLL_SECONDS)
            remaining = held_back

    def _reported(self, keys: Sequence[str]) -> set[str]:
        """The partitions that an earlier try of this step already reported."""
        first = self.translator.asset_key(self.store.plan(self.jobid).outputs[0])
        return self.retries.reported(first, keys)

    def produce_offered(self) -> Iterator[Event]:
        """Claim and produce what the tables offer now, up to the size of a batch."""
        remaining = int(self.context.run.tags.get(BATCH_TAG) or DEFAULT_BATCH_CHUNKS)
        while remaining > 0:
            self.environment()
            claims = self.claim(None, min(remaining, self.maker.at_once(self._dial())))
            if not claims:
                break
            remaining -= len(claims)
            for claim in claims:
                self._keep([claim], self.translator.partition_key(claim.dataid))
            yield from self._produce_claims()

    def _claim_partition(self, key: str, held_back: list[str]) -> Iterator[Event]:
        """Claim the chunk of one partition, unless the tables refuse."""
        dataid = self.translator.dataid(key)
        self.environment()
        claims = self.claim(dataid)
        if not claims:
            if rows := self.ready_already(dataid):
                stale = self.staleness(dataid)
                if not self.is_made_again(stale):
                    self.skipped += 1
                    yield from self.events.skipped(rows, self.jobid, dataid, key, stale.line)
                    return
                claims = self.make_again(dataid, stale)
            refused = claims or self.refuse(dataid)
            if refused is None:
                held_back.append(key)
                return
            claims = refused
        self._keep(claims, key)

    def _claims_at_once(self) -> int:
        """How many partitions to claim before the first one is produced.

        Each is claimed by name, so this pays only for a maker that produces them together.
        """
        return self.maker.at_once(self._dial()) if self.maker.works_together else 1

    def _dial(self) -> int | None:
        return batch_size(self.store, self.jobid)

    def _keep(self, claims: Sequence[Claim], key: str) -> None:
        """Keep claims alive until there are as many as the maker wants at once."""
        for claim in claims:
            self.pulse.hold(claim)
            self.claims[claim.generation] = claim, key

    def _produce_claims(self) -> Iterator[Event]:
        """Produce all claimed chunks; one that may retry without delay is claimed again."""
        while self.claims:
            claims = [claim for claim, _ in self.claims.values()]
            if len(claims) == 1 or self.maker.works_together:
                yield from self._produce(claims)
            else:
                yield from self._produce_in_turn(claims)

    def _produce_in_turn(self, claims: Sequence[Claim]) -> Iterator[Event]:
        """Produce chunks one after the other; give back those that the dials no longer allow."""
        generations = {claim.generation for claim in claims}
        try:
            with WaitingClaims(
                self.store,
                claims,
                stopping=lambda: None,
                say=self.say,
                interrupted=self.interrupted,
            ) as waiting:
                while claim := waiting.next():
                    yield from self._produce([claim])
                    while retries := [
                        retry
                        for retry, _ in self.claims.values()
                        if retry.generation not in generations
                    ]:
                        yield from self._produce(retries)
        finally:
            for claim in claims:
                self._forget(claim)

    def _produce(self, claims: Sequence[Claim]) -> Iterator[Event]:
        keys = {generation: key for generation, (_, key) in self.claims.items()}
        for produced in make(
            self.store,
            claims,
            self.environment(),
            self.maker,
            checks=self.checks,
            pulse=self.pulse,
            interrupted=self.interrupted,
            judge=self.retries.judge,
        ):
            key = keys[produced.claim.generation]
            self._forget(produced.claim)
            yield from self._report(produced, key)
            if produced.claim.dataid in self.retries.requests:
                self.retries.keep([produced.claim.dataid], self.claim, self.pulse)
            elif _is_retried(produced):
                self._keep(self.claim(produced.claim.dataid), key)

    def _forget(self, claim: Claim) -> None:
        self.claims.pop(claim.generation, None)
        self.pulse.let_go(claim)

    def _report(self, produced: Produced, key: str) -> Iterator[Event]:
        """Count a chunk that has ended, and report it to Dagster."""
        dataid = produced.claim.dataid
        for chunks in (self.failed, self.lost):  # an earlier attempt of this run
            chunks.pop(dataid, None)
        if produced.status == LOST:
            self.pulse.beat()
            self.lost[dataid] = produced.reason
            self.context.log.error(f"{printable(dataid)}: {produced.reason}")
            return
        is_shown = self.events.is_shown(dataid, key)
        if produced.status == READY:
            self.produced += 1
            for fact in produced.facts if is_shown else ():
                yield self.events.produced(produced, fact, key)
        else:
            self._log_failure(produced)
        for checked in produced.checks if is_shown else ():
            yield evaluation(checked, self.translator, key)

    def _log_failure(self, produced: Produced) -> None:
        dataid, reason = produced.claim.dataid, produced.reason
        if _is_retried(produced) and dataid not in self.retries.requests:
            reason += " (another attempt is granted)"
        elif produced.retry_in:
            reason += f" (the next attempt is due in {produced.retry_in:g} s)"
        self.failed[dataid] = reason
        line = f"{printable(dataid)} of job {self.jobid}: {produced.status}: {reason}"
        if produced.error:  # in the text: Dagster doesn't keep `exc_info`
            line += "\n" + "".join(traceback.format_exception(produced.error))
        self.context.log.error(line)

    def stale_evaluations(self) -> Iterator[dg.AssetCheckEvaluation]:
        """Return how many chunks of the job are stale now, for the checks that the step has."""
        wanted = self.context.selected_asset_check_keys
        tell = partial(stale_evaluations, self.store, self.jobid, self.translator)
        for found in self.store.db.insist(lambda: list(tell()))[0]:
            if found.asset_check_key in wanted:
                yield found

    def conclude(self) -> None:
        """Log the counts, and fail the run if any chunk wasn't produced."""
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
        bad = {**self.refused, **self.failed, **self.lost}
        if not (bad or self.failed_before):
            return
        metadata = {f"opendataflow/{word}": count for word, count in counts.items()}
        failure = dg.Failure(self._why_failed(bad), metadata=metadata, allow_retries=False)
        if not self.retries.requests:
            raise failure
        self.retries.extend()
        raise self.retries.request from failure

    def _why_failed(self, bad: Mapping[str, str]) -> str:
        """Return a line about the chunks that weren't produced, and a line for each."""
        lines = [f"{printable(dataid)}: {reason}" for dataid, reason in bad.items()]
        if self.failed_before:
            lines.append(f"{self.failed_before} more failed in an earlier try")
        all_chunks = len(bad) + self.produced + self.skipped
        were = "wasn't" if len(bad) == 1 else "weren't"
        head = f"{len(bad)} of {all_chunks} chunks of job {self.jobid!r} {were} produced:"
        if all_chunks == 1:
            head = f"The chunk of job {self.jobid!r} wasn't produced:"
        if again := len(bad.keys() & self.retries.requests.keys()):
            head = head[:-1] + retry_clause(again, len(bad) - again)
        return "\n".join([head, *first_of(lines, MAX_NAMED_CHUNKS)])


def _is_retried(produced: Produced) -> bool:
    """Return whether the job's policy grants another attempt at once."""
    return produced.status == RESUBMIT and not produced.interrupted
