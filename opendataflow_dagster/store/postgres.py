"""The store on PostgreSQL: a claim is one statement, and no claimer waits for another."""

import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from ..config.settings import check_postgres_url, redact
from ..errors import NoDatabase
from ..model import Claim, Fact, Failure, execution_of, natural_key
from ..util.text import first_line
from .database import SQL_FOLDER, Database, created_names, no_tables
from .store import ClaimRequest, InputChanges, OutputCounts, Store

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")

_OBJECT = re.compile(
    r"--[^\n]*|nextval\('(?P<sequence>\w+)'\)|'(?:[^']|'')*'|(?P<schema>current_schema\(\))"
    r"|(?P<lead>\b(?:from|join|into|update|using|table|vacuum \([^)]*\))\s+)"
    r"(?P<table>\w+)\b(?![.(])"
    r"|(?<![\w.])(?P<function>\w+)(?=\()",
    re.IGNORECASE,
)
"""Where a statement may name something of our schema: not in comments and literals."""

SESSION = """
select set_config('enable_seqscan', 'off', false), set_config('enable_sort', 'off', false),
       set_config('jit', 'off', false), set_config('plan_cache_mode', 'force_generic_plan', false)
where pg_backend_pid() = {pid};
"""
"""Our statements go by index: a plan that was made for small tables must not scan large ones.

Only a session of our own gets these settings. A pooler lends a session to one client after another,
and tells each client a process id that isn't the session's, because cancel requests go by it.
"""

SEARCH_PATH = "select set_config('search_path', quote_ident({schema}) || ', pg_temp', true)"

CREATE_SCHEMA = """\
do $odf$ begin
    if not exists (select from pg_namespace where nspname = {name}) then
        create schema {schema};
    end if;
end $odf$;
set local search_path = {schema}, pg_temp;"""
"""`if not exists` would need the right to create schemas, also for one that is there."""

READING = """
set transaction isolation level repeatable read, read only;
set local enable_seqscan = on; set local enable_sort = on; set local plan_cache_mode = auto
"""
"""Looking at everything is another matter: there the planner knows better."""

UPGRADING = "set local lock_timeout = '300ms'; set local enable_seqscan = on"
"""A session that waits for a table lock makes all later sessions wait behind it."""

