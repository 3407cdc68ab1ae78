"""Applying a flow: its rows of registration are written in one transaction."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..config.credentials import encrypt, find_passkey, for_dataset
from ..errors import Refused
from ..store.moves import person
from ..store.registry import read_dial, refuse_live
from ..store.store import Store
from .catalog import DATASET, JOB, PROJECT_ITEM, Registrations, read_registered
from .flow import Dataset, Flow, Job
from .plan import ADD, CHANGE, DIAL, REMOVE, SECRET, VARIABLE, Change, FlowPlan, compare

GIT_SECONDS = 10.0
"""Seconds that git may take to tell the commit."""


def apply_flow(
    store: Store,
    flow: Flow,
    *,
    expected: str | None = None,
    adopt: bool = False,
    additions: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> FlowPlan:
    """Write what differs, all of it or nothing, and return what that was.

    Of two at once, the second compares with what the first has written. What may be claimed is
    queued, and judged afterwards by `Store.fill` or by workers, as after any registration.

    Args:
        store: The tables.
        flow: What they should have.
        expected: The hash of the plan that was looked at: any other plan is refused.
        adopt: Take over what somebody else has registered with other values.
        additions: Add what isn't registered yet, and leave all else as it is.
        environ: Where `${NAME}` is looked up.
    """
    revision = revision_of(flow)
    why = f"odf apply: {flow.name}" + (f" at {revision}" if revision else "")

    def work() -> FlowPlan:
        with store.db.transaction(who=person(), why=why):
            store.db.run("registry.lock_datasets")
            store.db.run("registry.lock_jobs")
            registered = read_registered(store)
            plan = compare(store, flow, registered, adopt=adopt, environ=environ)
            refuse_stale(plan, expected)
            if additions:
                plan = _additions(plan)
            _refuse_conflicts(plan)
            _Writer(store, flow, registered, environ, revision).write(plan)
            return plan

    plan = store.db.insist(work)[0]
    store._plans.clear()
    return plan


def revision_of(flow: Flow) -> str | None:
    """The commit of a flow's file, with `+` if the file differs from it; None outside of git."""
    if flow.file is None:
        return None

    def git(*words: str) -> str | None:
        line = ["git", "-C", flow.folder, *words]
        try:
            done = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=GIT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit and git("status", "--porcelain", "--", os.path.basename(flow.file)) != "":
        return f"{commit}+"
    return commit


