"""The store on SQLite: one writer at a time, so a claim is a few plain statements."""

import os
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..config.settings import make_folder, private_folder
from ..errors import DataflowError, LostRace, NoDatabase
from ..model import FAILED, RESUBMIT, Claim, Fact, Failure, Plan, effect, execution_of, natural_key
from ..util.system import try_lock
from .database import Database, no_tables
from .store import ClaimRequest, InputChanges, OutputCounts, Store

BUSY_TIMEOUT_SECONDS = 60.0
"""Seconds to wait for another writer's turn to end."""

SESSION = "pragma synchronous = full; pragma cache_size = -8192"
"""Every commit is on disk; and 8 MiB of pages are kept: a claim reads some in many places."""

BUSY_TIMEOUT = f"pragma busy_timeout = {BUSY_TIMEOUT_SECONDS * 1000:.0f}"

TURN_POLL_SECONDS = 0.002
"""Seconds after which a waiting writer checks again whether it is its turn."""

QUEUE_CHECK_SECONDS = 0.01
"""Seconds for which a writer may begin again without checking whether others wait."""

FREED_BYTES = 4 << 20
"""Size of the block that is freed once so that the C library keeps the memory of statements."""

TURN_SECONDS = 0.1
"""Seconds after which a writer with more to do lets others have their turn."""


