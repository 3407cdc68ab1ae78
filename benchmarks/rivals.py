"""Who claims and finishes chunks on PostgreSQL: we, a bare loop (the limit), other job queues.

Each is loaded in bulk by the parent process (`load`) and driven by a client (`Contender`). Each has
its tables in its own schema, vacuumed and analyzed after loading.
"""

import asyncio
import time
import uuid
from datetime import timedelta
from typing import Any

import psycopg
from measure import Contender
from product import Fact, new_owner, open_store


def connect(url: str, schema: str) -> psycopg.Connection:
    """Return a plain connection whose statements are their own transactions."""
    return psycopg.connect(url, autocommit=True, options=f"-c search_path={schema}")


class Ours(Contender):
    """A job with one input and one output: triggers, history and facts as in production."""

    title = "opendataflow"

    @staticmethod
    def load(url: str, chunks: int, done: int) -> None:
        """The input of every chunk is READY, and the output of the first `done`."""
        store = open_store(url)
        store.init()
        with connect(url, "dataflow") as connection:
            # In this order: tables emptied first aren't judged, and those filled last are judged
            # once.
            connection.execute("truncate datastatus, dataevent, chunkfact, claim, pending")
            connection.execute("delete from job")
            loaded = ("bench_in", "loader", chunks), ("bench_out", "bench", done)
            for datasetid, jobid, ready in loaded:
                connection.execute(
                    "insert into datastatus "
                    "(datasetid, jobid, dataid, locktype, status, modified, generation) "
                    "select %s, %s, n::text, 'OUT', 'READY', now(), nextval('generation') "
                    "from generate_series(1, %s::int) as n",
                    [datasetid, jobid, ready],
                )
            connection.execute(
                "insert into chunkfact "
                "(datasetid, dataid, generation, location, rows, bytes, fingerprint) "
                "select datasetid, dataid, generation, '/data/bench/' || dataid, 1000, 64000, "
                "       md5(dataid) from datastatus "
                "on conflict (datasetid, dataid, generation) do update "
                "set location = excluded.location, rows = excluded.rows, bytes = excluded.bytes, "
                "    fingerprint = excluded.fingerprint"
            )
            register(connection, "bench", "bench_in", "bench_out")
        fill(store)
        store.close()
        with connect(url, "dataflow") as connection:
            settle(connection)

    @staticmethod
    def left(url: str) -> int:
        with connect(url, "dataflow") as connection:
            return _count(connection, "select count(*) from pending where jobid = 'bench'")

    @staticmethod
    def check(url: str, chunks: int) -> None:
        with connect(url, "dataflow") as connection:
            judge(connection.execute(KEPT).fetchone(), chunks)

    def __init__(self, url: str) -> None:
        self.store, self.owner = open_store(url), new_owner()

    def cycle(self, k: int) -> int:
        claims = self.store.claim("bench", owner=self.owner, k=k)
        if claims:
            self.store.finish(claims, [fact(claim.dataid) for claim in claims])
        return len(claims)

    def close(self) -> None:
        self.store.close()


class Bare(Contender):
    """The limit: one lean table, a take UPDATE … SKIP LOCKED and a done UPDATE by key."""

    title = "bare loop: take + done"
    jobid = "cycle"
    finishes = True

    @classmethod
    def load(cls, url: str, chunks: int, done: int) -> None:
        schema = f"bare_{cls.jobid}"
        with connect(url, schema) as connection:
            connection.execute(f"drop schema if exists {schema} cascade".encode())
            connection.execute(f"create schema {schema}".encode())
            connection.execute(
                "create table chunk (jobid text, dataid text, status text, owner text, "
                "modified timestamptz, primary key (jobid, dataid))"
            )
            connection.execute(
                "insert into chunk (jobid, dataid, status, owner, modified) select %s, n::text, "
                "case when n <= %s then 'DONE' else 'PENDING' end, null, now() "
                "from generate_series(1, %s::int) as n",
                [cls.jobid, done, chunks],
            )
            connection.execute(
                "create index chunk_in_order on chunk (jobid, dataid) where status = 'PENDING'"
            )
            settle(connection)

    @classmethod
    def left(cls, url: str) -> int:
        with connect(url, f"bare_{cls.jobid}") as connection:
            return _count(connection, "select count(*) from chunk where status = 'PENDING'")

    def __init__(self, url: str) -> None:
        self.connection, self.owner = connect(url, f"bare_{self.jobid}"), new_owner()

    def cycle(self, k: int) -> int:
        taken = self.connection.execute(
            "update chunk set status = 'RUNNING', owner = %s, modified = now() "
            "where jobid = %s and dataid = any(array("
            "    select dataid from chunk where jobid = %s and status = 'PENDING' "
            "    order by dataid limit %s for update skip locked)) "
            "returning dataid",
            [self.owner, self.jobid, self.jobid, k],
            prepare=True,
        ).fetchall()
        if taken and self.finishes:
            self.connection.execute(
                "update chunk set status = 'DONE', modified = now() "
                "where jobid = %s and dataid = any(%s)",
                [self.jobid, [dataid for (dataid,) in taken]],
                prepare=True,
            )
        return len(taken)

    def close(self) -> None:
        self.connection.close()