class _Writer:
    """Writes the changes of a plan, within a transaction."""

    def __init__(
        self,
        store: Store,
        flow: Flow,
        registered: Registrations,
        environ: Mapping[str, str],
        revision: str | None,
    ) -> None:
        self._store, self._db, self._flow = store, store.db, flow
        self._registered, self._environ, self._revision = registered, environ, revision
        self._salted = [
            value
            for rows in registered.datasets.values()
            for row in rows
            if (value := row.get(SECRET))
        ]

    def write(self, plan: FlowPlan) -> None:
        named = {(DATASET, dataset.datasetid): dataset for dataset in self._flow.datasets}
        jobs = {(JOB, job.jobid): job for job in self._flow.jobs}
        written = [change for change in plan.changes if change.action != REMOVE]
        removed = [change for change in plan.changes if change.action == REMOVE]
        self._write_datasets([(each, named[each[1:3]]) for each in written if each.kind == DATASET])
        self._write_jobs([(each, jobs[each[1:3]]) for each in written if each.kind == JOB])
        for change in removed:
            self._remove(change)
        own = [change[1:3] for change in written]
        self._note([*own, *plan.noted], jobs)
        if own:
            keys = [{"kind": kind, "name": name} for kind, name in own]
            self._db.change("flow.disown", rows=json.dumps(keys), origin=self._flow.origin)
        for kind, name in plan.forgotten:
            self._db.change("flow.forget", kind=kind, name=name, origin=self._flow.origin)

    def _write_datasets(self, found: Iterable[tuple[Change, Dataset]]) -> None:
        new = []
        for change, dataset in found:
            row = {"datasetid": dataset.datasetid, **dataset.columns(self._environ)}
            if dataset.password is not None:
                row[SECRET] = self._secret(change, dataset)
            if change.action == ADD:
                new.append(row)
            else:
                self._db.change("flow.set_dataset", **row)
        if new:
            self._db.change("flow.add_datasets", rows=json.dumps(new))

    def _secret(self, change: Change, dataset: Dataset) -> str | None:
        """The encrypted password: the one that is there, if it is that of the environment."""
        rows = self._registered.datasets.get(dataset.datasetid, [])
        if rows and "password" not in change.keys:
            return rows[0].get(SECRET)
        return encrypt(
            dataset.secret(self._environ) or "",
            find_passkey(self._environ),
            purpose=for_dataset(dataset.datasetid),
            beside=self._salted,
        )

    def _write_jobs(self, found: Sequence[tuple[Change, Job]]) -> None:
        items: list[dict[str, Any]] = []
        linked_again: list[str] = []
        for change, job in found:
            is_linked_again = change.action == ADD or bool(change.keys & {"in", "out"})
            if is_linked_again:
                if change.action == CHANGE:
                    refuse_live(self._store, job.jobid)
                linked_again.append(job.jobid)
            elif any(key.startswith(VARIABLE) for key in change.keys):
                self._db.change("registry.remove_variables", jobid=job.jobid)
            else:
                continue
            items += [
                {"jobid": job.jobid, "itemtype": kind, "datasetid": datasetid, "itemvalue": value}
                for kind, datasetid, value in sorted(self._items(job), key=repr)
                if is_linked_again or not datasetid
            ]
        if linked_again:
            self._db.change("flow.remove_items", jobids=json.dumps(linked_again))
        if items:
            self._db.change("flow.add_items", items=json.dumps(items))
        self._turn_dials(found)

    def _items(self, job: Job) -> set[tuple[str, str | None, str | None]]:
        """The rows of a job; the mark of a pipeline's project stays."""
        marks = self._registered.variables.get(job.jobid, frozenset())
        kept = {(name, None, value) for name, value in marks if name == PROJECT_ITEM}
        is_kept = job.pipeline is not None and PROJECT_ITEM not in job.environment
        return job.items | (kept if is_kept else set())

    def _turn_dials(self, found: Sequence[tuple[Change, Job]]) -> None:
        turned = {
            job.jobid: (job, dials)
            for change, job in found
            if (dials := [key[len(DIAL) :] for key in change.keys if key.startswith(DIAL)])
        }
        if turned:
            self._db.change("flow.add_policies", jobids=json.dumps(list(turned)))
        for job, dials in turned.values():
            for name in sorted(dials):
                value = read_dial(self._store, name, job.policy.get(name, "none"))
                self._db.change(f"registry.set_{name}", jobid=job.jobid, value=value)

    def _remove(self, change: Change) -> None:
        if change.kind == JOB:
            refuse_live(self._store, change.name)
            self._db.change("registry.remove_job", jobid=change.name)
            self._db.change("registry.remove_policy", jobid=change.name)
        else:
            self._db.change("registry.remove_dataset", datasetid=change.name)
        self._db.change("registry.forget_origins", kind=change.kind, name=change.name)

    def _note(self, names: Iterable[tuple[str, str]], jobs: Mapping[tuple[str, str], Job]) -> None:
        """Remember that the flow declares these."""
        rows = [
            {
                "kind": kind,
                "name": name,
                "dials": json.dumps(sorted(jobs[kind, name].policy)) if kind == JOB else None,
            }
            for kind, name in names
        ]
        if rows:
            self._db.change(
                "flow.note_origins",
                rows=json.dumps(rows),
                origin=self._flow.origin,
                who=person(),
                revision=self._revision,
            )


def refuse_stale(plan: FlowPlan, expected: str | None) -> None:
    """Refuse a plan that isn't the one that was looked at."""
    if expected is None or plan.hash == expected:
        return
    raise Refused(
        f"The plan {expected[:40]!r} isn't what would be done now: the flow, the tables or the "
        f"options have changed since. Nothing was changed. Run `odf plan`; now it is {plan.hash}.",
        code="STALE_PLAN",
    )


def _additions(plan: FlowPlan) -> FlowPlan:
    """What a plan adds, and adopts as it is."""
    # A conflict that can't even be adopted concerns the rest, too: it stays, and is refused.
    added = [
        change
        for change in plan.changes
        if change.action != REMOVE
        and (not change.may_adopt if change.conflict else change.action == ADD)
    ]
    return plan._replace(changes=tuple(added), forgotten=())


def _refuse_conflicts(plan: FlowPlan) -> None:
    if not plan.conflicts:
        return
    first = plan.conflicts[0]
    more = f", and {len(plan.conflicts) - 1} more" if len(plan.conflicts) > 1 else ""
    raise Refused(
        f"{first.kind.capitalize()} {first.name!r} can't be applied{more}: {first.conflict}. "
        "Nothing was changed. `odf plan` shows the differences.",
        code="CONFLICT" if first.may_adopt else "IN_USE",
    )
