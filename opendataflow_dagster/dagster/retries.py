"""Retries of a step by Dagster: which failures get one, and who holds their chunks meanwhile."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import dagster as dg

from ..model import Claim
from ..runner.heartbeat import Pulse
from ..runner.produce import Verdict, reason_of
from ..store.claims import give_back
from ..store.store import Store

_CLAUSE = "; Dagster retries {} of them, and gives up on {}:"


def retry_clause(again: int, for_good: int) -> str:
    """How the text of a retry counts its chunks; later tries read there what failed for good."""
    return _CLAUSE.format(again, for_good)


class StepRetries:
    """The retries of one step, requested by its `retry_policy` or a `RetryRequested`.

    Dagster starts the whole step again. Until then, the run keeps the chunks that failed: it claims
    each again at once, so it stays RUNNING and nobody else can take it. If the run dies meanwhile,
    or a person terminates it, this claim is settled like any other of the run.
    """

    def __init__(self, context: dg.AssetExecutionContext, store: Store) -> None:
        step = context.get_step_execution_context()
        self.context, self.store, self.number = context, store, context.retry_number
        self._policy = step.op_retry_policy
        self._is_on = not step.retry_mode.disabled
        self.requests: dict[str, dg.RetryRequested] = {}
        """By dataid: the retry that a chunk's failure requests."""
        self.kept: dict[str, Claim] = {}
        """By dataid: the claims that are kept until the retry."""

    def judge(self, claim: Claim, error: BaseException | None, reason: str) -> Verdict:
        """Grant a failed chunk a retry if Dagster would grant it to the step."""
        if isinstance(error, dg.Failure):
            reason = f"Failure: {error.description}" if error.description else "Failure"
            if not error.allow_retries:
                return Verdict(reason, again=False)
        request = error if isinstance(error, dg.RetryRequested) else self._by_policy()
        if isinstance(error, dg.RetryRequested):
            cause = error.__cause__ or error.__context__
            reason = reason_of(cause) if cause else "RetryRequested"
        if request is None or not self._is_on or self.number >= request.max_retries:
            return Verdict(reason)
        self.requests[claim.dataid] = request
        wait = f" in {request.seconds_to_wait:g} s" if request.seconds_to_wait else ""
        count = f"{self.number + 1} of {request.max_retries}"
        return Verdict(f"{reason} (retry {count} by Dagster{wait})", again=True)

    def _by_policy(self) -> dg.RetryRequested | None:
        if self._policy is None:
            return None
        wait = self._policy.calculate_delay(self.number + 1)
        return dg.RetryRequested(self._policy.max_retries, max(0.0, wait))

    @property
    def request(self) -> dg.RetryRequested:
        """Return the retry of the step, after the longest delay that its chunks request."""
        asked = self.requests.values()
        return dg.RetryRequested(
            max(request.max_retries for request in asked),
            max(request.seconds_to_wait or 0 for request in asked),
        )

    def keep(
        self, dataids: Iterable[str], claim: Callable[[str], list[Claim]], pulse: Pulse
    ) -> None:
        """Claim chunks again for the retry; if others have one by then, the retry reports it."""
        for dataid in dataids:
            if dataid not in self.kept:
                for kept in claim(dataid):
                    pulse.hold(kept)
                    self.kept[dataid] = kept

    def give_way(self, pulse: Pulse) -> bool:
        """Give back the kept claims, if any, so that other chunks fit within the job's dial."""
        kept = list(self.kept.values())
        self.kept.clear()
        for claim in kept:
            pulse.let_go(claim)
        give_back(self.store, kept, "others of the run go first")
        return bool(kept)

    def extend(self) -> None:
        """Extend kept claims until the retry begins, plus one lease."""
        wait = self.request.seconds_to_wait or 0
        if self.kept:
            claims = [claim._replace(lease=wait + claim.lease) for claim in self.kept.values()]
            self.store.db.insist(lambda: self.store.heartbeat(claims))

    def take_back(self, jobid: str) -> list[str]:
        """Give back what an earlier try of this step kept, so that this one can claim it."""
        if not self.number:
            return []
        known = {"runid": self.context.run.run_id, "max_losses": 0}
        rows, _ = self.store.db.insist(lambda: self.store.db.run("workers.claims", **known))
        why = f"retry {self.number} of run {self.context.run.run_id} begins"
        kept = [
            Claim(jobid, dataid, generation, owner, 1, 0.0, None)
            for job, dataid, generation, owner, *_ in rows
            if job == jobid
        ]
        give_back(self.store, kept, why)
        return [claim.dataid for claim in kept]

    def reported(self, key: dg.AssetKey, partitions: Sequence[str]) -> set[str]:
        """Return the partitions of an asset that an earlier try of this step reported."""
        if not (self.number and partitions):
            return set()
        wanted = dg.AssetRecordsFilter(key, asset_partitions=list(partitions))
        found = self.context.instance.fetch_materializations(wanted, 2 * len(partitions)).records
        return {
            record.partition_key
            for record in found
            if record.partition_key and record.run_id == self.context.run.run_id
        }

    @cached_property
    def failed_before(self) -> int | None:
        """How many chunks earlier tries of this step left FAILED; None: none reached its end.

        Dagster's log has the number: a try may be another process.
        """
        if not self.number:
            return None
        step, counts = self.context.get_step_execution_context().step.key, []
        kind = dg.DagsterEventType.STEP_UP_FOR_RETRY
        for entry in self.context.instance.all_logs(self.context.run.run_id, of_type=kind):
            if entry.step_key == step and entry.dagster_event:
                error = entry.dagster_event.step_retry_data.error
                found = re.search(
                    _CLAUSE.format(r"\d+", r"(\d+)"), error.to_string() if error else ""
                )
                counts += [int(found[1])] if found else []
        return sum(counts) if counts else None
