"""One database seen through its named statements, and the version of its tables."""

import os
import re
import time
import weakref
from _thread import _local
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, Self, TypeVar

from ..errors import DataflowError, LostRace, NoDatabase, Refused
from ..model import DATASET_COLUMNS, DIALS

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = os.path.join(_HERE, "sql")
SQL_FOLDER = (
    _INSTALLED if os.path.isdir(_INSTALLED) else os.path.join(os.path.dirname(_HERE), "sql")
)


def schema_script(dialect: str) -> str:
    """The script that creates the tables of a dialect."""
    return read_sql(os.path.join(SQL_FOLDER, dialect, "schema.sql"))


def trigger_script(dialect: str) -> str:
    """The script that creates functions, views and triggers of a dialect."""
    return _with_lists(read_sql(os.path.join(SQL_FOLDER, dialect, "triggers.sql")))


@cache
def created_names(dialect: str) -> frozenset[str]:
    """The tables, sequences, views and functions that a dialect's scripts create."""
    created = (
        r"(?m)^create (?:or replace )?(?:table|sequence|view|function) (?:if not exists )?(\w+)"
    )
    return frozenset(re.findall(created, schema_script(dialect) + trigger_script(dialect)))


@cache
def migration_files(dialect: str) -> dict[int, str]:
    """The migrations of a dialect in order: the version of each, and its file."""
    files: dict[int, str] = {}
    for folder in ("shared", dialect):
        path = os.path.join(SQL_FOLDER, folder, "migrations")
        for name in os.listdir(path) if os.path.isdir(path) else ():
            if name.endswith(".sql"):
                files[int(name.partition("_")[0])] = os.path.join(path, name)
    return dict(sorted(files.items()))


def program_version(dialect: str) -> int:
    """The version of the tables that this program creates: that of its last migration."""
    return max(migration_files(dialect))


def named_statements(dialect: str, topic: str) -> dict[str, str]:
    """The named statements of a topic: the shared ones, overridden by the dialect's own."""
    found: dict[str, str] = {}
    for folder in ("shared", dialect):
        path = os.path.join(SQL_FOLDER, folder, topic + ".sql")
        if os.path.exists(path):
            found.update(_split_statements(_with_lists(read_sql(path))))
    return found


def read_sql(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


_LISTS = {"column of dataset": DATASET_COLUMNS, "dial": DIALS}
_EACH = re.compile(r"\{each (column of dataset|dial): ([^}]*)\}")


def _with_lists(text: str) -> str:
    """The text of an SQL file, with what it says of each column or dial written out for every one.

    `{each dial: cast(dial as text)}` is that expression of the first dial, a comma, the next one.
    """

    def written_out(found: re.Match[str]) -> str:
        variable = found[1].split()[0]
        return ", ".join(re.sub(rf"\b{variable}\b", name, found[2]) for name in _LISTS[found[1]])

    return _EACH.sub(written_out, text)


def _split_statements(text: str) -> dict[str, str]:
    """The statements of a file by name; one named `set_{dial}` stands for one per dial."""
    found = {}
    for piece in text.split("-- name: ")[1:]:
        name, _, body = piece.partition("\n")
        for dial in DIALS if "{dial}" in name else ("",):
            statement = body.replace("{dial}", dial).strip().rstrip(";")
            found[name.replace("{dial}", dial).strip()] = statement
    return found


# Which version the tables are of, and what a program of another version may do with them.


BASELINE_VERSION = 3
"""The last version that didn't number itself reliably: one migration brings all older ones here."""


class TooOld(Refused):
    """This program is too old to claim from these tables."""

    code = "TOO_OLD"


class Versions(NamedTuple):
    """The versions in `dataflow_meta`; version 0 means the original's tables, or none."""

    version: int = 0
    oldest_client: int = 0
    triggers: int = 0
    """The version of the program whose `odf init` ran last."""

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str]]) -> Self:
        """From rows of `dataflow_meta`; before version 4 there was only the row `schema`."""
        numbers = {name: int(value) for name, value in rows if value.isdigit()}
        stamped = numbers.get("schema", 0)
        return cls(numbers.get("version", stamped), numbers.get("oldest_client", 0), stamped)

    def unusable(self, program: int, where: str) -> NoDatabase | None:
        """Why a program can't use the tables at all: they lack what its statements name."""
        if self.version >= program:
            return None
        if not self.version:
            return NoDatabase(no_tables(where))
        return NoDatabase(
            f"The tables in {where} have version {self.version}, and this program needs "
            f"version {program}. Run `odf init`: it upgrades them and keeps every row."
        )

    def unclaimable(self, program: int, where: str) -> DataflowError | None:
        """Why a program can't take new claims; it may renew and settle those that it has."""
        if program < self.oldest_client:
            return TooOld(
                f"This program has version {program}, and the tables in {where} need at least "
                f"version {self.oldest_client}. Upgrade opendataflow-dagster on this host. "
                "Until then it settles what it has claimed, and claims nothing more."
            )
        if self.triggers != self.version:
            return NoDatabase(
                f"The tables in {where} have version {self.version}, but the `odf init` of "
                f"version {self.triggers} has rewritten their triggers since. Run "
                f"{self.repair(program)}."
            )
        return None

    def repair(self, program: int) -> str:
        """The `odf init` that restores the triggers of this version."""
        if program >= self.version:
            return "`odf init`"
        return f"`odf init` on a host whose program is of version {self.version} or newer"


