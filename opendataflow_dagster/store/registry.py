"""What is registered: datasets, the jobs that read and write them, and each job's dials."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from ..config.credentials import encrypt, find_passkey, for_dataset, is_encrypted
from ..config.settings import redact
from ..errors import Refused, WrongUse
from ..formats.csv_options import csv_options
from ..model import DATASET_COLUMNS, DIALS, Plan, check_id, check_text, check_variable
from ..util.text import count_of, typed
from ..util.times import FOREVER_YEAR, from_table, parse_duration, parse_time, to_table
from .catalog import keep_names
from .moves import person
from .operations import EXTERNAL, unknown_dataset
from .store import Store, is_registered, refuse_flawed

SPLIT = "split"
"""The job id of chunks that `odf split` registered."""

WRITE_MODES = ("append", "replace")

FOREVER = datetime(FOREVER_YEAR, 1, 1, tzinfo=UTC)

LARGEST_INTEGER = 2**31 - 1
"""What a dial's column can hold on PostgreSQL."""

Item = tuple[str, str | None, str | None]
"""A row of a job's registration: IN, OUT or a variable's name; its dataset; its value."""


class Added(NamedTuple):
    """What a registration wrote, and what is worth knowing about it."""

    rows: int
    notes: list[str]


class Removal(NamedTuple):
    """What a removal does to so many rows or chunks."""

    what: str
    rows: int
    effect: str


def add_dataset(
    store: Store,
    datasetid: str,
    *,
    password: str | None = None,
    **columns: str | None,
) -> bool:
    """Register a dataset, or change the columns named here; whether it is new.

    None leaves a column as it is, an empty text clears it. The password is encrypted on the way.
    """
    check_columns(datasetid, columns)
    check_text("password", password)
    if password:
        others = [value for _, value in store.db.run("credentials.values")]
        columns["encryptedpass"] = encrypt(
            password, find_passkey(), purpose=for_dataset(datasetid), beside=others
        )
    values = {name: columns.get(name) for name in DATASET_COLUMNS}

    def work() -> bool:
        with store.db.transaction(who=person()):
            # The table has no unique key, as the original's: two who register one dataset at the
            # same time would both find it missing.
            store.db.run("registry.lock_datasets")
            if is_registered(store, datasetid):
                store.db.change("registry.change_dataset", datasetid=datasetid, **values)
                return False
            store.db.change("registry.add_dataset", datasetid=datasetid, **values)
            return True

    return store.db.insist(work)[0]


def check_columns(datasetid: str, columns: Mapping[str, str | None]) -> None:
    """Refuse a dataset's id, or a value of one of its columns, that nothing could work with."""
    check_id("datasetid", datasetid)
    if datasetid == "today":
        raise WrongUse(
            "'today' is reserved: it is READY by itself, every day. Choose another name."
        )
    unknown = sorted(set(columns) - set(DATASET_COLUMNS))
    if unknown:
        raise WrongUse(
            f"A dataset has no column {unknown[0]!r}. It has {', '.join(DATASET_COLUMNS)}."
        )
    for name, value in columns.items():
        check_text(f"value of {name}", value)
        if name in ("hostname", "database") and value and has_password(value):
            raise WrongUse(
                f"The {name} of dataset {datasetid!r} has a password in its URL, where everyone "
                "can read it. Remove it, and use --password; for an object store, use a setting "
                "of Spark."
            )
    mode = columns.get("writemode")
    if mode and mode not in WRITE_MODES:
        raise WrongUse(
            f"writemode {mode[:40]!r} isn't known. A pipeline can {' or '.join(WRITE_MODES)}."
        )
    if options := columns.get("options"):
        csv_options(datasetid, options)
    encrypted = columns.get("encryptedpass")
    if encrypted and not is_encrypted(encrypted):
        raise WrongUse(
            f"encryptedpass of dataset {datasetid!r} isn't an encrypted value. Make one with "
            f"`odf encrypt --dataset {typed(datasetid)}`, or use --password."
        )