class SqliteDatabase(Database):
    """A SQLite file, with every commit on disk before it counts."""

    dialect = "sqlite"
    failures = (sqlite3.Error,)

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._folder = os.path.dirname(os.path.abspath(path))
        self.where = f"SQLite file {path}"

    def connect(self, *, create: bool = False) -> sqlite3.Connection:
        connection = getattr(self._mine, "connection", None)
        if connection is not None:
            return connection
        if not create and not os.path.exists(self.path):
            raise NoDatabase(f"There is no database at {self.path}. Run `odf init` to create it.")
        try:
            if create:
                self._make_file()
            # Transactions are begun here, as writers (`begin immediate`): one that begins by
            # reading is refused when it wants to write after another one did, and no timeout helps.
            # The finalizer that closes the connection may run in another thread.
            connection = sqlite3.connect(
                self.path,
                timeout=BUSY_TIMEOUT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            connection.executescript(SESSION)
            # SQLite makes a table of 88 kB in memory for a trigger's SELECT, and frees it. glibc
            # gives the top of its heap back to the system from 128 kB on, so that each such table
            # faults its pages in again: a third of a claim's time. Freeing one large block raises
            # that limit to twice its size: mallopt(3), "dynamic mmap threshold".
            bytes(FREED_BYTES)
        except (sqlite3.Error, OSError) as error:
            cure = _cure(str(error)) or "For details, run `odf doctor`."
            raise NoDatabase(f"Cannot open {self.where}: {error}. {cure}") from None
        connection.create_function("naturalkey", 1, natural_key, deterministic=True)
        connection.create_function("now", 0, _now)  # as people know it from H2 and PostgreSQL
        connection.create_function("claim_effect", 4, effect, deterministic=True)
        if not self._unchecked:
            try:
                self._check(connection.execute(self.statement("claims.versions")).fetchall())
            except BaseException as error:
                connection.close()
                if isinstance(error, sqlite3.Error):
                    raise self.explained(error) from error
                raise
        self.keep(connection)
        self._mine.file = self._file()
        self._met = True
        return connection

    def is_replaced(self) -> bool:
        is_open = getattr(self._mine, "connection", None) is not None
        return is_open and self._mine.file != self._file()

    def _file(self) -> tuple[int, int] | None:
        """Which file has the name now."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _make_file(self) -> None:
        path = os.path.abspath(self.path)
        make_folder(os.path.dirname(path))
        if private_folder(path) and not os.path.exists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def execute(self, text: str, params: dict[str, Any] | None) -> tuple[list[tuple], Any]:
        try:
            cursor = self.connect().execute(text, params or {})
            rows = cursor.fetchall()
        except sqlite3.Error as error:
            raise self.explained(error) from error
        return rows, cursor

    def stream(self, name: str, /, **params: Any) -> Generator[tuple]:
        try:
            yield from self.connect().execute(self.statement(name), params)
        except sqlite3.Error as error:
            raise self.explained(error) from error

    def explained(self, error: sqlite3.Error) -> DataflowError:
        text = str(error)
        if text.startswith("no such table"):
            return NoDatabase(no_tables(self.where))
        if "locked" in text:
            return DataflowError(
                f"{self.where} was locked by another writer for {BUSY_TIMEOUT_SECONDS:.0f} s. "
                "End that program and try again."
            )
        return DataflowError(f"{self.where}: {text.rstrip('.')}. {_cure(text)}".rstrip())

    @contextmanager
    def transaction(self, *, who: str = "", why: str = "", act: str = "") -> Iterator[None]:
        connection = self.connect()
        self._begin(connection)
        try:
            signed = bool(who or why or act)
            if signed:
                self.sign(who=who, why=why, act=act)
            yield
            # SQLite has no variables of a session, so the signature is a row of the database. It is
            # cleared before the commit, or the next writer's changes would be signed with it.
            if signed:
                self.run("context.clear")
            self.execute("commit", None)
        except BaseException:
            if connection.in_transaction:
                connection.rollback()
            raise

    def sign(self, *, who: str, why: str, act: str) -> None:
        execution = execution_of(who, act) or None
        self.run("context.sign", act=act, who=who or None, why=why or None, execution=execution)

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Wait for this writer's turn, at most `BUSY_TIMEOUT_SECONDS`.

        SQLite doesn't order its writers: one that begins again at once can overtake waiting writers
        for seconds. So the next writer holds a lock of the folder, and a writer that begins again
        at once takes that lock every `QUEUE_CHECK_SECONDS` seconds.
        """
        now = time.monotonic()
        deadline = now + BUSY_TIMEOUT_SECONDS
        connection.execute("pragma busy_timeout = 0")
        try:
            if now < getattr(self._mine, "asks_at", 0.0) and self._has_begun(connection):
                return
            with self._next(deadline):
                while not self._has_begun(connection, time.monotonic() > deadline):
                    time.sleep(TURN_POLL_SECONDS / 10)
            self._mine.asks_at = time.monotonic() + QUEUE_CHECK_SECONDS
        finally:
            connection.execute(BUSY_TIMEOUT)

    def _has_begun(self, connection: sqlite3.Connection, is_last: bool = False) -> bool:
        """Begin to write, unless another writer is at work."""
        try:
            connection.execute("begin immediate")
        except sqlite3.Error as error:
            if is_last or "locked" not in str(error):
                raise self.explained(error) from error
            return False
        return True

    @contextmanager
    def _next(self, deadline: float) -> Iterator[None]:
        """Be the next writer; if the folder can't be locked, in no order."""
        try:
            handle = os.open(self._folder, os.O_RDONLY)
        except OSError:
            yield
            return
        try:
            while not try_lock(handle) and time.monotonic() < deadline:
                time.sleep(TURN_POLL_SECONDS)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def reading(self) -> Iterator[None]:
        connection = self.connect()
        # SQLite has no transaction that is read-only; this refuses writes of the connection.
        self.execute("pragma query_only = on", None)
        try:
            self.execute("begin", None)
            yield
        finally:
            if connection.in_transaction:
                connection.rollback()
            self.execute("pragma query_only = off", None)

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        connection = self.connect(create=True)
        # With a write-ahead log readers don't wait for the writer. The mode stays with the file,
        # and can't be changed within a transaction.
        self.execute("pragma journal_mode = wal", None)
        self.execute("begin immediate", None)
        try:
            yield
            self.execute("commit", None)
        except BaseException:
            if connection.in_transaction:
                connection.rollback()
            raise

    def script(self, text: str) -> None:
        # Not by `executescript`, which commits the transaction that is open.
        for statement in statements(text):
            self.execute(statement, None)

    def frame(self) -> tuple[str, str, str]:
        begin = "pragma journal_mode = wal;\nbegin immediate;"
        return begin, "commit;", f"sqlite3 -bail {self.path} < FILE"

    def tables(self) -> set[str]:
        if not os.path.exists(self.path):
            return set()
        return {name for (name,) in self.run("upgrade.tables")}


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one; a trigger is one, whatever it has inside."""
    lines: list[str] = []
    for line in script.splitlines():
        lines.append(line)
        if line.endswith(";") and sqlite3.complete_statement("\n".join(lines)):
            yield "\n".join(lines)
            lines = []


def _cure(trouble: str) -> str:
    if "full" in trouble:
        return "Make room on the disk, then run the command again."
    if "malformed" in trouble or "not a database" in trouble:
        return "Restore the file from a backup, or move it away and run `odf init`."
    if "readonly" in trouble:
        return "Make the file and its folder writable, then run the command again."
    return ""


class SqliteStore(Store):
    """The tables on SQLite."""

    db: SqliteDatabase

    def _take(self, request: ClaimRequest, skip: int) -> list[Claim]:
        # Nothing to skip: a transaction here is the only writer.
        jobid, only = request.jobid, request.only
        db = self.db
        with db.transaction(who=request.owner, act="claim"):
            # Not the plan of a second ago: here, as the only writer, the current one costs nothing.
            plan = self.read_plan(jobid)
            if only is not None:
                db.run("claims.judge", jobid=jobid, dataid=only)
            db.change("claims.sort_pending", jobid=jobid)
            [(free, lease, time_limit)] = db.run(
                "claims.dial",
                jobid=jobid,
                k=request.k,
                lease=request.lease,
                version=self.version,
            )
            until = time.monotonic() + TURN_SECONDS
            claims: list[Claim] = []
            while picked := db.run("claims.pick", jobid=jobid, only=only, free=free):
                claims = [
                    claim
                    for (dataid,) in picked
                    if (claim := self._open(plan, dataid, request, lease, time_limit))
                ]
                # What was pending before its job changed may not be any more, and is gone now.
                if claims or time.monotonic() > until:
                    break
        return claims

    def _open(
        self,
        plan: Plan,
        dataid: str,
        request: ClaimRequest,
        lease: float,
        time_limit: int | None,
    ) -> Claim | None:
        """Claim one chunk that is pending, unless it is so by mistake."""
        db, jobid = self.db, plan.jobid
        [(generation,)] = db.run("claims.next_generation")
        opened = db.run(
            "claims.open",
            jobid=jobid,
            dataid=dataid,
            generation=generation,
            owner=request.owner,
            runid=request.runid,
            lease=lease,
        )
        if not opened:
            return None
        for name, datasets in (("claims.hold", plan.reads), ("claims.lock", plan.outputs)):
            for datasetid in datasets:
                if not db.change(
                    name, datasetid=datasetid, jobid=jobid, dataid=dataid, generation=generation
                ):
                    # Rolls back the whole transaction: no chunk is ever claimed in part.
                    raise LostRace(f"{datasetid}/{dataid} changed under a claim of {jobid}.")
        return Claim(jobid, dataid, generation, request.owner, opened[0][0], lease, time_limit)

    def _fill(self, jobid: str, most: int) -> int:
        looked, until = 0, time.monotonic() + TURN_SECONDS
        with self.db.transaction():
            while found := self.db.run("fill.place", jobid=jobid):
                looked += self._fill_part(jobid, most, *found[0])
                if time.monotonic() > until:
                    break
            if looked:
                self.db.change("claims.sort_pending", jobid=jobid)
        return looked

    def _fill_part(
        self,
        jobid: str,
        most: int,
        datasetid: str,
        producer: str,
        after: str,
        source: str | None,
        output: str | None,
    ) -> int:
        """Judge some of the chunks that a job may know: how many rows were looked at, or 1."""
        db = self.db
        if not datasetid:
            name, following = "waiting", source or output
        elif source:
            name, following = "inputs", None
        else:
            name, following = "outputs", output
        place = {"datasetid": datasetid, "producer": producer, "after": after}
        rows = db.run(f"fill.{name}", jobid=jobid, most=most, **place)
        for _, dataid, to_judge in rows:
            if to_judge:
                db.run("claims.judge", jobid=jobid, dataid=dataid)
        if len(rows) == most:
            place |= {"producer": rows[-1][0], "after": rows[-1][1]}
            db.change("fill.move", jobid=jobid, **place)
        elif following:
            db.change("fill.move", jobid=jobid, datasetid=following, producer="", after="")
        else:
            db.change("fill.end", jobid=jobid)
        return len(rows) or 1

    def give_way(self, done: int) -> None:
        """Does nothing: waiting writers take turns anyway."""

    def _finish(
        self, claims: Sequence[Claim], facts: Sequence[Fact], *, accept: bool, why: str
    ) -> tuple[OutputCounts, InputChanges]:
        db = self.db
        first = claims[0]
        facts_of = {(fact.datasetid, fact.dataid): fact for fact in facts}
        settled: OutputCounts = {}
        changed: InputChanges = {}
        with db.transaction(who=first.owner, why=why, act="finish"):
            for claim in claims:
                mine = {
                    "jobid": claim.jobid,
                    "dataid": claim.dataid,
                    "generation": claim.generation,
                }
                chunk = {"jobid": claim.jobid, "dataid": claim.dataid}
                if rows := () if accept else db.run("claims.changed", **chunk):
                    changed[claim.dataid] = [f"{datasetid!r} {how}" for datasetid, how in rows]
                    continue
                # The fence: a claim of another generation or owner settles nothing. It comes before
                # anything else of this chunk is written.
                if not db.change("claims.close", owner=claim.owner, **mine):
                    continue
                # Read before the inputs are released, which deletes those rows.
                consumed = db.run("claims.consumed", **chunk)[0][0]
                db.change("claims.release_inputs", **chunk)
                outputs = db.run("claims.ready", **mine)
                for (datasetid,) in outputs:
                    fact = facts_of.get((datasetid, claim.dataid)) or Fact(datasetid, claim.dataid)
                    db.change(
                        "claims.note",
                        jobid=claim.jobid,
                        generation=claim.generation,
                        inputs=consumed,
                        **fact._asdict(),
                    )
                if outputs:
                    settled[claim.dataid] = len(outputs)
        return settled, changed

    def _fail(
        self, claim: Claim, why: str, may_retry: bool, at_once: bool = False
    ) -> list[Failure]:
        db = self.db
        mine = {"jobid": claim.jobid, "dataid": claim.dataid, "generation": claim.generation}
        with db.transaction(who=claim.owner, why=why, act="finish"):
            granted = {"may_retry": may_retry, "at_once": at_once}
            verdict = db.run("claims.verdict", owner=claim.owner, **granted, **mine)
            if not verdict:
                return []
            [(again, delay)] = verdict
            status = RESUBMIT if again and not delay else FAILED
            if again:
                db.change("claims.retry", delay=delay, **mine)
            else:
                db.change("claims.close", owner=claim.owner, **mine)
            if not self.settle_outputs(claim, status):
                return []
        return [Failure(status, float(delay) if again else None)]

    def _beat(self, claims: Sequence[Claim]) -> set[str]:
        with self.db.transaction():
            return {
                claim.dataid
                for claim in claims
                if self.db.change(
                    "claims.heartbeat",
                    jobid=claim.jobid,
                    dataid=claim.dataid,
                    owner=claim.owner,
                    generation=claim.generation,
                    lease=claim.lease,
                )
            }


def _now() -> str:
    """The time as our tables have it, in UTC."""
    from datetime import UTC, datetime

    return datetime.now(UTC).replace(tzinfo=None).isoformat(" ", "milliseconds")
