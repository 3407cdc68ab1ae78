"""How a step of Dagster comes by chunks: claimed, READY already, or refused."""

import time
from contextlib import suppress

import dagster as dg

from ..errors import DataflowError
from ..explain.explain import explain
from ..model import FAILED, PENDING, READY, RESUBMIT, Claim, Stop, read_status
from ..runner.environment import JobEnvironment, job_environment
from ..runner.heartbeat import Pulse
from ..store.claim_return import interrupt_soon
from ..store.database import briefly
from ..store.operations import resubmit
from ..store.store import PLAN_AGE, Store, new_owner
from ..util.text import first_line, printable
from .events import AGAIN, skipped
from .translator import DataflowTranslator

CATCH_UP = "opendataflow/catch-up"

DIAL_POLL = 2.0
"""Seconds between two looks at a dial that holds back all that is left of a run."""

GRACE = 60.0
"""Seconds that other workers have, after an outage of the database, to renew their leases."""

LOCK_PATIENCE = 10.0
"""Seconds for which a chunk is asked for again that somebody else has in hand."""

TERMINATED = dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED
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
        self.translator, self.secrets = translator, secrets
        self.taken: dict[int, tuple[Claim, str]] = {}
        self.runid = context.run.run_id
        self.owner = f"{new_owner()} of run {self.runid}"  # history tells which run it was
        self.waited = False
        self.locked: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.log = dg.MetadataValue.url(f"/runs/{self.runid}")
        self.again = is_on(context, AGAIN)
        self._environment: tuple[float, JobEnvironment] | None = None
        self._recovered = 0.0

    def environment(self) -> JobEnvironment:
        """What the work is told, as of a second ago at most; raises what forbids to claim."""
        now = time.monotonic()
        if self._environment is None or now - self._environment[0] > PLAN_AGE:
            plan = self.store.plan(self.jobid)
            made, _ = self.store.db.insist(
                lambda: job_environment(self.store, plan, secrets=self.secrets)
            )
            self._environment = now, made
        return self._environment[1]

    def claim(self, dataid: str | None, k: int = 1) -> list[Claim]:
        """Claims; if there are none, lost ones are settled first, which is tried once a second."""
        if self.pulse.dismissed:  # Dagster can force a run to its end, but not its process
            raise dg.Failure(
                f"Run {self.runid} was ended by others (canceled, or taken for dead), so it makes "
                "no more chunks.",
                allow_retries=False,
            )
        claims = self._claim(dataid, k)
        due = time.monotonic() - self._recovered > PLAN_AGE
        if not claims and due and self.pulse.is_steady(GRACE):
            self._recovered = time.monotonic()
            if self.store.recover(self.jobid):
                claims = self._claim(dataid, k)
        return claims

    def _claim(self, dataid: str | None, k: int) -> list[Claim]:
        found = self.store.claim(self.jobid, owner=self.owner, runid=self.runid, only=dataid, k=k)
        # After a lost connection the store tells of all that this owner has got.
        return [each for each in found if each.generation not in self.taken]

    def ready_already(self, dataid: str, key: str) -> list[dg.AssetMaterialization]:
        """What there is to show of a chunk that needn't be made; nothing if it has to be."""
        db = self.store.db
        rows, _ = db.insist(lambda: db.run("produce.outputs", jobid=self.jobid, dataid=dataid))
        ready = {row[0]: row for row in rows if row[2] == READY}
        busy = any(row[2] != READY for row in rows)
        if busy or self.again or set(ready) != set(self.store.plan(self.jobid).outputs):
            return []
        return [skipped(row, dataid, key, self.translator, self.log) for row in ready.values()]

    def refuse(self, dataid: str) -> list[Claim] | None:
        """Count a chunk as refused, with the reason; or the claim, if there is none any more.

        None if it has to wait: for the job's dial, or shortly for who has it in hand.
        """
        answer = self.store.db.insist(lambda: explain(self.store, self.jobid, dataid))[0]
        told = "somebody else changed it at this moment: launch the run again"
        if answer.reasons:
            told = f"{answer.reasons[0].code}: {answer.reasons[0].text}"
            told += f". Run: {answer.action}" if answer.action else ""
        if answer.may_run and (claims := self.claim(dataid)):
            return claims
        if answer.reasons and self._passes(answer.reasons[0].code, dataid):
            if not self.waited:
                self.say(f"{printable(dataid)} of job {self.jobid} waits for its turn: {told}")
            self.waited = True
            return None
        self.refused[dataid] = told
        self.context.log.error(f"{printable(dataid)} of job {self.jobid} is refused: {told}")
        return []

    def _passes(self, code: str, dataid: str) -> bool:
        """Whether what forbids a chunk may pass soon: another run may be nearly through with it."""
        since = self.locked.setdefault(dataid, time.monotonic())
        shortly = time.monotonic() - since < LOCK_PATIENCE
        return code == "AT_CONCURRENCY" or (code == "LOCKED" and shortly)

    def send_back(self, dataid: str) -> None:
        """Let a chunk be made again that is READY or has failed; what is held stays so."""
        db = self.store.db
        rows, _ = db.insist(lambda: db.run("produce.outputs", jobid=self.jobid, dataid=dataid))
        words = {read_status(row[2]) for row in rows if row[1] == self.jobid}
        if words & {READY, FAILED} and words <= {READY, FAILED, RESUBMIT, PENDING}:
            run = f"run {self.runid}"
            resubmit(
                self.store,
                self.jobid,
                [dataid],
                who=f"dagster {run}",
                why=f"{run} has the tag {AGAIN}",
            )

    def give_up(self, error: BaseException) -> None:
        """Settle what this worker got without having begun with it."""
        store = self.store
        store.db.drop()  # the old connection may have been cut off in mid-word
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
        if found and found.status in TERMINATED:
            return Stop(terminated(runid), hold=True)
    return Stop(f"run {runid} was interrupted ({first_line(error)})")


def terminated(runid: str) -> str:
    """Why chunks of a run are on HOLD that was terminated."""
    return f"terminated by a person in Dagster: run {runid}"


def explained(store: Store, error: Exception) -> str | None:
    """A line for an error of the tables; None: it is no such error."""
    if store.db.trouble(error) == "gone":
        return (
            f"The database of OpenDataFlow is away: {first_line(error)}. The run ended; what "
            "was in hand is made again once its lease is over."
        )
    return str(error) if isinstance(error, DataflowError) else None


def asked(context: Context) -> list[str] | None:
    """The partitions that a run names; None: whatever the tables offer."""
    if is_on(context, CATCH_UP):
        return None
    if context.has_partition_key:
        return [context.partition_key]
    return list(context.partition_keys) if context.has_partition_key_range else None


def is_on(context: Context, tag: str) -> bool:
    """Whether a run has a tag that says true."""
    return context.run.tags.get(tag, "").lower() == "true"