class BareTake(Bare):
    """The same without the done UPDATE: nobody could know what has been finished."""

    title = "bare loop: take alone"
    jobid = "take"
    finishes = False


class _Async(Contender):
    """A rival with an asynchronous API: one event loop, uvloop, which runs for a whole slice."""

    def __init__(self, url: str) -> None:
        import uvloop

        self.loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.open(url))

    def run(self, k: int, until: float) -> tuple[int, float]:
        return self.loop.run_until_complete(self._run(k, until))

    async def _run(self, k: int, until: float) -> tuple[int, float]:
        done, last = 0, time.monotonic()
        while count := await self.turn(k):
            done += count
            last = time.monotonic()
            if last >= until:
                break
        return done, last

    async def open(self, url: str) -> None:
        raise NotImplementedError

    async def turn(self, k: int) -> int:
        raise NotImplementedError


class Procrastinate(_Async):
    """JobManager.fetch_job and finish_job on its PsycopgConnector with its defaults, one by one."""

    title = "procrastinate"
    package = "procrastinate"

    @staticmethod
    def load(url: str, chunks: int, done: int) -> None:
        from procrastinate.schema import SchemaManager

        with connect(url, "procrastinate") as connection:
            connection.execute("drop schema if exists procrastinate cascade")
            connection.execute("create schema procrastinate")
            connection.execute(SchemaManager.get_schema().encode())
            # A bulk load: its triggers are off, and this writes what they would have written.
            connection.execute("set session_replication_role = replica")
            connection.execute(
                "insert into procrastinate_jobs (queue_name, task_name, args, status, attempts) "
                "select 'bench', 'bench', jsonb_build_object('dataid', n::text), "
                "       (case when n <= %s then 'succeeded' else 'todo' end)"
                "       ::procrastinate_job_status, "
                "       case when n <= %s then 1 else 0 end "
                "from generate_series(1, %s::int) as n",
                [done, done, chunks],
            )
            connection.execute(
                "insert into procrastinate_events (job_id, type) "
                "select j.id, e.type::procrastinate_job_event_type from procrastinate_jobs j "
                "cross join (values ('deferred'), ('started'), ('succeeded')) as e(type) "
                "where e.type = 'deferred' or j.status = 'succeeded' order by j.id"
            )
            settle(connection)

    @staticmethod
    def left(url: str) -> int:
        with connect(url, "procrastinate") as connection:
            return _count(
                connection, "select count(*) from procrastinate_jobs where status = 'todo'"
            )

    async def open(self, url: str) -> None:
        from procrastinate import PsycopgConnector
        from procrastinate.jobs import Status
        from procrastinate.manager import JobManager

        self.connector = PsycopgConnector(
            conninfo=url, min_size=1, max_size=1, kwargs={"options": "-c search_path=procrastinate"}
        )
        await self.connector.open_async()
        self.manager = JobManager(self.connector)
        self.worker = await self.manager.register_worker()
        self.succeeded = Status.SUCCEEDED

    async def turn(self, k: int) -> int:
        job = await self.manager.fetch_job(queues=None, worker_id=self.worker)
        if job is None:
            return 0
        await self.manager.finish_job(job, status=self.succeeded, delete_job=False)
        return 1

    def close(self) -> None:
        self.loop.run_until_complete(self.connector.close_async())


