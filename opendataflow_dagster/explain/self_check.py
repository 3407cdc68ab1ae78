"""The checks of `odf doctor` that ask the database."""

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from ..errors import CredentialError, DataflowError
from ..store.database import Versions
from ..store.history import unread
from ..store.store import CLOCK_DRIFT_SECONDS, LONGEST_LEASE_SECONDS, Store
from ..store.upgrade import missing_tables, missing_triggers, triggers
from ..util.text import count_of, printable, typed
from ..util.times import from_table, shown, to_table
from .explain import judge_chunks

OLDEST_SERVER = 13
END_TRANSACTION = (
    "Find it in pg_stat_activity and pg_prepared_xacts as superuser, and end it: "
    "select pg_terminate_backend(PID), or rollback prepared"
)

MAX_COMPARED_ROWS = 200_000
"""Rows above which the queue isn't compared with datastatus unless asked: that reads all rows."""


class Check(NamedTuple):
    """One check: `ok`, `warn` or `fail`, what was found, and what to run."""

    check: str
    result: str
    detail: str
    action: str = ""


def examine_database(store: Store, environ: Mapping[str, str], deep: bool) -> Iterator[Check]:
    with store.db.of_any_version():
        yield from _examine(store, environ, deep)


def _examine(store: Store, environ: Mapping[str, str], deep: bool) -> Iterator[Check]:
    server = _tried("database", store, lambda: _server(store))
    yield server
    if server.result == "fail":
        return
    if store.db.pooled:
        yield _tried("pooler", store, lambda: _pooler(store))
    tables = _tried("tables", store, lambda: _tables(store))
    yield tables
    if tables.result == "fail":
        return
    for name, look in (
        ("triggers", _triggers),
        ("clock", _clock),
        ("permissions", _permissions),
        ("log", _log),
        ("queue", lambda store: _queue(store, deep)),
        ("leases", _leases),
        ("jobs", _jobs),
    ):
        yield _tried(name, store, lambda look=look: look(store))
    domains = _tried("domains", store, lambda: _domains(store))
    if domains.result != "ok":
        yield domains
    packs = _tried("packs", store, lambda: _packs(store))
    if packs.result != "ok":  # only stores of earlier versions have some
        yield packs
    yield _tried("passwords", store, lambda: _passwords(store, environ))


