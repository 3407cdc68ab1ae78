"""What applying a flow would do to tables and chunks: compared, with nothing written."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ..config.credentials import password_of
from ..config.settings import redact
from ..errors import FlowError
from ..location import PARTS
from ..model import DATASET_COLUMNS
from ..store.registry import circle_of_jobs
from ..store.store import Store
from ..util.text import did_you_mean
from .catalog import (
    DATASET,
    JOB,
    PROJECT_ITEM,
    Columns,
    Registrations,
    dials_of,
    edges,
    links_of,
    other_names,
    read_registered,
    variables_of,
)
from .flow import Dataset, Flow, Job

ADD, CHANGE, REMOVE = "add", "change", "remove"
HASH_LETTERS = 12
SECRET = "encryptedpass"
VARIABLE, DIAL = "environment.", "policy."
"""How the keys of differences of a job's variables and dials begin."""

_COMPARED_NAMES = 20
"""Unknown names that are compared with all others, which takes a millisecond or more each."""


class ValueChange(NamedTuple):
    """One value that changes, as people may see it."""

    key: str
    before: str | None
    after: str | None
    token: str = ""
    """What the plan's hash has of a value that isn't shown."""


class Change(NamedTuple):
    """What happens to one dataset or job."""

    action: str
    kind: str
    name: str
    differences: tuple[ValueChange, ...] = ()
    conflict: str = ""
    """Why it isn't applied as it is."""
    may_adopt: bool = False
    """Whether `--adopt` applies it all the same."""

    @property
    def keys(self) -> set[str]:
        return {difference.key for difference in self.differences}


class FlowPlan(NamedTuple):
    """The changes that bring the tables to what a flow says."""

    flow: str
    changes: tuple[Change, ...]
    noted: tuple[tuple[str, str], ...]
    """What is registered as it should be, and will carry the flow's name from now on."""
    forgotten: tuple[tuple[str, str], ...]
    """What carries the flow's name, and is gone or belongs to somebody else."""
    notes: tuple[str, ...]
    hash: str

    @property
    def conflicts(self) -> list[Change]:
        return [change for change in self.changes if change.conflict]

    @property
    def summary(self) -> str:
        """`2 to add, 1 to change, 1 conflict`."""
        words = {ADD: "to add", CHANGE: "to change", REMOVE: "to remove"}
        parts = [
            f"{count} {word}" for action, word in words.items() if (count := self.count(action))
        ]
        if count := len(self.conflicts):
            parts.append(f"{count} conflict{'' if count == 1 else 's'}")
        return ", ".join(parts) or "nothing to do"

    def count(self, action: str) -> int:
        """How many changes of a kind there are, without conflicts."""
        return sum(change.action == action and not change.conflict for change in self.changes)


def plan_flow(
    store: Store, flow: Flow, *, adopt: bool = False, environ: Mapping[str, str] = os.environ
) -> FlowPlan:
    """Compare a flow with the tables; they are only read.

    Args:
        store: The tables.
        flow: What they should have.
        adopt: Take over what somebody else has registered with other values.
        environ: Where `${NAME}` is looked up.
    """

    def look() -> Registrations:
        with store.db.reading():
            return read_registered(store)

    return compare(store, flow, store.db.insist(look)[0], adopt=adopt, environ=environ)


def plan_of_nothing(store: Store, flow: Flow) -> FlowPlan:
    """The plan for tables that aren't there yet."""
    return compare(store, flow, Registrations(), adopt=False, environ=os.environ)


def compare(
    store: Store, flow: Flow, registered: Registrations, *, adopt: bool, environ: Mapping[str, str]
) -> FlowPlan:
    """The plan by what is registered."""
    comparison = _Comparison(store, flow, registered, adopt, environ)
    changes = (*comparison.declared(), *comparison.removed())
    _refuse_circle(flow, registered, changes)
    changes = _with_other_domains(flow, registered, changes)
    return FlowPlan(
        flow.name,
        changes,
        tuple(comparison.noted),
        tuple(comparison.forgotten),
        tuple(_notes(flow, registered, changes)),
        _hash(flow.name, registered.store, changes),
    )


