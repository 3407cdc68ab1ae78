"""Applying a flow in one transaction; and what is registered, as a flow.yml whose plan is empty."""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from ..config.credentials import encrypt, find_passkey, for_dataset, is_encrypted
from ..errors import Refused, WrongUse
from ..model import DATASET_COLUMNS
from ..store.catalog import keep_names
from ..store.moves import person
from ..store.registry import read_dial, refuse_live
from ..store.store import Store
from ..util.text import printable
from .catalog import (
    DATASET,
    JOB,
    PROJECT_ITEM,
    Columns,
    Registrations,
    catalog_of,
    read_registered,
)
from .flow import EXPANDED, Dataset, Flow, Job, escape, origin_of
from .plan import ADD, CHANGE, DIAL, REMOVE, SECRET, VARIABLE, Change, FlowPlan, compare

GIT_SECONDS = 10.0
"""Seconds that git may take to report the commit."""

SCHEMA_LINE = "# yaml-language-server: $schema=flow.schema.json"
_LINE_LETTERS = 120


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
            keep_names(store)
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
        self._rename_domains()

    def _rename_domains(self) -> None:
        """Let domains be called as the flow says: the plan refuses it where it may not."""
        names = self._registered.names
        for datasetid, name in catalog_of(self._flow, environ=self._environ).domains.items():
            if names.get(datasetid, name) != name:
                self._db.change("catalog.change_name", datasetid=datasetid, name=name)

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
        f"Plan {expected[:40]!r} no longer applies: the flow, the tables or the options "
        "have changed since. Nothing was changed. Run `odf plan`; the plan is now "
        f"{plan.hash}.",
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
        f"{first.kind.capitalize()} {first.name!r} can't be applied{more}: "
        f"{first.conflict}. Nothing was changed. For the differences, run: odf plan",
        code="CONFLICT" if first.may_adopt else "IN_USE",
    )


class LeftOut(NamedTuple):
    """What isn't in an export, and why."""

    kind: str
    name: str
    why: str


class Export(NamedTuple):
    """The text of a flow.yml, and what isn't in it."""

    text: str
    left_out: tuple[LeftOut, ...]


def export_flow(store: Store, name: str | None = None) -> Export:
    """Write what is registered as a flow.yml.

    Left out is what pipelines of projects and other flows register, and what no flow.yml may say.
    Passwords stay encrypted. What runs a job isn't known to the tables.

    Args:
        store: The tables.
        name: The flow's name; else that of the only flow that the tables know, or the folder's.
    """

    def look() -> Registrations:
        with store.db.reading():
            return read_registered(store)

    registered = store.db.insist(look)[0]
    return _Exporter(registered, name or _name(registered)).export()


def _name(registered: Registrations) -> str:
    prefix = origin_of("")
    origins = {origin for found in registered.declared.values() for origin in found}
    flows = sorted(origin.removeprefix(prefix) for origin in origins if origin.startswith(prefix))
    if len(flows) > 1:
        named = ", ".join(map(repr, flows[:5]))
        raise WrongUse(f"The tables have several flows: {named}. Choose one with --flow NAME.")
    return flows[0] if flows else os.path.basename(os.getcwd()) or "flow"


class _Exporter:
    def __init__(self, registered: Registrations, name: str) -> None:
        self._registered, self._name = registered, name
        self._left_out: list[LeftOut] = []

    def export(self) -> Export:
        written: dict[str, Any] = {"flow": Flow(self._name).name}
        datasets = dict(self._datasets())
        self._name_domains(datasets)
        jobs = dict(self._jobs())
        written |= {"datasets": datasets} if datasets else {}
        written |= {"jobs": jobs} if jobs else {}
        text = yaml.dump(
            written,
            Dumper=_Dumper,
            allow_unicode=True,
            sort_keys=False,
            width=_LINE_LETTERS,
        )
        comments = [
            f"# Left out: {each.kind} {printable(each.name)}: {printable(each.why)}"
            for each in self._left_out
        ]
        return Export("\n".join([SCHEMA_LINE, *comments, text]), tuple(self._left_out))

    def _datasets(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        for name, rows in sorted(self._registered.datasets.items()):
            if why := self._foreign(DATASET, name) or _unlike(rows):
                self._left_out.append(LeftOut(DATASET, name, why))
                continue
            try:
                values = _values(rows[0])
                Dataset(name, **values)
            except WrongUse as error:
                self._left_out.append(LeftOut(DATASET, name, str(error)))
                continue
            yield name, values or None

    def _name_domains(self, datasets: dict[str, dict[str, Any] | None]) -> None:
        """Say which name a domain has kept, where a flow would give it another one."""
        kept = self._registered.catalog().domains
        now = self._registered.catalog(recorded=False).domains
        named = set[str]()
        for name in sorted(datasets, key=lambda name: (name != kept[name], name)):
            if kept[name] != now[name] and now[name] not in named:
                datasets[name] = {**(datasets[name] or {}), "domain": kept[name]}
                named.add(now[name])

    def _jobs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, links in sorted(self._registered.links.items()):
            if why := self._foreign(JOB, name):
                self._left_out.append(LeftOut(JOB, name, why))
                continue
            inputs, outputs = (
                sorted(item for each, item in links if each == kind) for kind in ("IN", "OUT")
            )
            variables = self._registered.variables.get(name, frozenset())
            environment = dict(sorted(variables))
            dials = self._registered.dials.get(name, {})
            policy = {key: value for key, value in dials.items() if value is not None}
            try:
                if len(environment) < len(variables):
                    raise WrongUse("A variable is set twice, with different values")
                Job(name, inputs=inputs, outputs=outputs, environment=environment, policy=policy)
            except WrongUse as error:
                self._left_out.append(LeftOut(JOB, name, str(error)))
                continue
            values = {"in": inputs, "out": outputs, "policy": policy, "environment": environment}
            yield name, {key: value for key, value in values.items() if value}

    def _foreign(self, kind: str, name: str) -> str:
        """Who else declares this, if the flow doesn't."""
        origins = self._registered.origins(kind, name)
        if not origins or origin_of(self._name) in origins:
            return ""
        return f"declared by {' and '.join(sorted(origins))}"


def _values(row: Columns) -> dict[str, Any]:
    """A dataset's columns as its keys are written."""
    found: dict[str, Any] = {}
    for name in DATASET_COLUMNS:
        value = row.get(name)
        if value is None:
            continue
        if name == SECRET and not is_encrypted(value):
            raise WrongUse("its encryptedpass isn't encrypted: run `odf dataset add --password`")
        if name == "options":
            found[name] = _options(value)
        else:
            found[name] = escape(value) if name in EXPANDED else value
    return found


def _options(text: str) -> Any:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if not isinstance(read, dict) or not read:
        raise WrongUse("its options aren't a JSON object")
    return read


def _unlike(rows: list[Columns]) -> str:
    same = all(row == rows[0] for row in rows)
    return "" if same else f"it has {len(rows)} rows with different values"


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        # Other styles fold lines, and take more characters for the end of one than they write.
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_str)
