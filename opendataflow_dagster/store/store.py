"""The store: who may produce which chunk, and how it ended. The tables are the only truth."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import DataflowError, InputsChanged, LostRace, Refused, StaleClaim
from ..model import (
    FAILED,
    LEASE_SECONDS,
    MAX_LOSSES,
    READY,
    RESUBMIT,
    RUNNING,
    Claim,
    Fact,
    Failure,
    Lost,
    Plan,
    Recovered,
    Status,
)
from ..util.text import did_you_mean, typed
from .database import Database, Versions, program_version

CLOCK_DRIFT_SECONDS = 5.0
"""Seconds by which a clock may differ from the database's."""

LONGEST_LEASE_SECONDS = 7 * 24 * 3600.0
"""Seconds beyond which a lease is too long to be meant, unless the job's policy says so."""

DELAY_OVER = "the retry delay is over"

FILL_BATCH_ROWS = 500
"""Rows that are looked at in one short transaction while the queue of a job is filled."""

FILL_SECONDS = 5.0
"""Seconds for which a recovery fills queues before it returns."""

FILL_STALL_SECONDS = 30.0
"""Seconds without progress after which a worker stops waiting for a job's queue to be filled."""

OutputCounts = dict[str, int]
"""Of each chunk that was settled, how many outputs it has."""

InputChanges = dict[str, list[str]]
"""Of chunks whose inputs changed, what happened to which input."""

PLAN_AGE_SECONDS = 1.0
"""Seconds for which a worker believes what it read of a job's registration and dial."""


class ClaimRequest(NamedTuple):
    """Whom a worker wants chunks for, and which: up to `k` of a job, or `only` the one."""

    jobid: str
    owner: str
    k: int
    runid: str | None
    lease: float
    only: str | None