DEFAULTS = {
    "application_name": "odf",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""Unless the url says otherwise. A network that is silently dead is noticed in a minute."""

ROLES = os.path.join(SQL_FOLDER, "postgres", "roles.sql")

_DENIED = re.compile(r"permission denied for (?P<kind>\w+) (?P<name>\w+)$")

_FULL = re.compile(
    r"too many clients|too many connections|connection slots are reserved"
    r"|no more connections allowed"
)
"""The errors of servers and poolers without a free connection; libpq doesn't give their code."""

FETCHED_ROWS = 5000
"""Rows that a listing of any length fetches at once."""

TIDY_AFTER_CLAIMS = 10_000
"""Claims of this process after which it clears away the rows that they left dead in the queue."""


class PostgresDatabase(Database):
    """A schema of a PostgreSQL database."""

    dialect = "postgres"
    failures = (psycopg.Error,)

    def __init__(
        self, url: str, schema: str, *, user: str | None = None, password: str | None = None
    ) -> None:
        check_postgres_url(url)
        super().__init__()
        self.url, self.schema = url, schema
        self.where = f"schema {schema!r} of {redact(url)}"
        self._given = {"password": password} if password is not None else {}
        self._user = {"user": user} if user is not None else {}

    def connect(self) -> psycopg.Connection:
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._open()
            self.keep(connection)
            self._met = True
        return connection

    def listen(self) -> psycopg.Connection | None:
        """Open a connection that is notified of claimable chunks; None behind a pooler.

        It is closed by who asked for it. While it is open, transactions that make chunks claimable
        send notices: see `send_notice` in sql/postgres/triggers.sql.
        """
        connection = self._open()
        try:
            if not self.pooled:
                for name in ("work.listen", "work.listening"):
                    connection.execute(_qualified(self.statement(name), self.schema))  # type: ignore[arg-type]
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    def _open(self) -> psycopg.Connection:
        """A new connection, whose session is ready for our statements."""
        given = DEFAULTS | self._given | conninfo_to_dict(self.url) | self._user
        try:
            # Each statement commits by itself, so that a claim is one round trip. Without
            # autocommit it would be three, and a worker that is idle would hold a transaction open.
            connection = psycopg.connect(**given, autocommit=True)  # type: ignore[arg-type]
            try:
                self._begin_session(connection)
            except BaseException:
                connection.close()
                raise
        except psycopg.Error as error:
            if _FULL.search(str(error)):
                raise NoDatabase(
                    f"No connection to {redact(self.url)} is free: {first_line(error)}. Start "
                    "fewer workers, or raise max_connections or the role's limit."
                ) from error
            raise NoDatabase(
                f"Cannot connect to {redact(self.url)}: {first_line(error)}. "
                "Check `url`, `user` and `encrypted`, and run `odf doctor`."
            ) from error
        return connection

    def _begin_session(self, connection: psycopg.Connection) -> None:
        """Set what our statements need, and look at the tables' version in the same round trip."""
        text = SESSION.format(pid=connection.info.backend_pid)
        if not self._unchecked:  # else there may be no tables
            text += _qualified(self.statement("claims.versions"), self.schema)
        try:
            cursor = connection.execute(text)  # type: ignore[arg-type]
        except psycopg.errors.UndefinedTable:
            raise NoDatabase(no_tables(self.where)) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise self._not_granted(error, text, connection) from None
        self.pooled = cursor.rowcount == 0
        if self.pooled:  # what is prepared stays with a session that is another client's next
            connection.prepare_threshold = None
        if cursor.nextset():
            self._check(cursor.fetchall())

    def execute(self, text: str, params: dict[str, Any] | None) -> tuple[list[tuple], Any]:
        # The names are qualified, because a session behind a pooler has no search_path of ours.
        schema = self.schema if params is None else self.schema.replace("%", "%%")
        connection = self.connect()
        with self._explained(text, connection):
            cursor = connection.execute(_qualified(text, schema), params)  # type: ignore[arg-type]
            rows = cursor.fetchall() if cursor.pgresult and cursor.pgresult.nfields else []
        return rows, cursor

    def stream(self, name: str, /, **params: Any) -> Generator[tuple]:
        text, connection = self.statement(name), self.connect()
        # A cursor of the server: the usual one would fetch all rows into memory before the first.
        with connection.cursor("odf_listing") as cursor, self._explained(text, connection):
            cursor.itersize = FETCHED_ROWS
            cursor.execute(_qualified(text, self.schema.replace("%", "%%")), params)  # type: ignore[arg-type]
            yield from cursor

    @contextmanager
    def _explained(self, text: str, connection: psycopg.Connection) -> Iterator[None]:
        """Say in a line what is missing where tables or rights are."""
        try:
            yield
        except psycopg.errors.UndefinedTable as error:
            raise NoDatabase(no_tables(self.where)) from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise self._not_granted(error, text, connection) from error

    def _not_granted(
        self, error: Exception, text: str, connection: psycopg.Connection
    ) -> NoDatabase:
        """What says which GRANT a statement needs, by what it does with the object of the error."""
        line = first_line(error)
        denied = _DENIED.search(line)
        if denied is None:
            advice = "Let their owner "
        else:
            kind, name = denied["kind"], denied["name"]
            place, user = f"{_quoted(self.schema)}.{name}", _quoted(connection.info.user)
            grant = {
                "schema": f"usage on schema {_quoted(name)}",
                "function": f"execute on function {place}",
                "sequence": f"usage on sequence {place}",
            }.get(kind) or f"{', '.join(_rights(kind, name, text))} on {place}"
            advice = f"Let their owner run: grant {grant} to {user}; or "
        return NoDatabase(
            f"The tables in {self.where} can't be used: {line}. {advice}"
            f"run {ROLES} with psql, which grants all that workers and readers need."
        )

    def translate(self, text: str) -> str:
        return _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))

    def trouble(self, error: Exception) -> str:
        cause = error.__cause__ if isinstance(error, NoDatabase) else error
        if isinstance(cause, psycopg.Error):
            state = cause.sqlstate or ""
            # Serialization failure, deadlock, and our own `lost_race()`: the transaction did
            # nothing.
            if state in ("40001", "40P01", "ODF01"):
                return "race"
            # `lock_timeout` ran out: statements that claim and settle set it to 200 ms.
            if state == "55P03":
                return "locked"
            if state == "0A000" and "cached plan" in str(cause):
                return "gone"  # an upgrade gave a table another column: a new session plans anew
            connection = getattr(self._mine, "connection", None)
            if state[:3] == "57P" or state[:2] == "08" or connection is None or connection.closed:
                return "gone"
        return super().trouble(error)

    def is_full(self, error: Exception) -> bool:
        return isinstance(error, NoDatabase) and bool(_FULL.search(str(error.__cause__)))

    @contextmanager
    def _begun(self) -> Iterator[None]:
        try:
            with self.connect().transaction():
                yield
        except psycopg.errors.ProtocolViolation as error:
            if "statement pooling" not in str(error):
                raise
            raise NoDatabase(
                f"The pooler in front of {self.where} refuses transactions: {first_line(error)}. "
                "Set pool_mode = transaction for it, and run `odf doctor`."
            ) from None

    @contextmanager
    def transaction(self, *, who: str = "", why: str = "", act: str = "") -> Iterator[None]:
        with self._begun():
            if who or why or act:
                self.sign(who=who, why=why, act=act)
            yield

    def sign(self, *, who: str, why: str, act: str) -> None:
        execution = execution_of(who, act)
        self.run("context.sign", who=who, why=why, act=act, execution=execution)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._begun():
            self.script(READING)
            yield

    def one(self, text: str) -> tuple[list[tuple], Any]:
        connection = self.connect()
        # A pipeline takes one statement at a time: no "; commit; delete from …" gets out of a
        # transaction.
        with connection.pipeline():
            connection.execute(sql.SQL(SEARCH_PATH).format(schema=self.schema), prepare=False)
            cursor = connection.execute(text, prepare=False)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else [], cursor

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        with self._begun():
            self.script(self.statement("upgrade.turn"))
            self.script(self._create_schema())
            self.script(UPGRADING)
            yield

    def _create_schema(self) -> str:
        return CREATE_SCHEMA.format(schema=_quoted(self.schema), name=_literal(self.schema))

    def script(self, text: str) -> None:
        try:
            self.connect().execute(text)  # type: ignore[arg-type]
        except psycopg.errors.InsufficientPrivilege as error:
            raise NoDatabase(
                f"Only the owner of the tables in {self.where} may change them: "
                f"{first_line(error)}. Run `odf init` as the owner, or let the owner run what "
                f"`odf init --plan` prints; {ROLES} makes a role for it."
            ) from error

    def frame(self) -> tuple[str, str, str]:
        begin = f"begin;\n{self.statement('upgrade.turn')};\n{self._create_schema()}"
        return begin, "commit;", "psql -v ON_ERROR_STOP=1 -f FILE"

    def tables(self) -> set[str]:
        return {name for (name,) in self.run("upgrade.tables", schema=self.schema)}

    def indexes(self) -> set[str]:
        return {name for (name,) in self.run("upgrade.indexes", schema=self.schema)}