def has_password(place: str) -> bool:
    """Whether a place is a URL with a password in it."""
    is_url = place.startswith("jdbc:") or "://" in place
    return is_url and redact(place) != place


def datasets(store: Store) -> list[dict[str, Any]]:
    """The rows of `dataset`; of an encrypted password only its first characters."""
    rows = store.db.records("registry.datasets")
    return [row | {"encryptedpass": _shortened(row["encryptedpass"])} for row in rows]


def add_job(
    store: Store,
    jobid: str,
    inputs: Iterable[str] = (),
    outputs: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    replace: bool = False,
    beside: Iterable[Plan] = (),
    origin: str | None = None,
) -> Added:
    """Register a job, or add to it; with `replace`, it has these items and no others from now on.

    A variable that the job sets already gets the new value. `beside` are jobs that are registered
    together with it: what their rows still say doesn't count. `origin` is what declares the job,
    such as `project:shop`.
    """
    wanted = job_items(jobid, inputs, outputs, environment or {})

    def work() -> Added:
        db = store.db
        with db.transaction(who=person()):
            # Also against a circle that two jobs would close together, each of them allowed alone.
            db.run("registry.lock_jobs")
            rows = db.run("registry.items", jobid=jobid)
            links, wanted_links = _links(rows), _links(wanted)
            links_after = wanted_links if replace else links | wanted_links
            check_links(jobid, links_after)
            if links != links_after:
                keep_names(store)
            if wanted_links - links:
                _refuse_circle(store, jobid, links_after, beside)
            new = (_replace_items if replace else _extend_items)(store, jobid, rows, wanted)
            if new:  # in one statement, so that what may be claimed is judged once
                names = ("itemtype", "datasetid", "itemvalue")
                items = [dict(zip(names, item, strict=True)) for item in new]
                db.change("registry.add_items", jobid=jobid, items=json.dumps(items))
            if origin:
                db.change(
                    "registry.note_origin",
                    kind="job",
                    name=jobid,
                    origin=origin,
                    who=person(),
                    revision=None,
                )
            notes = _unregistered_notes(store, wanted)
        store._plans.pop(jobid, None)
        return Added(len(new), notes)

    return store.db.insist(work)[0]


def _links(items: Iterable[Sequence[str | None]]) -> set[tuple[str, str]]:
    """What of a registration joins the job to datasets: IN or OUT, and the dataset."""
    return {
        (kind, datasetid) for kind, datasetid, _ in items if kind in ("IN", "OUT") and datasetid
    }


def _replace_items(
    store: Store, jobid: str, rows: Sequence[tuple], wanted: Sequence[Item]
) -> Sequence[Item]:
    """Remove a job's rows that aren't wanted; return the wanted ones that are missing."""
    has_duplicates = len(rows) != len(set(rows))
    if set(rows) == set(wanted) and not has_duplicates:
        return []
    links, wanted_links = _links(rows), _links(wanted)
    if links == wanted_links and not has_duplicates:
        # The rows of datasets stay: writing them again would have every chunk judged again.
        store.db.change("registry.remove_variables", jobid=jobid)
        return [item for item in wanted if not item[1]]
    if links - wanted_links:
        refuse_live(store, jobid)
    store.db.change("registry.remove_job", jobid=jobid)
    return wanted


def _extend_items(
    store: Store, jobid: str, rows: Sequence[tuple], wanted: Sequence[Item]
) -> Sequence[Item]:
    """Give a job's variables their new values; the wanted items that it doesn't have."""
    links, variables = _links(rows), {row[0] for row in rows if row[0] not in ("IN", "OUT")}
    new = []
    for kind, datasetid, value in wanted:
        if datasetid:
            is_new = (kind, datasetid) not in links
        else:
            is_new = kind not in variables
            if not is_new:
                store.db.change("registry.change_item", jobid=jobid, variable=kind, value=value)
        if is_new:
            new.append((kind, datasetid, value))
    return new