def no_tables(where: str) -> str:
    return (
        f"The tables in {where} don't exist, or aren't upgraded yet. Run `odf init`: it "
        "creates or upgrades them, and keeps every row."
    )


BRIEF_WAIT_SECONDS = 5.0
"""Seconds for which an outage delays what another worker would settle anyway."""

T = TypeVar("T")

RECONNECT_SECONDS = 600.0
"""Seconds that a running job waits for its database to come back before it gives up."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""Seconds until a retry without a free connection: at first, and at most."""

STOP_CHECK_SECONDS = 0.2
"""Seconds within which a thread that waits for a connection notices a stop."""

MAX_RACES = 50
"""How often a transaction that lost a race is tried again before it is an error."""


class Database:
    """A connection per thread, statements by name, and the way through races and outages."""

    dialect = ""
    where = ""
    path = ""
    """The file that has the tables, if one does."""
    schema = ""
    """The schema that has the tables, where there are schemas."""
    patience = RECONNECT_SECONDS
    pooled = False
    """Whether a pooler is in between, as of the last connection: no session is ours alone."""
    failures: tuple[type[Exception], ...] = ()
    """What the driver raises, for code that runs a person's own SQL."""

    def __init__(self) -> None:
        # A connection for each thread: claims and leases of two workers must not share a
        # transaction.
        self._mine = _local()
        forked = weakref.WeakMethod(self._forked)
        # Such a hook can't be taken back. By the weak reference, it doesn't keep the database
        # alive.
        os.register_at_fork(after_in_child=lambda: (forked() or int)())
        self._topics: dict[str, dict[str, str]] = {}
        self._met = False
        self.say: Callable[[str], object] = _warn
        """Called when no connection is free, once per outage."""
        self.ending: Callable[[], object] = bool
        """Says what ends the work, if something does: then no connection is waited for."""
        self._say_at = 0.0
        self.versions: Versions | None = None
        """The tables' versions when a connection was opened or a claim was refused last."""

    def run(self, name: str, /, **params: Any) -> list[tuple]:
        """The rows of the statement `topic.name`."""
        return self.execute(self.statement(name), params)[0]

    def change(self, name: str, /, **params: Any) -> int:
        """How many rows the statement `topic.name` changed."""
        return self.execute(self.statement(name), params)[1].rowcount

    def records(self, name: str, /, **params: Any) -> list[dict[str, Any]]:
        """The rows of the statement `topic.name`, as dictionaries."""
        return self.query(self.statement(name), params)

    def stream(self, name: str, /, **params: Any) -> Generator[tuple]:
        """The rows of the statement `topic.name` one by one, however many, within `reading`."""
        raise NotImplementedError
        yield

    def query(self, text: str, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The rows of a statement given as text, as dictionaries."""
        rows, cursor = self.execute(text, params)
        columns = [column[0] for column in cursor.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def statement(self, name: str) -> str:
        topic, _, short = name.partition(".")
        if topic not in self._topics:
            found = named_statements(self.dialect, topic)
            self._topics[topic] = {
                short_name: self.translate(text) for short_name, text in found.items()
            }
        return self._topics[topic][short]

    def insist(
        self, work: Callable[[], T], *, races: int = MAX_RACES, wait: bool = True
    ) -> tuple[T, bool]:
        """Do `work` to its end, and say whether the connection was lost on the way.

        Races are repeated. A locked row (unless `wait` is off: then that's a race too), a lost
        connection, and a server without a free connection are waited for, up to `patience` seconds.
        A connection that never worked is an error at once.
        """
        lost, raced, deadline, pause = False, 0, 0.0, FIRST_PAUSE_SECONDS
        while True:
            try:
                return work(), lost
            except Exception as error:
                trouble = self.trouble(error)
                if trouble == "locked" and not wait:
                    trouble = "race"
                if trouble == "race" and raced < races:
                    raced += 1
                    # Longer each time: of many that met the same row, not all come back at once.
                    time.sleep(0.001 * raced)
                elif trouble == "gone" and self.is_full(error):
                    deadline = deadline or time.monotonic() + self.patience
                    if time.monotonic() > deadline or (self.ending() and not lost):
                        raise
                    self._await_room(error, pause)
                    pause = min(LONGEST_PAUSE_SECONDS, pause * 1.5)
                # Without `_met` the first connection failed: waiting mends no wrong address.
                elif trouble == "locked" or (trouble == "gone" and self._met):
                    if trouble == "gone":
                        self.drop()
                    deadline = deadline or time.monotonic() + self.patience
                    if time.monotonic() > deadline:
                        raise
                    lost = lost or trouble == "gone"
                    time.sleep(0.2 if trouble == "gone" else 0.01)
                elif trouble == "race":
                    raise LostRace(
                        f"A transaction lost {races} races in a row. Try again; if that fails, "
                        "`odf doctor` shows who holds locks."
                    ) from error
                else:
                    raise

    def fetch(self, name: str, /, **params: Any) -> list[tuple]:
        """The rows of a query, as `run` returns them, through whatever `insist` waits for."""
        return self.insist(lambda: self.run(name, **params))[0]

    def fetch_records(self, name: str, /, **params: Any) -> list[dict[str, Any]]:
        """The same as dicts."""
        return self.insist(lambda: self.records(name, **params))[0]

    def _await_room(self, error: Exception, seconds: float) -> None:
        """Wait for a free connection, and report the wait once."""
        now = time.monotonic()
        until = now + seconds
        if now >= self._say_at:
            self._say_at = now + self.patience
            self.say(f"{error} Waiting for one, {self.patience:g} s at most")
        while (left := until - time.monotonic()) > 0 and not self.ending():
            time.sleep(min(left, STOP_CHECK_SECONDS))

    @contextmanager
    def transaction(self, *, who: str = "", why: str = "", act: str = "") -> Iterator[None]:
        """One transaction; history is signed with `who` and `why`.

        Without `act` the triggers treat its changes as a person's: they void claims and locks.
        """
        raise NotImplementedError
        yield

    def sign(self, *, who: str, why: str, act: str) -> None:
        """Tell the triggers who writes in the rest of the transaction, and why."""
        raise NotImplementedError

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One transaction that sees one state of the tables, and can't write."""
        raise NotImplementedError
        yield

    def one(self, text: str) -> tuple[list[tuple], Any]:
        """The rows and the cursor of a person's own statement: one, without parameters."""
        return self.execute(text, None)

    def execute(self, text: str, params: dict[str, Any] | None) -> tuple[list[tuple], Any]:
        """The rows of one statement, and its cursor."""
        raise NotImplementedError

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """One transaction that may create and change tables; of two, one waits for the other."""
        raise NotImplementedError
        yield

    def script(self, text: str) -> None:
        """Run the statements of a script, in the transaction that is open."""
        raise NotImplementedError

    def frame(self) -> tuple[str, str, str]:
        """What opens and ends `upgrading` in a printed script, and a command that runs it."""
        raise NotImplementedError

    def tables(self) -> set[str]:
        """The names of the tables that are there, ours and others."""
        raise NotImplementedError

    def indexes(self) -> set[str]:
        """The names of the indexes that are there, where making one again would lock its table."""
        return set()

    def translate(self, text: str) -> str:
        """A statement in the driver's own parameter style."""
        return text

    def trouble(self, error: Exception) -> str:
        """`race`, `locked`, `gone`, or nothing if a retry wouldn't help."""
        return "race" if isinstance(error, LostRace) else ""

    def is_full(self, error: Exception) -> bool:
        """Whether others use all connections of the server."""
        return False

    def connect(self) -> Any:
        """This thread's connection, opened on first use."""
        raise NotImplementedError

    def is_replaced(self) -> bool:
        """Whether this thread's connection leads to a file that isn't there any more."""
        return False

    def listen(self) -> Any:
        """Open a connection that is notified of claimable chunks; None if that isn't supported."""
        return None

    def read_versions(self) -> Versions:
        """What the tables say about their version now."""
        self.versions = Versions.of(self.run("claims.versions"))
        return self.versions

    @contextmanager
    def of_any_version(self) -> Iterator[None]:
        """Let this thread connect to tables of any version: to look at them, or to upgrade."""
        before, self._mine.unchecked = self._unchecked, True
        try:
            yield
        finally:
            self._mine.unchecked = before

    @property
    def _unchecked(self) -> bool:
        return getattr(self._mine, "unchecked", False)

    def _check(self, rows: list[tuple]) -> None:
        """Refuse tables that are older than this program, as a connection is opened."""
        self.versions = Versions.of(rows)
        error = self.versions.unusable(program_version(self.dialect), self.where)
        if error and not self._unchecked:
            raise error

    def keep(self, connection: Any) -> None:
        """Make this the thread's connection, and close it when the thread ends."""
        self._mine.connection, self._mine.lifetime = connection, _Lifetime()
        # Held by the finalizer too: a driver warns of connections that are deleted while open.
        closing = weakref.finalize(self._mine.lifetime, _close, connection, os.getpid())
        closing.atexit = False  # then daemon threads may still use theirs

    def drop(self) -> None:
        """Forget this thread's connection."""
        connection = getattr(self._mine, "connection", None)
        self._mine.connection = self._mine.lifetime = None
        if connection is not None:
            with suppress(Exception):  # a broken one may fail to close: it's gone either way
                connection.close()

    close = drop

    def _forked(self) -> None:
        """Leave the connections to the parent process: closing one here would end it there."""
        _INHERITED.append(self._mine)
        self._mine = _local()


def _warn(line: str) -> None:
    import logging  # imported late: a cron line rarely needs it

    logging.getLogger(__package__).warning(line)


class _Lifetime:
    """Lives in the variables of one thread, and ends with them."""


def _close(connection: Any, opened_by: int) -> None:
    if os.getpid() != opened_by:  # a fork: of the parent's threads only one lives on in the child
        _INHERITED.append(connection)
        return
    with suppress(Exception):
        connection.close()


# Never emptied: a connection that nothing refers to is closed, and the parent uses the same socket.
_INHERITED: list[Any] = []


def briefly(db: Database, work: Callable[[], T]) -> T:
    """Do `work` on a new connection if necessary, and wait at most `BRIEF_WAIT_SECONDS` for it."""
    deadline = time.monotonic() + BRIEF_WAIT_SECONDS
    while True:
        try:
            return work()
        except Exception as error:
            trouble = db.trouble(error)
            if trouble == "gone":
                db.drop()
            if not trouble or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
