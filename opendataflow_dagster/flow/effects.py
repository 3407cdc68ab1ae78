"""What the changes of a plan mean for chunks, counted now."""

import json
from collections.abc import Iterator, Mapping, Sequence

from ..location import PARTS
from ..store.store import Store
from .flow import Flow, Job
from .plan import ADD, REMOVE, Change, FlowPlan
from .registered import DATASET, Registrations, read_registered

TODAY = "today"


def effects_of(store: Store, flow: Flow, plan: FlowPlan) -> list[list[str]]:
    """What each change of a plan does to chunks, as sentences without a full stop.

    It is counted by the statuses of this moment; datasets without chunks cost nothing.
    """

    def look() -> list[list[str]]:
        with store.db.reading():
            produced = {datasetid for (datasetid,) in store.db.run("catalog.produced")}
            counter = _Counter(store, flow, read_registered(store), produced)
            return [counter.effects(change) for change in plan.changes]

    return store.db.insist(look)[0]


class _Counter:
    def __init__(
        self, store: Store, flow: Flow, registered: Registrations, produced: set[str]
    ) -> None:
        self._store, self._db = store, store.db
        self._jobs = {job.jobid: job for job in flow.jobs}
        self._registered, self._produced = registered, produced

    def effects(self, change: Change) -> list[str]:
        if change.kind == DATASET:
            return list(self._of_dataset(change))
        if change.action == REMOVE:
            return list(self._of_removed_job(change.name))
        return list(self._of_job(change, self._jobs[change.name]))

    def _of_dataset(self, change: Change) -> Iterator[str]:
        if change.name not in self._produced or change.action == ADD:
            return
        is_moved = change.action == REMOVE or change.keys & {*PARTS, "format"}
        [(ready,)] = self._db.run("flow.ready", datasetid=change.name)
        if is_moved and ready:
            stay = "stays" if ready == 1 else "stay"
            where = "with data and history" if change.action == REMOVE else "at the old place"
            yield f"{_chunks(ready, 'READY')} {stay} {where}"

    def _of_job(self, change: Change, job: Job) -> Iterator[str]:
        if change.action != ADD and not change.keys & {"in", "out"}:
            return
        is_of_today = job.inputs == (TODAY,)  # it has one chunk a day
        before = 0 if is_of_today else self._pending(job.jobid)
        after = 0 if is_of_today else self._claimable(job)
        if after > before:
            yield f"{_chunks(after - before)} become{'s' if after - before == 1 else ''} claimable"
        elif after < before:
            yield f"{_chunks(before - after)} can't be claimed any more"
        if change.action != ADD:
            yield from self._running(job.jobid)
            links = self._registered.links.get(job.jobid, frozenset())
            dropped = {item for kind, item in links if kind == "OUT"} - {*job.outputs}
            yield from self._orphaned(job.jobid, sorted(dropped))

    def _of_removed_job(self, jobid: str) -> Iterator[str]:
        yield from self._running(jobid)
        if pending := self._pending(jobid):
            yield f"nobody claims its {_chunks(pending, 'claimable')} any more"
        links = self._registered.links.get(jobid, frozenset())
        yield from self._orphaned(jobid, sorted(item for kind, item in links if kind == "OUT"))

    def _orphaned(self, jobid: str, outputs: Sequence[str]) -> Iterator[str]:
        """What a job has made of datasets that it no longer writes."""
        if not self._produced.intersection(outputs):
            return
        made = dict(self._db.run("flow.made", jobid=jobid, outputs=json.dumps(outputs)))
        if ready := made.pop("READY", 0):
            lose = "loses its" if ready == 1 else "lose their"
            yield f"{_chunks(ready, 'READY')} {lose} producer, and stay{'s' if ready == 1 else ''}"
        for status, count in made.items():
            yield f"{_chunks(count, status)} stay{'s' if count == 1 else ''} as {_it(count)}"

    def _running(self, jobid: str) -> Iterator[str]:
        [(count, _)] = self._db.run("registry.live_claims", jobid=jobid)
        if count:
            running = "is running" if count == 1 else "are running"
            yield f"{_chunks(count)} {running}: apply refuses until then"

    def _pending(self, jobid: str) -> int:
        return self._db.run("why.claimable", jobid=jobid)[0][0]

    def _claimable(self, job: Job) -> int:
        inputs = sorted({*job.inputs} - {TODAY})
        outputs = json.dumps(sorted(job.outputs))
        if not self._produced.issuperset(inputs):
            return 0
        if inputs:
            only = self._store.today() if TODAY in job.inputs else None
            [(count,)] = self._db.run(
                "flow.claimable",
                jobid=job.jobid,
                inputs=json.dumps(inputs),
                outputs=outputs,
                needed=len(inputs),
                only=only,
            )
            return count
        if not self._produced.intersection(job.outputs):
            return 0
        made: Mapping[str, int] = dict(self._db.run("flow.made", jobid=job.jobid, outputs=outputs))
        return sum(made.get(status, 0) for status in ("PENDING", "RESUBMIT", "RERUN"))


def _chunks(count: int, kind: str = "") -> str:
    return f"{count:,} {kind}{' ' if kind else ''}chunk{'' if count == 1 else 's'}"


def _it(count: int) -> str:
    return "it is" if count == 1 else "they are"
