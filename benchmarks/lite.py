"""Claims on SQLite: ours, and as the limit a bare loop that writes the same rows."""

import os
import shutil
import sqlite3
from pathlib import Path

from measure import Contender
from product import new_owner, open_store
from rivals import KEPT, fact, fill, judge

NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"

NUMBERS = "with recursive g(n) as (select 1 union all select n + 1 from g where n < ?)"

STATUS = "datasetid, jobid, dataid, locktype, status, modified, generation"


class LiteOurs(Contender):
    """A job with one input and one output, as in production."""

    title = "opendataflow"

    @staticmethod
    def load(path: Path, chunks: int, done: int) -> None:
        """Create a file: the input of every chunk is READY, and the output of the first `done`."""
        _remove(path)
        store = open_store(f"sqlite:///{path}")
        store.init()
        with opened(path) as connection:
            connection.execute("begin immediate")
            for datasetid, jobid, rows in (
                ("bench_in", "loader", chunks),
                ("bench_out", "bench", done),
            ):
                connection.execute(
                    f"insert into datastatus ({STATUS}) {NUMBERS} "
                    f"select ?, ?, cast(n as text), 'OUT', 'READY', {NOW}, n from g limit ?",
                    [max(rows, 1), datasetid, jobid, rows],
                )
            connection.execute(
                "insert or replace into chunkfact "
                "(datasetid, dataid, generation, location, rows, bytes, fingerprint) "
                "select datasetid, dataid, generation, '/data/bench/' || dataid, 1000, 64000, "
                "       '8f14e45fceea167a' from datastatus"
            )
            connection.execute("update generation set last = ?", [chunks])
            for itemtype, datasetid in (("IN", "bench_in"), ("OUT", "bench_out")):
                connection.execute(
                    "insert into job (jobid, itemtype, datasetid) values ('bench', ?, ?)",
                    [itemtype, datasetid],
                )
            connection.execute("commit")
        fill(store)
        # The first claim gives all pending chunks their place in the natural order.
        store.finish(store.claim("bench", owner="loader"))
        store.close()
        with opened(path) as connection:
            connection.execute("analyze")
            connection.execute("pragma wal_checkpoint(truncate)")
        os.sync()  # otherwise the first measured commits would wait for it

    @staticmethod
    def left(path: Path) -> int:
        with opened(path) as connection:
            return connection.execute(
                "select count(*) from pending where jobid = 'bench'"
            ).fetchone()[0]

    @staticmethod
    def check(path: Path, chunks: int) -> None:
        with opened(path) as connection:
            judge(connection.execute(KEPT).fetchone(), chunks)

    def __init__(self, path: Path) -> None:
        self.store, self.owner = open_store(f"sqlite:///{path}"), new_owner()

    def cycle(self, k: int) -> int:
        claims = self.store.claim("bench", owner=self.owner, k=k)
        if claims:
            self.store.finish(claims, [fact(claim.dataid) for claim in claims])
        return len(claims)

    def close(self) -> None:
        self.store.close()


EVENT = (
    "insert into dataevent "
    "(at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who) "
    f"values ({NOW}, ?, 'bench', ?, ?, ?, ?, ?, ?)"
)

SIGN = "update dataflow_context set act = ?, who = ?, why = null"