class Store:
    """The tables of one database; one object serves all threads of a process."""

    def __init__(self, db: Database, *, timezone: str | None = None) -> None:
        self.db = db
        self.timezone = timezone
        self._plans: dict[str, tuple[float, Plan]] = {}
        self._idle: set[tuple[str, str]] = set()
        self._id = ""

    @property
    def version(self) -> int:
        """The version of the tables that this program creates."""
        return program_version(self.db.dialect)

    @property
    def id(self) -> str:
        """The id of this store, which it writes beside the data; `odf init` created it once."""
        if not self._id:
            rows = self.db.fetch("claims.store")
            self._id = rows[0][0] if rows else ""
        return self._id

    def init(self, *, fill: bool = True) -> Versions:
        """Create the tables, or upgrade in place older ones; what they were before.

        Tables that are newer than this program are left as they are. What may be claimed is judged
        anew while others work: afterwards, or without `fill` by whoever calls it or is idle.
        """
        from .catalog import record_names
        from .upgrade import upgrade  # imported late: a cron line doesn't need it

        found = upgrade(self.db)
        if found.version <= self.version:
            record_names(self)
        if fill and found.version <= self.version:
            self.fill()
        return found

    def fill(
        self,
        jobid: str | None = None,
        *,
        seconds: float | None = None,
        narrate: Callable[[str], object] | None = None,
    ) -> list[str]:
        """Judge in small transactions what may be claimed of jobs that were registered or changed.

        Any number of sessions may do so at once, and one that dies has lost its last batch only. It
        ends after `seconds`, or when others keep it from going on.

        Args:
            jobid: This job's queue alone.
            seconds: How long to work; None: to the end.
            narrate: What is told how far it has come.

        Returns:
            The jobs that are still queued.
        """
        looked, started = 0, time.monotonic()
        progress = started
        while queued := self.unfilled(jobid):
            done = sum(self._fill_batch(queued_job) for queued_job in queued)
            looked, now = looked + done, time.monotonic()
            progress = now if done else progress
            if narrate is not None:
                what = f"looked at {looked:,} rows" if done else "waiting for other transactions"
                narrate(f"Filling the queue of {', '.join(queued)}: {what}")
            if now - progress > FILL_STALL_SECONDS or (
                seconds is not None and now - started > seconds
            ):
                break
            self.give_way(done)
        return queued

    def unfilled(self, jobid: str | None = None) -> list[str]:
        """The jobs, or the one, of which not all that may be claimed is in the queue yet."""
        rows = self.db.fetch("fill.queued", jobid=jobid)
        return [queued_job for (queued_job,) in rows]

    def _fill_batch(self, jobid: str) -> int:
        """How many rows were looked at; 0: others keep it from going on at this moment."""

        def work() -> int:
            try:
                return self._fill(jobid, FILL_BATCH_ROWS)
            except Exception as error:
                if self.db.trouble(error) == "locked":
                    return 0
                raise

        return self.db.insist(work)[0]

    def give_way(self, done: int) -> None:
        """Wait until a retry makes sense, and let others have their turn."""
        if not done:
            time.sleep(0.05)

    def unclaimable(self, *, now: bool = False) -> DataflowError | None:
        """What forbids this program to claim from tables of another version.

        Without `now` it is what the tables said when they were asked last, unless that forbade it.
        It may be a part of a transaction; outside of one, call it by `insist`.
        """
        versions, where = self.db.versions, self.db.where
        if now or versions is None or versions.unclaimable(self.version, where):
            versions = self.db.read_versions()
        return versions.unclaimable(self.version, where)

    def refuse_unclaimable(self, *, now: bool = False) -> None:
        """Raise what forbids this program to claim."""
        if error := self.unclaimable(now=now):
            raise error

    def close(self) -> None:
        self.db.close()

    def plan(self, jobid: str) -> Plan:
        """What a job reads and writes, as of a second ago at most."""
        aged, plan = self._plans.get(jobid, (0.0, None))
        now = time.monotonic()
        if plan is None or now - aged > PLAN_AGE_SECONDS:
            plan, _ = self.db.insist(lambda: self.read_plan(jobid))
            self._plans[jobid] = (now, plan)
        return plan

    def read_plan(self, jobid: str) -> Plan:
        """What a job reads and writes now."""
        return Plan.of_rows(jobid, self.db.run("claims.plan", jobid=jobid))

    def claim(
        self,
        jobid: str,
        *,
        owner: str,
        k: int = 1,
        runid: str | None = None,
        lease: float = LEASE_SECONDS,
        only: str | None = None,
    ) -> list[Claim]:
        """Take the next chunks of a job, up to `k`; `only` names the one chunk wanted.

        After a lost connection it returns the claims that this owner had got without hearing of it:
        an owner's name belongs to one worker, which holds no other claim when it asks.
        """
        plan = self.plan(jobid)
        refuse_flawed(self, plan)
        if plan.today:
            today = self.today()
            if only not in (None, today):
                return []
            only = today

        # Asked before each claim, not only as a connection opens: `odf init` of a newer program may
        # have upgraded the tables while this worker was connected.
        self.db.insist(self.refuse_unclaimable)
        request = ClaimRequest(jobid, owner, k, runid, lease, only)
        started = progress = time.monotonic()
        tries = 0
        while True:
            tries += 1
            claims, has_looked = self._next_claims(request)
            if claims or not has_looked or only is not None:
                break
            # What is missing from the queue may just not have been judged yet.
            rows = self.db.fetch("fill.outlook", jobid=jobid)
            [(is_queued, has_pending)] = rows
            now = time.monotonic()
            if not is_queued:
                if not has_pending or tries > 1:
                    break
                continue  # it was filled at this moment, or a dial forbids
            if has_pending and now - started > FILL_SECONDS:
                break
            # A claimer fills the queue itself rather than wait for `odf recover`: a job that was
            # just registered has work at once, whichever program registered it.
            if done := self._fill_batch(jobid):
                progress = now
            elif now - progress > FILL_STALL_SECONDS:
                raise self._not_filled(jobid)
            self.give_way(done)
        # Who found nothing asks before its next claim, since the question only reads: a claim takes
        # the writer's turn on SQLite, and may take locks on PostgreSQL.
        self._idle.discard((jobid, owner)) if claims else self._idle.add((jobid, owner))
        return claims

    def _not_filled(self, jobid: str) -> Refused:
        """Return the error that names the transactions for which a job's queue waits."""
        waits = self.db.fetch("fill.awaited", jobid=jobid)
        transactions = ", ".join(
            f"process {pid} of {user}{f' ({name})' if name else ''} for {seconds} s"
            for pid, user, name, seconds in waits
        )
        return Refused(
            f"The chunks that {jobid!r} may claim aren't known yet. A transaction that "
            "wrote or locked chunks when the job was registered is still "
            f"open{f' ({transactions})' if transactions else ''}. End it, then try again; "
            "see `odf doctor`.",
            code="LOCKED",
        )

    def _next_claims(self, request: ClaimRequest) -> tuple[list[Claim], bool]:
        """Claims of what the queue has; and whether it was looked at: not if the worker is idle."""
        jobid, owner, k, only = request.jobid, request.owner, request.k, request.only
        is_today = only is not None and bool(self.plan(jobid).today)
        locked, has_looked = 0, False

        def take() -> list[Claim]:
            nonlocal locked, has_looked
            idle = (jobid, owner) in self._idle and not is_today
            if idle and not self.db.run("claims.anything_pending", jobid=jobid, only=only):
                return []
            has_looked = True
            try:
                return self._take(request, skip=locked // 3 * k)
            except Exception as error:
                # After three locked attempts, `skip` passes over as many chunks as are wanted:
                # somebody's open transaction must not keep a worker from all the others.
                locked += self.db.trouble(error) == "locked"
                raise

        for _ in range(100):
            try:
                claims, lost = self.db.insist(take, races=5, wait=False)
            except LostRace:
                # pending promises what datastatus doesn't keep: the triggers were off for a while.
                self.db.insist(lambda: self.db.run("claims.rejudge", jobid=jobid, only=only, k=k))
                continue
            break
        else:
            raise LostRace(
                f"The queue of {jobid!r} doesn't match the statuses in datastatus. To repair "
                "it, run: odf init"
            )
        if lost:
            # The commit may have come through and only its answer was lost. The owner's name
            # belongs to one worker, so that whatever it owns is what that attempt claimed.
            claims = self._adopt(jobid, owner, request.lease) or claims
        if has_looked and not claims:  # an upgrade since this connection was opened leaves it none
            self.db.insist(lambda: self.refuse_unclaimable(now=True))
        return claims, has_looked

    def claim_or_recover(self, jobid: str, *, owner: str, **options: Any) -> list[Claim]:
        """Claim as `claim` does; if nothing is left, settle lost claims first and claim again.

        Recovering looks at all claims of the job, so that it comes second: a job that has work
        never pays for it, and a lost chunk is found by the first worker that would be idle.

        Args:
            jobid: The job.
            owner: Who claims.
            options: The other arguments of `claim`.
        """
        claims = self.claim(jobid, owner=owner, **options)
        if not claims and self.recover(jobid):
            claims = self.claim(jobid, owner=owner, **options)
        return claims

    def finish(self, claims: Claim | Sequence[Claim], facts: Sequence[Fact] = ()) -> None:
        """Make the outputs of claims READY; all must be one owner's, of one job.

        Raises `StaleClaim`, naming the chunks whose claims were lost, and `InputsChanged` for
        those that are sent back since what they read has changed; the others are settled.
        """
        claims = [claims] if isinstance(claims, Claim) else list(claims)
        accepted = [claim for claim in claims if claim.forced]
        why = ""
        if accepted and (changed := self._changed(accepted)):
            why = f"forced, though {_changes_line(changed)}"
        (settled, changed), lost = self.db.insist(
            lambda: self._finish(claims, facts, accept=bool(accepted), why=why)
        )
        # In a transaction of its own: the chunks whose inputs are unchanged stay settled, whatever
        # happens to the others.
        back = self._send_back([claim for claim in claims if claim.dataid in changed], changed)
        stale = [claim for claim in claims if not (claim.dataid in settled or claim.dataid in back)]
        if stale and lost:
            # Settled by the attempt whose answer was lost: the generation tells it from another's.
            stale = [claim for claim in stale if self._outcome(claim) != {READY}]
        if stale:
            raise stale_claim(stale)
        if back:
            raise inputs_changed(claims[0].jobid, {dataid: changed[dataid] for dataid in back})

    def fail(
        self, claim: Claim, why: str, *, may_retry: bool = True, at_once: bool = False
    ) -> Failure:
        """Settle a claim whose work failed: FAILED, or another attempt if the policy grants one.

        `at_once` grants one whatever the policy says; without `may_retry` the policy isn't asked.

        Work whose inputs changed under it isn't to blame: its chunk is sent back.
        """
        changed = {} if claim.forced else self._changed([claim])
        if changed and (status := self._send_back([claim], changed, why).get(claim.dataid)):
            return Failure(status, None)
        settled, lost = self.db.insist(lambda: self._fail(claim, why, may_retry, at_once))
        if settled:
            return settled[0]
        if lost and self._outcome(claim) == {FAILED}:
            return Failure(FAILED, None)
        raise stale_claim([claim])

    def heartbeat(self, claims: Sequence[Claim]) -> list[Claim]:
        """Renew the leases of one owner's claims of a job; return those it owns no more."""
        # Not through `insist`, which waits for minutes: `Pulse` tells of an outage, and tries
        # again.
        alive = self._beat(claims)
        return [claim for claim in claims if claim.dataid not in alive]

    def confirm(self, claim: Claim) -> None:
        """Make sure that a claim is still ours, renew its full lease, and read the current rows.

        Else it raises `StaleClaim`, or `InputsChanged` after it has sent the chunk back.
        """
        if self.db.insist(lambda: self.heartbeat([claim]))[0]:
            raise stale_claim([claim])
        if changed := {} if claim.forced else self._changed([claim]):
            if not self._send_back([claim], changed):
                raise stale_claim([claim])
            raise inputs_changed(claim.jobid, changed)

    def recover(self, jobid: str | None = None, *, who: str = "recover") -> list[Recovered]:
        """Settle the claims whose lease ran out, grant the retries due, and fill queues."""
        done = self.db.insist(lambda: self._recover(jobid, who))[0]
        self.fill(jobid, seconds=FILL_SECONDS)
        return done

    def next_change(self, jobid: str, *, leases: bool = False) -> float | None:
        """Seconds until a chunk can be retried, or (with `leases`) recovered; None: never."""
        rows = self.db.fetch("claims.next_retry", jobid=jobid, leases=leases)
        seconds = rows[0][0]
        return None if seconds is None else max(0.0, float(seconds))

    def now(self) -> float:
        """The database's clock, in seconds since 1970."""
        return float(self.db.fetch("claims.now")[0][0])

    def today(self, now: float | None = None) -> str:
        """The date of the database's clock, in the configured time zone or else the machine's."""
        now = self.now() if now is None else now
        if not self.timezone:
            return time.strftime("%Y-%m-%d", time.localtime(now))
        from datetime import datetime

        from ..util.times import zone_called  # imported late: few jobs read `today`

        return datetime.fromtimestamp(now, zone_called(self.timezone)).strftime("%Y-%m-%d")

    def _recover(self, jobid: str | None, who: str) -> list[Recovered]:
        db = self.db
        with db.transaction(who=who, act="finish"):
            # Read before anything is written: the rows of `claim` are locked first, in the order in
            # which workers that finish lock them. Several may recover at once: each skips the
            # claims that another has locked.
            lost = self.lost_claims(jobid)
            due = db.run("claims.due_retries", jobid=jobid)
            done = self.settle_lost(lost, who=who)
            for job, dataid, generation in due:
                db.sign(who=who, why=DELAY_OVER, act="finish")
                db.change("claims.retried", jobid=job, dataid=dataid)
                if db.change(
                    "claims.settle_outputs",
                    jobid=job,
                    dataid=dataid,
                    generation=generation,
                    was=FAILED,
                    status=RESUBMIT,
                ):
                    done.append(Recovered(job, dataid, RESUBMIT, DELAY_OVER))
        return done

    def lost_claims(self, jobid: str | None = None) -> list[Lost]:
        """The claims whose lease ran out, locked until the transaction ends."""
        rows = self.db.run("claims.lost_claims", jobid=jobid, max_losses=MAX_LOSSES)
        return [Lost(*row) for row in rows]

    def settle_lost(
        self, lost: Iterable[Lost], *, who: str, why: str = "", may_hold: bool = True
    ) -> list[Recovered]:
        """Settle lost claims within a transaction: RESUBMIT, or HOLD after too many losses."""
        done = []
        for claim in lost:
            key = {"jobid": claim.jobid, "dataid": claim.dataid}
            status, reason = claim.verdict(why, may_hold)
            self.db.sign(who=who, why=reason, act="finish")
            # Disowned, not deleted: the row keeps count of attempts and losses for the next claim.
            self.db.change("claims.disown", losses=claim.losses, **key)
            if self.settle_outputs(claim, status):
                done.append(Recovered(claim.jobid, claim.dataid, status, reason))
        return done

    def settle_outputs(self, claim: Claim | Lost, status: Status) -> bool:
        """Release a chunk's inputs, and move what its claim was producing to another status."""
        key = {"jobid": claim.jobid, "dataid": claim.dataid}
        self.db.change("claims.release_inputs", **key)
        moved = self.db.change(
            "claims.settle_outputs", generation=claim.generation, was=RUNNING, status=status, **key
        )
        return moved > 0

    def _changed(self, claims: Sequence[Claim]) -> InputChanges:
        """The chunks of one job's claims whose inputs changed since, and what happened to those."""
        return self.db.insist(lambda: self._changed_now(claims))[0]

    def _changed_now(self, claims: Sequence[Claim]) -> InputChanges:
        """The same within a transaction."""
        return {
            claim.dataid: [f"{datasetid!r} {how}" for datasetid, how in rows]
            for claim in claims
            if (rows := self.db.run("claims.changed", jobid=claim.jobid, dataid=claim.dataid))
        }

    def _send_back(
        self, claims: Sequence[Claim], changed: InputChanges, why: str = ""
    ) -> dict[str, Status]:
        """Settle claims whose inputs changed as lost: RESUBMIT, or HOLD after too many of them."""

        def work(claim: Claim) -> list[Recovered]:
            with self.db.transaction(who=claim.owner, act="finish"):
                rows = self.db.run(
                    "claims.losses",
                    jobid=claim.jobid,
                    dataid=claim.dataid,
                    owner=claim.owner,
                    generation=claim.generation,
                    max_losses=MAX_LOSSES,
                )
                reason = _changes_line({claim.dataid: changed[claim.dataid]}) + (
                    f" ({why})" if why else ""
                )
                return self.settle_lost(map(Lost._make, rows), who=claim.owner, why=reason)

        done = [self.db.insist(lambda claim=claim: work(claim))[0] for claim in claims]
        return {chunk.dataid: Status(chunk.status) for found in done for chunk in found}

    def _adopt(self, jobid: str, owner: str, lease: float) -> list[Claim]:
        rows = self.db.fetch("claims.adopt", jobid=jobid, owner=owner, lease=lease)
        return [Claim(jobid, row[0], row[1], owner, row[2], float(row[3]), row[4]) for row in rows]

    def _outcome(self, claim: Claim) -> set[str]:
        rows = self.db.fetch(
            "claims.outcome",
            jobid=claim.jobid,
            dataid=claim.dataid,
            generation=claim.generation,
        )
        return {status for (status,) in rows}

    def _take(self, request: ClaimRequest, skip: int) -> list[Claim]:
        """Claim in one transaction, or nothing; `skip` passes over so many that may be locked."""
        raise NotImplementedError

    def _fill(self, jobid: str, most: int) -> int:
        raise NotImplementedError

    def _finish(
        self, claims: Sequence[Claim], facts: Sequence[Fact], *, accept: bool, why: str
    ) -> tuple[OutputCounts, InputChanges]:
        raise NotImplementedError

    def _fail(
        self, claim: Claim, why: str, may_retry: bool, at_once: bool = False
    ) -> list[Failure]:
        raise NotImplementedError

    def _beat(self, claims: Sequence[Claim]) -> set[str]:
        raise NotImplementedError


def refuse_flawed(store: Store, plan: Plan) -> None:
    """Refuse a job that can't run at all, such as one that isn't registered."""
    if plan.flaw:
        raise Refused(
            f"{flaw_of(store, plan)} See `odf job list`, or run: odf job add "
            f"{typed(plan.jobid)} --in DATASET --out DATASET",
            code="NOT_REGISTERED",
        )


def flaw_of(store: Store, plan: Plan) -> str:
    """Why a job can't run at all, as a sentence; for a misspelled name, which one is similar."""
    if plan.inputs or plan.outputs:
        return f"{plan.flaw}."
    if is_registered(store, plan.jobid):
        return f"{plan.flaw}, but a dataset of that name is."
    return plan.flaw + (did_you_mean(plan.jobid, job_names(store)) or ".")


def job_names(store: Store) -> list[str]:
    """The jobs that are registered."""
    return [name for (name,) in store.db.run("moves.job_names")]


def is_registered(store: Store, datasetid: str) -> bool:
    """Whether a dataset has a row of its own."""
    return bool(store.db.run("moves.is_registered", datasetid=datasetid))


def stale_claim(claims: Sequence[Claim]) -> StaleClaim:
    """The error for claims of one job that other workers have now."""
    chunks = ", ".join(repr(claim.dataid) for claim in claims[:5])
    return StaleClaim(
        f"Chunk {chunks} of {claims[0].jobid!r} was claimed by another worker or "
        f"changed since generation {claims[0].generation}: nothing was settled. See "
        f"`odf history {typed(claims[0].jobid)}`."
    )


def inputs_changed(jobid: str, changed: InputChanges) -> InputsChanged:
    """What says that chunks of a job were sent back since their inputs changed."""
    chunks = ", ".join(map(repr, list(changed)[:5]))
    return InputsChanged(
        f"{_changes_line(changed)} while {jobid!r} read it: chunk {chunks} of {jobid!r} "
        "is RESUBMIT and will run again on the new data. See `odf history "
        f"{typed(jobid)}`.",
        list(changed),
    )


def _changes_line(changed: InputChanges) -> str:
    """What happened to the inputs of some chunks, each once."""
    inputs = dict.fromkeys(what for changes in changed.values() for what in changes)
    return f"Input {' and '.join(inputs)}"