def _tried(name: str, store: Store, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except (DataflowError, *store.db.failures) as error:
        line = str(error).strip().partition("\n")[0]
    return Check(name, "fail", line, "odf init" if "odf init" in line else "")


def _server(store: Store) -> Check:
    [(major, version)] = store.db.run("doctor.server")
    if store.db.dialect == "sqlite":
        return Check("database", "ok", f"{store.db.where}, SQLite {version}")
    if major < OLDEST_SERVER:
        detail = f"{store.db.where}: PostgreSQL {version} is too old"
        return Check("database", "fail", detail, f"Upgrade to PostgreSQL {OLDEST_SERVER} or newer")
    return Check("database", "ok", f"{store.db.where}, PostgreSQL {version}")


def _pooler(store: Store) -> Check:
    with store.db.transaction():
        left = ", ".join(name for (name,) in store.db.run("doctor.left_behind"))
    if left:
        detail = f"there is one, and another client changed settings of its session: {left}"
        action = "Upgrade opendataflow-dagster on all hosts that use this pooler, and restart it"
        return Check("pooler", "warn", detail, action)
    return Check("pooler", "ok", "there is one; table names are qualified, nothing is prepared")


def _tables(store: Store) -> Check:
    db, program = store.db, store.version
    versions = db.read_versions() if "dataflow_meta" in db.tables() else Versions()
    if versions.version <= program and (missing := missing_tables(db)):
        return Check("tables", "fail", f"missing in {db.where}: {', '.join(missing)}", "odf init")
    seen = f"version {versions.version or 'unknown'}"
    if versions.version < program:
        detail = f"{seen}, this program needs version {program}"
        return Check("tables", "fail", detail, "odf init")
    if program < versions.oldest_client:
        detail = f"{seen}, which needs programs of version {versions.oldest_client}, not {program}"
        return Check("tables", "fail", detail, "Upgrade opendataflow-dagster on this host")
    if versions.triggers != versions.version:
        detail = (
            f"{seen}, whose triggers the `odf init` of version {versions.triggers} has rewritten"
        )
        return Check("tables", "fail", detail, versions.repair(program).replace("`", ""))
    oldest = f"for programs of version {versions.oldest_client} or newer"
    if versions.version > program:
        return Check("tables", "ok", f"{seen}, newer than this program ({program}), {oldest}")
    return Check("tables", "ok", f"all there, {seen}, {oldest}")


def _is_newer(store: Store) -> bool:
    """Whether the tables have triggers and a queue of which this program doesn't know all."""
    return store.db.versions is not None and store.db.versions.version > store.version


def _triggers(store: Store) -> Check:
    if _is_newer(store):
        return Check("triggers", "ok", "not compared: the triggers are newer than this program")
    wanted, missing = triggers(store.db), missing_triggers(store.db)
    found = dict(store.db.run("doctor.triggers"))
    disabled = sorted(name for name in wanted & set(found) if not found[name])
    if missing:
        return Check("triggers", "fail", f"missing: {', '.join(missing)}", "odf init")
    if disabled:
        detail = f"switched off: {', '.join(disabled)}; nothing is recorded or becomes claimable"
        return Check("triggers", "fail", detail, "odf init, after alter table … enable trigger")
    return Check("triggers", "ok", f"all {len(wanted)} exist and fire")


def _clock(store: Store) -> Check:
    before = time.time()
    there = store.now()
    drift = there - (before + time.time()) / 2
    if abs(drift) > CLOCK_DRIFT_SECONDS:
        way = "ahead" if drift > 0 else "behind"
        detail = f"the database's is {abs(drift):.0f} s {way}, and only the database's counts"
        return Check("clock", "warn", detail, "Synchronise the clocks")
    return Check("clock", "ok", f"{abs(drift) * 1000:.0f} ms from the database's")


class _TakeBack(Exception):
    """Ends a transaction that is not to be kept."""


def _permissions(store: Store) -> Check:
    try:
        # A real write, taken back: privileges, read-only servers and full disks refuse only that.
        with store.db.transaction(who="odf doctor", act="claim"):
            store.db.change("doctor.probe")
            if store.db.dialect == "postgres":
                store.db.run("claims.judge", jobid="odf doctor", dataid="odf doctor")
            raise _TakeBack
    except _TakeBack:
        pass
    if store.db.dialect == "postgres" and store.db.run("doctor.may_vacuum") != [(True,)]:
        detail = "may write, but not vacuum `pending`, so that only autovacuum keeps it small"
        action = (
            "On PostgreSQL 17 or newer: grant maintain on pending; else make this user its owner"
        )
        return Check("permissions", "warn", detail, action)
    return Check("permissions", "ok", "may write datastatus")


def _log(store: Store) -> Check:
    if store.db.dialect == "sqlite":
        return Check("log", "ok", "one writer at a time, so nothing holds it back")
    if store.db.run("history.restored") == [(True,)]:
        return Check(
            "log",
            "fail",
            "it was restored from another server: new changes look like old ones",
            "odf init",
        )
    if late := unread(store):
        return Check("log", "warn", late.rstrip("."), END_TRANSACTION)
    holders = [
        f"process {pid} of {user}{f' ({name})' if name else ''} for {seconds} s"
        for pid, user, name, seconds in store.db.run("doctor.holding_back")
    ] + [
        f"prepared transaction {gid!r} for {seconds} s"
        for gid, seconds in store.db.run("doctor.prepared")
    ]
    if holders:
        detail = f"history waits for open transactions: {', '.join(holders)}"
        return Check("log", "warn", detail, END_TRANSACTION)
    return Check("log", "ok", "no long transaction delays it")


def _queue(store: Store, deep: bool) -> Check:
    if _is_newer(store):
        return Check("queue", "ok", "not compared: the tables are newer than this program")
    with store.db.reading():
        [(rows,)] = store.db.run("doctor.size")
        if rows > MAX_COMPARED_ROWS and not deep:
            return Check(
                "queue",
                "ok",
                f"not compared with {rows:,} rows of datastatus: run `odf doctor --deep`",
            )
        wrong = []
        queued = [jobid for (jobid,) in store.db.run("fill.queued", jobid=None)]
        for (jobid,) in store.db.run("doctor.jobs"):
            plan = store.read_plan(jobid)
            if plan.flaw or jobid in queued:
                continue
            counts = {code: chunks for code, chunks, _ in judge_chunks(store, plan)}
            [(pending,)] = store.db.run("why.claimable", jobid=jobid)
            if not plan.today and pending != counts.get("", 0):
                wrong.append(f"{jobid!r} ({pending} instead of {counts.get('', 0)})")
    if wrong:
        return Check(
            "queue",
            "warn",
            f"the queue doesn't match datastatus: {', '.join(wrong)}",
            "odf init",
        )
    if queued:
        told = f"the queue is still being filled for {', '.join(map(repr, queued))}"
        return Check("queue", "ok", f"{told}: idle workers and `odf recover` do it")
    return Check("queue", "ok", "the queue matches datastatus")


def _leases(store: Store) -> Check:
    from ..store.overview import running

    now = store.now()
    late = [
        row for row in running(store) if row["lease_end"] and row["lease_end"].timestamp() < now
    ]
    details, actions = [], []
    if late:
        first = f"{late[0]['jobid']} {late[0]['dataid']} of {late[0]['owner']}"
        details.append(f"{count_of(len(late), 'claim')} expired: {first}")
        actions.append("odf recover")
    if far := _ahead(store, now):
        about, action = far[0]
        details.append(f"{len(far)} far in the future, because of a wrong clock: {about}")
        actions.append(action)
    if details:
        return Check("leases", "warn", "; ".join(details), "; ".join(actions))
    return Check("leases", "ok", "no claim has expired, and none ends far in the future")


def _ahead(store: Store, now: float) -> list[tuple[str, str]]:
    """The leases and retries that no clock will reach soon, in words, and what ends each."""
    moments = {
        name: to_table(store, datetime.fromtimestamp(now + seconds).astimezone())
        for name, seconds in (("soon", CLOCK_DRIFT_SECONDS), ("far", LONGEST_LEASE_SECONDS))
    }
    found = []
    for kind, jobid, dataid, generation, owner, due, seconds in store.db.run(
        "doctor.ahead", **moments
    ):
        until = from_table(store, due)
        if until is None or (seconds and until.timestamp() <= now + seconds):
            continue
        if kind == "retry":
            about = f"{jobid} {dataid} is retried at {shown(until)}"
            action = f"odf resubmit {typed(jobid, dataid)}"
        elif kind == "lease":
            about = f"{jobid} {dataid} of {owner} until {shown(until)}"
            action = f"odf end {typed(jobid, dataid)} RESUBMIT --generation {generation}"
            action += "  # if its program is gone"
        else:
            about = f"worker {owner} of {jobid} until {shown(until)}"
            action = f"odf dml \"delete from worker where owner = '{owner}'\"  # if it is gone"
        found.append((about, action))
    return found


def _jobs(store: Store) -> Check:
    from ..store.registry import circle_of_jobs

    links = store.db.run("moves.edges")
    if circle := circle_of_jobs(links):
        detail = f"these wait for each other and never run: {printable(circle)}"
        return Check("jobs", "warn", detail, "odf job list")
    jobs = len({jobid for jobid, _, _ in links})
    return Check("jobs", "ok", f"{count_of(jobs, 'job')}, and none waits for its own output")


def _domains(store: Store) -> Check:
    from ..store.catalog import read_catalog

    lines = read_catalog(store).merge_lines()
    return Check("domains", "warn" if lines else "ok", " ".join(lines))


def _packs(store: Store) -> Check:
    counts = store.db.run("doctor.packs")
    if not counts:
        return Check("packs", "ok", "no chunk is packed")
    named = ", ".join(f"{count} of {printable(datasetid)}" for datasetid, count in counts)
    chunks = sum(count for _, count in counts)
    detail = f"{count_of(chunks, 'chunk')} in packs, which the next version can't read: {named}"
    actions = (f"odf compact {typed(datasetid)} --unpack" for datasetid, _ in counts)
    return Check("packs", "warn", detail, "; ".join(actions))


def _passwords(store: Store, environ: Mapping[str, str]) -> Check:
    from ..config.credentials import decrypt, find_passkey, for_dataset, is_weak

    values = store.db.run("credentials.values")
    if not values:
        return Check("passwords", "ok", "no dataset has one")
    key = find_passkey(environ)
    if key is None:
        detail = f"{count_of(len(values), 'dataset')} with a password, but no passkey is set"
        return Check("passwords", "fail", detail, "Set PASSKEY or PASSKEY_FILE")
    bad = []
    for datasetid, value in values:
        try:
            decrypt(value, key, purpose=for_dataset(datasetid or ""))
        except CredentialError:
            bad.append(repr(datasetid))
    if bad:
        return Check(
            "passwords",
            "fail",
            f"the passkey can't decrypt: {', '.join(bad)}",
            "odf encrypt --dataset ID",
        )
    weak = sum(is_weak(value) for _, value in values)
    if weak:
        detail = f"the passkey decrypts all {len(values)}; {weak} are in an older, weaker form"
        return Check("passwords", "warn", detail, "odf rotate")
    return Check("passwords", "ok", f"the passkey decrypts all {len(values)}")