class PostgresStore(Store):
    """The tables on PostgreSQL."""

    db: PostgresDatabase
    _untidy = 0

    def _take(self, request: ClaimRequest, skip: int) -> list[Claim]:
        jobid, only = request.jobid, request.only
        plan = self.plan(jobid)
        self._tidy()
        turns = plan.rivals or plan.limited or only is not None
        # A transaction only where a lock has to last for several statements: it costs two round
        # trips.
        with self.db.transaction() if turns else nullcontext():
            # Two jobs that write one dataset have a queue each, so that the rows of the queues
            # don't keep them apart: only these locks do. In order of names, against deadlocks.
            for datasetid in plan.rivals:
                self.db.run("claims.lock_output", datasetid=datasetid)
            if plan.limited:  # else two claimers would count the same claims, and both go ahead
                self.db.run("claims.lock_dial", jobid=jobid)
            # Today's chunk of a job that reads nothing else appears with the clock: no row changes
            # by which a trigger would have queued it.
            if only is not None:
                self.db.run("claims.judge", jobid=jobid, dataid=only)
            rows = self.db.run(
                "claims.claim",
                **request._asdict(),
                skip=skip,
                version=self.version,
                execution=execution_of(request.owner, "claim"),
            )
        self._untidy += len(rows)
        if len(rows) > 1:
            # `returning` has no order; chunks are worked on in that of the queue.
            rows.sort(key=lambda row: (row[5], natural_key(row[0]), row[0]))
        return [
            Claim(jobid, dataid, generation, request.owner, attempts, float(lease), time_limit)
            for dataid, generation, attempts, lease, time_limit, _ in rows
        ]

    def _fill(self, jobid: str, most: int) -> int:
        return self.db.run("fill.next", jobid=jobid, most=most)[0][0]

    def _tidy(self) -> None:
        """Vacuum the queue more often than autovacuum would: it comes once a minute at best."""
        if self._untidy >= TIDY_AFTER_CLAIMS:
            self._untidy = 0
            self.db.run("claims.tidy")

    def _finish(
        self, claims: Sequence[Claim], facts: Sequence[Fact], *, accept: bool, why: str
    ) -> tuple[OutputCounts, InputChanges]:
        # Optimistic: nearly always no input has changed, and then this is one round trip without
        # a lock on the inputs. Only if one may have, they are held while they are compared.
        try:
            return self._settle(claims, facts, why, compare="" if accept else "yes"), {}
        except psycopg.Error as error:
            if error.sqlstate != "ODF02":
                raise
        with self.db.transaction():
            dataids = [claim.dataid for claim in claims]
            self.db.run("claims.hold_inputs", jobid=claims[0].jobid, dataids=dataids)
            changed = self._changed_now(claims)
            same = [claim for claim in claims if claim.dataid not in changed]
            return self._settle(same, facts, why) if same else {}, changed

    def _settle(
        self, claims: Sequence[Claim], facts: Sequence[Fact], why: str, compare: str = ""
    ) -> OutputCounts:
        recorded = None
        if facts:
            import json

            recorded = json.dumps([fact._asdict() for fact in facts])
        rows = self.db.run(
            "claims.finish",
            jobid=claims[0].jobid,
            owner=claims[0].owner,
            execution=execution_of(claims[0].owner),
            facts=recorded,
            dataids=[claim.dataid for claim in claims],
            generations=[claim.generation for claim in claims],
            compare=compare,
            why=why,
        )
        return dict(rows)

    def _fail(
        self, claim: Claim, why: str, may_retry: bool, at_once: bool = False
    ) -> list[Failure]:
        rows = self.db.run(
            "claims.fail",
            jobid=claim.jobid,
            dataid=claim.dataid,
            generation=claim.generation,
            owner=claim.owner,
            execution=execution_of(claim.owner),
            why=why,
            may_retry=may_retry,
            at_once=at_once,
        )
        return [Failure(status, float(delay) if again else None) for status, again, delay in rows]

    def _beat(self, claims: Sequence[Claim]) -> set[str]:
        first = claims[0]
        rows = self.db.run(
            "claims.heartbeat",
            jobid=first.jobid,
            owner=first.owner,
            lease=first.lease,
            dataids=[claim.dataid for claim in claims],
            generations=[claim.generation for claim in claims],
        )
        return {dataid for (dataid,) in rows}


@lru_cache(maxsize=1024)
def _qualified(text: str, schema: str) -> str:
    """Return a statement with our schema before each of our names, independent of search_path."""
    ours = created_names("postgres")
    prefix = _quoted(schema) + "."

    def spelled(found: re.Match[str]) -> str:
        if found["schema"]:
            return _literal(schema)
        if found["sequence"]:
            return f"nextval({_literal(prefix + found['sequence'])})"
        name = found["table"] or found["function"]
        return f"{found['lead'] or ''}{prefix}{name}" if name in ours else found[0]

    return _OBJECT.sub(spelled, text)


def _rights(kind: str, name: str, text: str) -> list[str]:
    """What a statement does with a table or view; locking rows takes the right to update them."""
    verbs = {"insert": "insert into", "update": "update", "delete": "delete from"}
    rights = [
        right for right, verb in verbs.items() if re.search(rf"\b{verb} (\S+\.)?{name}\b", text)
    ]
    if kind == "table" and "update" not in rights and re.search(r"\b(for|do) update\b", text):
        rights.append("update")
    return ["select", *rights]


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