def _unregistered_notes(store: Store, items: Iterable[Item]) -> list[str]:
    """What a person should know of datasets that a job names and that have no row."""
    names = dict.fromkeys(item[1] for item in items if item[1] and item[1] != "today")
    return [
        f"Dataset {name!r} isn't registered: its chunks are tracked, but the job gets "
        f"no variables for it. To register it, run: odf dataset add {typed(name)}"
        for name in names
        if not is_registered(store, name)
    ]


def remove_job(store: Store, jobid: str, *, plan: bool = False) -> list[Removal]:
    """Remove a job's registration and dials, and say what that does; chunks and history stay."""
    check_id("jobid", jobid)

    def work() -> list[Removal]:
        db = store.db
        with db.transaction(who=person()):
            db.run("registry.lock_jobs")
            items = len(db.run("registry.items", jobid=jobid))
            if not items:
                refuse_flawed(store, Plan(jobid, (), (), (), (), False))
            refuse_live(store, jobid)
            [(claimable,)] = db.run("why.claimable", jobid=jobid)
            found = [
                Removal("items of the job", items, "go"),
                Removal("dials", len(db.records("registry.policy", jobid=jobid)), "go"),
                Removal("chunks that may be claimed", claimable, "no job can claim them any more"),
                *_chunks(store, jobid=jobid),
                *(
                    Removal(
                        f"chunks of {reader!r} that may be claimed",
                        chunks,
                        f"stay so; {reader!r} gets no new ones from {jobid!r}",
                    )
                    for reader, chunks in db.run("registry.readers", jobid=jobid)
                ),
            ]
            if not plan:
                keep_names(store)
                db.change("registry.remove_job", jobid=jobid)
                db.change("registry.remove_policy", jobid=jobid)
                db.change("registry.forget_origins", kind="job", name=jobid)
        store._plans.pop(jobid, None)
        return found

    return store.db.insist(work)[0]


def remove_dataset(store: Store, datasetid: str, *, plan: bool = False) -> list[Removal]:
    """Remove a dataset's registration, unless a job uses it; its chunks and data stay."""
    check_id("datasetid", datasetid)

    def work() -> list[Removal]:
        db = store.db
        with db.transaction(who=person()):
            db.run("registry.lock_datasets")
            if not is_registered(store, datasetid):
                raise unknown_dataset(store, datasetid)
            users = [jobid for (jobid,) in db.run("registry.users", datasetid=datasetid)]
            if users:
                raise Refused(
                    f"Dataset {datasetid!r} is read or written by {', '.join(map(repr, users[:5]))}"
                    f"{' and others' if len(users) > 5 else ''}. "
                    f"First run: odf job remove {typed(users[0])}",
                    code="IN_USE",
                )
            found = [
                Removal("registration with its password", 1, "goes"),
                *_chunks(store, datasetid=datasetid),
            ]
            if not plan:
                db.change("registry.remove_dataset", datasetid=datasetid)
                db.change("registry.forget_origins", kind="dataset", name=datasetid)
                db.change("catalog.forget_name", datasetid=datasetid)
        return found

    return store.db.insist(work)[0]


def _chunks(store: Store, *, jobid: str | None = None, datasetid: str = "") -> list[Removal]:
    rows = store.db.run("registry.chunks", jobid=jobid, datasetid=datasetid)
    return [
        Removal(f"chunks of {dataset!r} that are {word}", chunks, "stay, with data and history")
        for dataset, word, chunks in rows
    ]


def jobs(store: Store, jobid: str | None = None) -> list[dict[str, Any]]:
    """The rows of `job`, or those of one job."""
    if jobid is not None:
        check_id("jobid", jobid)
    rows = store.db.records("registry.jobs", jobid=jobid)
    return [row | {"modified": from_table(store, row["modified"])} for row in rows]