class LiteBare(Contender):
    """The same tables, columns and indexes without triggers or views; the same rows written in two
    transactions; the only query is for the next chunk."""

    title = "bare loop, same rows"

    @staticmethod
    def load(path: Path, chunks: int, done: int) -> None:
        """Copy the file that `LiteOurs` has just created, without triggers and views."""
        _remove(path)
        shutil.copyfile(path.with_name(path.name.replace("bare", "ours")), path)
        with opened(path) as connection:
            for kind in ("trigger", "view"):
                names = connection.execute(
                    "select name from sqlite_master where type = ?", [kind]
                ).fetchall()
                for (name,) in names:
                    connection.execute(f"drop {kind} if exists {name}")
            connection.execute("pragma wal_checkpoint(truncate)")
        os.sync()

    left = LiteOurs.left

    def __init__(self, path: Path) -> None:
        self.owner = new_owner()
        self.connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        self.connection.execute("pragma synchronous = full")

    def cycle(self, k: int) -> int:
        do, owner = self.connection.execute, self.owner
        do("begin immediate")
        do(SIGN, ["claim", owner])
        taken = do(
            "select dataid from pending where jobid = 'bench' "
            "order by rank, sortkey, dataid limit ?",
            [k],
        ).fetchall()
        claims = [self._claim(dataid) for (dataid,) in taken]
        do(SIGN, ["", None])
        do("commit")
        if claims:
            do("begin immediate")
            do(SIGN, ["finish", owner])
            for dataid, generation in claims:
                self._finish(dataid, generation)
            do(SIGN, ["", None])
            do("commit")
        return len(claims)

    def _claim(self, dataid: str) -> tuple[str, int]:
        do, owner = self.connection.execute, self.owner
        [(generation,)] = do("update generation set last = last + 1 returning last").fetchall()
        do("delete from pending where jobid = 'bench' and dataid = ?", [dataid])
        do(
            "insert into claim (jobid, dataid, generation, owner, started, heartbeat, lease_end) "
            f"values ('bench', ?, ?, ?, {NOW}, {NOW}, "
            "strftime('%Y-%m-%d %H:%M:%f', 'now', '120 seconds'))",
            [dataid, generation, owner],
        )
        for datasetid, locktype in (("bench_in", "IN"), ("bench_out", "OUT")):
            do(
                f"insert into datastatus ({STATUS}) values (?, 'bench', ?, ?, 'RUNNING', {NOW}, ?)",
                [datasetid, dataid, locktype, generation],
            )
            do(EVENT, [datasetid, dataid, locktype, None, "RUNNING", generation, owner])
        return dataid, generation

    def _finish(self, dataid: str, generation: int) -> None:
        do, owner = self.connection.execute, self.owner
        key = "jobid = 'bench' and dataid = ?"
        do(f"delete from claim where {key}", [dataid])
        do(f"delete from datastatus where datasetid = 'bench_in' and {key}", [dataid])
        do(EVENT, ["bench_in", dataid, "IN", "RUNNING", None, generation, owner])
        do(
            f"update datastatus set status = 'READY', modified = {NOW} "
            f"where datasetid = 'bench_out' and {key}",
            [dataid],
        )
        do(EVENT, ["bench_out", dataid, "OUT", "RUNNING", "READY", generation, owner])
        told = fact(dataid)
        do(
            "insert into chunkfact (datasetid, dataid, location, rows, bytes, fingerprint, "
            "validated, generation, jobid, inputs) values (?, ?, ?, ?, ?, ?, ?, ?, 'bench', ?)",
            [
                told.datasetid,
                dataid,
                told.location,
                told.rows,
                told.bytes,
                told.fingerprint,
                told.validated,
                generation,
                '{"bench_in":1}',
            ],
        )

    def close(self) -> None:
        self.connection.close()


class LiteLean(Contender):
    """One lean table, with take and done in two transactions: no code of ours affects its speed,
    so two commits can be compared by it."""

    title = "lean loop: take + done"

    @staticmethod
    def load(path: Path, chunks: int, done: int) -> None:
        _remove(path)
        with opened(path) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.execute(
                "create table chunk (dataid integer primary key, status text, owner text, "
                "modified text)"
            )
            connection.execute(
                f"insert into chunk (dataid, status) {NUMBERS} "
                "select n, case when n <= ? then 'DONE' else 'PENDING' end from g",
                [chunks, done],
            )
            connection.execute(
                "create index chunk_in_order on chunk (dataid) where status = 'PENDING'"
            )
            connection.execute("analyze")
            connection.execute("pragma wal_checkpoint(truncate)")
        os.sync()

    @staticmethod
    def left(path: Path) -> int:
        with opened(path) as connection:
            return connection.execute(
                "select count(*) from chunk where status = 'PENDING'"
            ).fetchone()[0]

    def __init__(self, path: Path) -> None:
        self.owner = new_owner()
        self.connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        self.connection.execute("pragma synchronous = full")

    def cycle(self, k: int) -> int:
        do = self.connection.execute
        do("begin immediate")
        taken = do(
            f"update chunk set status = 'RUNNING', owner = ?, modified = {NOW} where dataid in "
            "(select dataid from chunk where status = 'PENDING' order by dataid limit ?) "
            "returning dataid",
            [self.owner, k],
        ).fetchall()
        do("commit")
        do("begin immediate")
        for (dataid,) in taken:
            do(f"update chunk set status = 'DONE', modified = {NOW} where dataid = ?", [dataid])
        do("commit")
        return len(taken)

    def close(self) -> None:
        self.connection.close()


class opened:
    """A connection for bulk work, closed at the end."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        for pragma in ("synchronous = off", "temp_store = memory", "cache_size = -200000"):
            self.connection.execute(f"pragma {pragma}")

    def __enter__(self) -> sqlite3.Connection:
        return self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