class PgQueuer(_Async):
    """Queries.dequeue and log_jobs on its psycopg driver, without limits: its fastest mode."""

    title = "pgqueuer"
    package = "pgqueuer"
    schema = "pgqueuer"
    limit = 0

    @classmethod
    def load(cls, url: str, chunks: int, done: int) -> None:
        """It keeps finished chunks in another table, so only unfinished ones count."""
        with connect(url, cls.schema) as connection:
            connection.execute(f"drop schema if exists {cls.schema} cascade".encode())
            connection.execute(f"create schema {cls.schema}".encode())
        asyncio.run(cls._install(url))
        with connect(url, cls.schema) as connection:
            connection.execute("alter table pgqueuer disable trigger user")  # a NOTIFY for each row
            connection.execute(
                "insert into pgqueuer (priority, status, entrypoint, payload) "
                "select 0, 'queued', 'bench', convert_to(n::text, 'utf8') "
                "from generate_series(%s::int, %s::int) as n",
                [done + 1, chunks],
            )
            connection.execute("alter table pgqueuer enable trigger user")
            settle(connection)

    @classmethod
    async def _install(cls, url: str) -> None:
        connection, queries = await cls._connect(url)
        await queries.install()
        await queries.optimize_autovacuum()  # as its documentation recommends
        await connection.close()

    @classmethod
    async def _connect(cls, url: str) -> tuple[psycopg.AsyncConnection, Any]:
        from pgqueuer.queries import Queries

        connection = await psycopg.AsyncConnection.connect(
            url, autocommit=True, options=f"-c search_path={cls.schema}"
        )
        return connection, Queries.from_psycopg_connection(connection)

    @classmethod
    def left(cls, url: str) -> int:
        with connect(url, cls.schema) as connection:
            return _count(connection, "select count(*) from pgqueuer where status = 'queued'")

    async def open(self, url: str) -> None:
        from pgqueuer.queries import EntrypointExecutionParameter

        self.connection, self.queries = await self._connect(url)
        self.entrypoints = {"bench": EntrypointExecutionParameter(concurrency_limit=self.limit)}
        self.manager, self.patience = uuid.uuid4(), timedelta(seconds=30)

    async def turn(self, k: int) -> int:
        jobs = await self.queries.dequeue(k, self.entrypoints, self.manager, None, self.patience)
        if jobs:
            await self.queries.log_jobs([(job, "successful", None) for job in jobs])
        return len(jobs)

    def close(self) -> None:
        self.loop.run_until_complete(self.connection.close())


class PgQueuerLimited(PgQueuer):
    """With a concurrency limit that is never reached: the dequeue then counts what is running."""

    title = "pgqueuer, with a limit"
    schema = "pgqueuer_limited"
    limit = 100_000


KEPT = (
    "select (select count(*) from claim), "
    "(select count(*) from datastatus where datasetid = 'bench_out' and status = 'READY')"
    " + (select count(*) from pending where jobid = 'bench'), "
    "(select count(*) from (select dataid from dataevent where jobid = 'bench'"
    " and datasetid = 'bench_out' and status_after = 'READY'"
    " group by dataid having count(*) > 1) as doubled)"
)
"""Claims left over, chunks that are READY or waiting, and chunks that became READY twice."""


def judge(kept: tuple | None, chunks: int) -> None:
    """Fail if a chunk was lost, or finished twice."""
    if kept != (0, chunks, 0):
        raise RuntimeError(
            f"Of {chunks} chunks (claims left over, chunks found, finished twice): {kept}"
        )


def fact(dataid: str) -> Fact:
    """Return what a job reports about a chunk that it has produced."""
    return Fact(
        "bench_out",
        dataid,
        location=f"/data/bench_out/{dataid}",
        rows=1000,
        bytes=64000,
        fingerprint="8f14e45fceea167a",
        validated=True,
    )


def fill(store: Any) -> None:
    """Judge all chunks of a registration: on older commits, a trigger has already done it."""
    getattr(store, "fill", lambda: None)()


def register(connection: psycopg.Connection, jobid: str, reads: str, writes: str) -> None:
    """Register a job with one input and one output."""
    connection.execute(
        "insert into job (jobid, itemtype, datasetid) "
        "values (%(job)s, 'IN', %(in)s), (%(job)s, 'OUT', %(out)s)",
        {"job": jobid, "in": reads, "out": writes},
    )


def settle(connection: psycopg.Connection) -> None:
    """Leave the tables as they are some time after a bulk load: vacuumed, analyzed, on disk."""
    connection.execute("vacuum analyze")
    connection.execute("checkpoint")


def _count(connection: psycopg.Connection, query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else 0