def policy(store: Store, jobid: str) -> dict[str, Any]:
    """The dials of a job; None where the default holds."""
    _refuse_unregistered(store, jobid)
    rows = store.db.records("registry.policy", jobid=jobid)
    if not rows:
        return {"jobid": jobid} | dict.fromkeys(DIALS)
    [row] = rows
    dials = {key: row[key] for key in DIALS}
    return {"jobid": jobid} | dials | {"paused_until": row["pause"]}


def set_policy(
    store: Store, jobid: str, dials: Mapping[str, str], *, who: str | None = None
) -> dict[str, Any]:
    """Set dials of a job; `none` or an empty value resets one. Return the new row."""
    for key in dials:
        if key not in DIALS:
            raise WrongUse(f"There is no dial {key!r}. The dials are {', '.join(DIALS)}.")
    values = {key: read_dial(store, key, value) for key, value in dials.items()}

    def work() -> None:
        with store.db.transaction(who=who or person()):
            _refuse_unregistered(store, jobid)
            store.db.change("registry.add_policy", jobid=jobid)
            for key, value in values.items():
                store.db.change(f"registry.set_{key}", jobid=jobid, value=value)

    store.db.insist(work)
    store._plans.pop(jobid, None)
    return policy(store, jobid)


def job_items(
    jobid: str, inputs: Iterable[str], outputs: Iterable[str], environment: Mapping[str, str]
) -> list[Item]:
    """The rows of a registration, each checked and none twice."""
    check_id("jobid", jobid)
    if jobid in (EXTERNAL, SPLIT):
        raise WrongUse(
            f"{jobid!r} is reserved for chunks that no job produced. Choose another name."
        )
    items: list[Item] = []
    for kind, datasetids in (("IN", inputs), ("OUT", outputs)):
        items += [(kind, check_id("datasetid", name), None) for name in dict.fromkeys(datasetids)]
    if ("OUT", "today", None) in items:
        raise WrongUse(
            "'today' can't be an output: it is READY by itself, every day. Use it as an input."
        )
    for name, value in environment.items():
        check_variable(name)
        if name.upper() in ("IN", "OUT"):
            raise WrongUse(
                f"A variable can't have the name {name!r}: IN and OUT are what a job reads and "
                "writes."
            )
        check_text(f"value of {name}", value)
        items.append((name, None, value))
    return items


def check_links(jobid: str, links: set[tuple[str, str]]) -> None:
    inputs = {datasetid for kind, datasetid in links if kind == "IN"}
    outputs = {datasetid for kind, datasetid in links if kind == "OUT"}
    if not outputs:
        raise WrongUse(
            f"Job {jobid!r} would have no output, so nothing could record which chunks it "
            "has done. Give it an output with --out DATASET."
        )
    for both in sorted(inputs & outputs):
        raise WrongUse(
            f"Job {jobid!r} would read and write {both!r}, and so run on its own output for "
            "ever. Use another dataset for its output."
        )