class _Comparison:
    def __init__(
        self,
        store: Store,
        flow: Flow,
        registered: Registrations,
        adopt: bool,
        environ: Mapping[str, str],
    ) -> None:
        self._store, self._flow, self._registered = store, flow, registered
        self._adopt, self._environ = adopt, environ
        self.noted: list[tuple[str, str]] = []
        self.forgotten: list[tuple[str, str]] = []

    def declared(self) -> Iterator[Change]:
        """What is to be added or changed."""
        for dataset in self._flow.datasets:
            yield from self._compare(DATASET, dataset.datasetid, self._of_dataset(dataset))
        for job in self._flow.jobs:
            yield from self._compare(JOB, job.jobid, self._of_job(job), job.pipeline is not None)

    def _compare(
        self, kind: str, name: str, found: list[ValueChange], is_pipeline: bool = False
    ) -> Iterator[Change]:
        own = self._flow.origin in self._registered.declared.get((kind, name), ())
        if not self._registered.has(kind, name):
            yield Change(ADD, kind, name, tuple(found))
        elif not found:
            if not own or self._has_other_dials(kind, name):
                self.noted.append((kind, name))
        else:
            others = sorted(self._registered.origins(kind, name) - {self._flow.origin})
            conflict = ""
            if (others or not own) and not self._adopt:
                whose = f"declared by {' and '.join(others)}" if others else "registered by hand"
                conflict = f"{whose} with other values: --adopt adopts it"
            yield Change(CHANGE, kind, name, tuple(found), conflict, bool(conflict))

    def removed(self) -> Iterator[Change]:
        """Yield the changes for what the flow once declared and no longer declares."""
        names = {(DATASET, dataset.datasetid) for dataset in self._flow.datasets}
        names |= {(JOB, job.jobid) for job in self._flow.jobs}
        gone = {
            (kind, name)
            for (kind, name), origins in self._registered.declared.items()
            if self._flow.origin in origins and (kind, name) not in names
        }
        for kind, name in sorted(gone, reverse=True):  # jobs before the datasets that they use
            others = self._registered.origins(kind, name) - {self._flow.origin}
            if others or not self._registered.has(kind, name):
                self.forgotten.append((kind, name))
                continue
            yield Change(
                REMOVE, kind, name, conflict=self._in_use(name, gone) if kind == DATASET else ""
            )

    def _in_use(self, datasetid: str, gone: Iterable[tuple[str, str]]) -> str:
        """The jobs of others that read or write a dataset, as the reason against its removal."""
        own = {job.jobid for job in self._flow.jobs} | {name for kind, name in gone if kind == JOB}
        users = sorted(set(self._registered.users(datasetid)) - own)
        if not users:
            return ""
        return f"{', '.join(map(repr, users[:3]))} reads or writes it: declare it, or change that"

    def _of_dataset(self, dataset: Dataset) -> list[ValueChange]:
        wanted = dataset.columns(self._environ)
        if wanted["domain"] == self._recorded.get(dataset.datasetid):
            wanted = {**wanted, "domain": None}
        rows = self._registered.datasets.get(dataset.datasetid, [{}])
        found: dict[str, ValueChange] = {}
        for row in rows:  # of a table with duplicates, all of them
            for name in DATASET_COLUMNS:
                if name != SECRET and not _is_same(name, row.get(name), wanted[name]):
                    found.setdefault(
                        name, ValueChange(name, _shown(row.get(name)), _shown(wanted[name]))
                    )
            if different := self._of_secret(dataset, row, wanted):
                found.setdefault(SECRET, different)
        return list(found.values())

    @cached_property
    def _recorded(self) -> dict[str, str]:
        """Dataset → the name of its domain, where that is recorded and no column has to say it."""
        catalog = self._registered.catalog()
        told = {
            catalog.domains[name]
            for name, dataset in catalog.datasets.items()
            if dataset.columns.get("domain")
        }
        return {
            name: domain
            for name, domain in catalog.domains.items()
            if name in catalog.names and domain not in told and domain not in catalog.merged()
        }

    def _of_secret(self, dataset: Dataset, row: Columns, wanted: Columns) -> ValueChange | None:
        """Whether the password changes; neither it nor its encrypted value is shown."""
        before, after = row.get(SECRET), wanted[SECRET]
        if dataset.password is not None:
            secret = dataset.secret(self._environ)
            if before and password_of(dataset.datasetid, before, self._environ) == secret:
                return None
        elif before == after:
            return None
        told = "another one" if before and (after or dataset.password) else "set"
        return ValueChange(
            "password",
            "set" if before else None,
            told if after or dataset.password else None,
            f"{before} {after or dataset.password}",
        )

    def _of_job(self, job: Job) -> list[ValueChange]:
        links, variables = links_of(job), variables_of(job)
        have = self._registered.links.get(job.jobid, frozenset())
        have_variables = self._registered.variables.get(job.jobid, frozenset())
        if job.pipeline is not None and PROJECT_ITEM not in job.environment:
            have_variables = {item for item in have_variables if item[0] != PROJECT_ITEM}
        found = []
        for key, kind in (("in", "IN"), ("out", "OUT")):
            before, after = (
                sorted(item for each, item in of if each == kind) for of in (have, links)
            )
            if before != after:
                found.append(ValueChange(key, ", ".join(before) or None, ", ".join(after) or None))
        for name in sorted({name for name, _ in have_variables ^ variables}):
            before, after = (
                ", ".join(sorted(value for each, value in of if each == name))
                if name in dict(of)
                else None
                for of in (have_variables, variables)
            )
            found.append(ValueChange(VARIABLE + name, before, after))
        return found + list(self._of_dials(job))

    def _of_dials(self, job: Job) -> Iterator[ValueChange]:
        """Yield the changes of the dials that the flow sets now, or that it set earlier."""
        declared = self._registered.declared.get((JOB, job.jobid), {})
        wanted: dict[str, Any] = dict.fromkeys(declared.get(self._flow.origin, ()))
        wanted |= dials_of(self._store, job)
        have = self._registered.dials.get(job.jobid, {})
        for name, value in wanted.items():
            if have.get(name) != value:
                yield ValueChange(DIAL + name, _number(have.get(name)), _number(value))

    def _has_other_dials(self, kind: str, name: str) -> bool:
        """Whether what is remembered of the dials that the flow sets isn't true any more."""
        job = self._flow.job(name) if kind == JOB else None
        known = self._registered.declared[kind, name][self._flow.origin]
        return job is not None and sorted(job.policy) != sorted(known)