def circle_of_jobs(links: Iterable[tuple[str, str, str]]) -> str:
    """A circle of jobs and datasets in rows of (job, IN or OUT, dataset), as a line; or nothing."""
    before: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for jobid, kind, datasetid in links:
        job, dataset = ("job", jobid), ("dataset", datasetid)
        first, then = (dataset, job) if kind == "IN" else (job, dataset)
        before.setdefault(then, set()).add(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return " → ".join(name for _, name in error.args[1])
    return ""


def _refuse_circle(
    store: Store, jobid: str, links: Collection[tuple[str, str]], beside: Iterable[Plan]
) -> None:
    """Refuse links that make a job wait for jobs downstream of its own output."""
    others = {plan.jobid: plan for plan in beside if plan.jobid != jobid}
    edges = [
        *(edge for edge in store.db.run("moves.edges") if edge[0] not in (jobid, *others)),
        *((plan.jobid, "IN", name) for plan in others.values() for name in plan.inputs),
        *((plan.jobid, "OUT", name) for plan in others.values() for name in plan.outputs),
    ]
    writes: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = {}
    for other, kind, datasetid in edges:
        if kind == "IN":
            readers.setdefault(datasetid, []).append(other)
        else:
            writes.setdefault(other, []).append(datasetid)
    paths = [[jobid, datasetid] for kind, datasetid in sorted(links) if kind == "OUT"]
    seen = {path[-1] for path in paths}
    for path in paths:  # it grows meanwhile: the shortest circle is found first
        if ("IN", path[-1]) in links:
            raise WrongUse(
                f"Job {jobid!r} would wait for its own output: {' → '.join([*path, jobid])}. "
                "Use another dataset as the output of one of these jobs."
            )
        for other in readers.get(path[-1], ()):
            for datasetid in set(writes.get(other, ())) - seen:
                seen.add(datasetid)
                paths.append([*path, other, datasetid])


def refuse_live(store: Store, jobid: str) -> None:
    [(count, owner)] = store.db.run("registry.live_claims", jobid=jobid)
    if count:
        raise Refused(
            f"Job {jobid!r} is running on {count_of(count, 'chunk')} ({owner} holds one), so its "
            f"datasets can't be changed now. Run `odf policy {typed(jobid)} paused_until=forever`, "
            "and try again when they have ended.",
            code="LOCKED",
        )


def _refuse_unregistered(store: Store, jobid: str) -> None:
    check_id("jobid", jobid)
    if not store.db.run("registry.items", jobid=jobid):
        refuse_flawed(store, Plan(jobid, (), (), (), (), False))


def read_dial(store: Store, key: str, text: str) -> Any:
    """The value of a dial from what a person wrote."""
    text, dial = text.strip(), DIALS[key]
    if text.lower() in ("", "none") or (key == "paused_until" and text.lower() == "no"):
        return None
    if dial.unit == "time":
        return _time_of_dial(store, key, text)
    return dial_value(key, text)


def dial_value(key: str, text: str) -> int | str | None:
    """The value of a dial that is no moment, from what a person wrote."""
    dial = DIALS[key]
    if text.lower() in ("", "none"):
        return None
    if dial.words:
        if text.lower() not in dial.words:
            raise WrongUse(
                f"{key}={text[:40]!r} isn't valid: use one of {', '.join(dial.words)}, or "
                "`none` to reset the dial."
            )
        return text.lower()
    is_seconds = dial.unit == "seconds"
    try:
        number = round(parse_duration(text)) if is_seconds else int(text)
    except (WrongUse, ValueError):
        number = -1
    if not dial.least <= number <= LARGEST_INTEGER:
        kind = "a number of seconds (or 30m, 2h)" if is_seconds else "a whole number"
        raise WrongUse(
            f"{key}={text[:40]!r} isn't valid: use {kind}, at least {dial.least}, or `none` "
            "to reset the dial."
        )
    return number


def _time_of_dial(store: Store, key: str, text: str) -> Any:
    """The moment that a person wrote: `forever`, +2h from now, or a time."""
    if text.lower() == "forever":
        return to_table(store, FOREVER)
    if text.startswith("+"):
        seconds = min(store.now() + parse_duration(text[1:]), FOREVER.timestamp())
        return to_table(store, datetime.fromtimestamp(seconds, UTC))
    try:
        return to_table(store, min(parse_time(store, text), FOREVER))
    except WrongUse as error:
        raise WrongUse(f"{key}: {error} Or write +2h, +30m, forever or no.") from None


def _shortened(value: str | None) -> str | None:
    """The start of an encrypted value; nothing of a password stored in the clear."""
    if not value:
        return value
    return (value[:10] if is_encrypted(value) else "") + "..."