def _is_same(name: str, before: str | None, after: str | None) -> bool:
    if name == "options" and before and after:
        try:
            return json.loads(before) == json.loads(after)
        except ValueError:
            return False
    return (before or None) == (after or None)


def _shown(value: str | None) -> str | None:
    return None if value is None else redact(value)


def _number(value: Any) -> str | None:
    return None if value is None else str(value)


def _refuse_circle(flow: Flow, registered: Registrations, changes: Iterable[Change]) -> None:
    """Refuse jobs that would wait for each other, together with those that are registered."""
    gone = {change.name for change in changes if change.action == REMOVE and change.kind == JOB}
    links = {jobid: found for jobid, found in registered.links.items() if jobid not in gone}
    links |= {job.jobid: links_of(job) for job in flow.jobs}
    circle = circle_of_jobs(edges(links))
    if circle and not circle_of_jobs(edges(registered.links)):
        raise FlowError(
            "Together with registered jobs, these would wait for each other for ever: "
            f"{circle}. Use another dataset as the output of one of the jobs."
        )


def _with_other_domains(
    flow: Flow, registered: Registrations, changes: Iterable[Change]
) -> tuple[Change, ...]:
    """The changes, with a conflict for each domain that has another name in the tables."""
    found = {(change.kind, change.name): change for change in changes}
    gone = [name for name, change in found.items() if change.action == REMOVE]
    for other in other_names(flow, registered, gone):
        change = found.get((other.kind, other.name), Change(CHANGE, other.kind, other.name))
        conflict = "; ".join(filter(None, [change.conflict, other.text]))
        found[other.kind, other.name] = change._replace(conflict=conflict, may_adopt=False)
    return tuple(found.values())


def _notes(flow: Flow, registered: Registrations, changes: Iterable[Change]) -> Iterator[str]:
    """Datasets that jobs name but nobody registered: perhaps misspelled."""
    gone = {change.name for change in changes if (change.action, change.kind) == (REMOVE, DATASET)}
    known = {*registered.datasets} - gone
    known |= {"today", *(dataset.datasetid for dataset in flow.datasets)}
    unknown = {
        name: job
        for job in flow.jobs
        if job.pipeline is None
        for name in (*job.inputs, *job.outputs)
        if name not in known
    }
    for number, (name, job) in enumerate(unknown.items()):
        like = did_you_mean(name, known) if number < _COMPARED_NAMES else ""
        where = f"{job.where}: dataset" if job.where else "Dataset"
        of = f"{name!r} of job {job.jobid!r}"
        yield f"{where} {of} is neither declared nor registered{like or '.'}"


def _hash(flow: str, store: str, changes: Iterable[Change]) -> str:
    """The plan's identity: equal for the same flow, file and rows."""
    text = json.dumps([flow, store, [list(change) for change in changes]], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]


# What the changes of a plan mean for chunks, counted now.


TODAY = "today"


def effects_of(store: Store, flow: Flow, plan: FlowPlan) -> list[list[str]]:
    """What each change of a plan does to chunks, as sentences without a full stop.

    It is counted by the statuses of this moment; datasets without chunks cost nothing.
    """

    def look() -> list[list[str]]:
        with store.db.reading():
            counter = _Counter(store, flow, read_registered(store))
            return [counter.effects(change) for change in plan.changes]

    return store.db.insist(look)[0]


class _Counter:
    def __init__(self, store: Store, flow: Flow, registered: Registrations) -> None:
        self._store, self._db = store, store.db
        self._jobs = {job.jobid: job for job in flow.jobs}
        self._registered, self._produced = registered, registered.produced

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
            yield f"no job can claim its {_chunks(pending, 'claimable')} any more"
        links = self._registered.links.get(jobid, frozenset())
        yield from self._orphaned(jobid, sorted(item for kind, item in links if kind == "OUT"))

    def _orphaned(self, jobid: str, outputs: Sequence[str]) -> Iterator[str]:
        """What a job produced of datasets that it no longer writes."""
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
