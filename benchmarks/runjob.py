"""The overhead of a job over its script: `benchmarks/runjob.py [--quick] [--only cold|all]`.

Cold: one `odf run` of a script that does nothing, from process start to exit, compared with a bare
Python process that imports the driver, connects, and sends the same statements (recorded from
`odf run`). Catching up: `odf run --all` over 1,000 chunks, compared with a bare loop that starts
the same script. All in turns, on both databases. Exit code 0 if every target is met.
"""

import compileall
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lite import LiteOurs  # noqa: E402
from measure import Samples, concluded, progress  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options, spread  # noqa: E402
from rivals import Ours, connect  # noqa: E402
from sent import program, recording  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

ODF = Path(sys.executable).with_name("odf")

LOOP = """
import os, sys
script = sys.argv[1]
for _ in range(int(sys.argv[2])):
    os.waitpid(os.posix_spawn(script, [script], os.environ), 0)
"""

CONNECTS = """
import os, sys
if sys.argv[1].startswith("sqlite"):
    import sqlite3
    sqlite3.connect(sys.argv[1].removeprefix("sqlite:///")).execute("select 1").fetchall()
else:
    import psycopg
    psycopg.connect(sys.argv[1], autocommit=True).execute("select 1").fetchall()
os.waitpid(os.posix_spawn(sys.argv[2], [sys.argv[2]], os.environ), 0)
"""
"""Unaffected by changes of ours, so two commits can be compared by it."""

RUN, BARE, BARE_SCRIPT = "odf run", "bare process", "bare process that starts the script too"
CONNECT = "process that connects and starts the script"


class Setting(NamedTuple):
    """How often, and over how many chunks."""

    cold: int
    warm_up: int
    rounds: int
    chunks: int


SETTINGS = {
    FULL: Setting(40, 3, 5, 1000),
    QUICK: Setting(10, 3, 2, 300),
    SLICE: Setting(7, 1, 1, 300),
    TINY: Setting(1, 0, 1, 5),
}


class Database:
    """One kind of database, as its users see it."""

    def __init__(self, title: str, url: str, folder: Path) -> None:
        self.title, self.url, self.folder = title, url, folder
        self.script = str(folder / "nothing.sh")
        self.env = _environment(url)

    def fill(self, chunks: int) -> None:
        """Write chunks that the job `bench` can run."""
        if self.url.startswith("sqlite"):
            path = Path(self.url.removeprefix("sqlite:///"))
            LiteOurs.load(path, chunks + 1, 0)  # which claims the first one
        else:
            Ours.load(self.url, chunks, 0)
        with self._connection() as connection:
            connection.execute("delete from dataset")
            for datasetid in ("bench_in", "bench_out"):
                connection.execute(
                    "insert into dataset "
                    "(datasetid, hostname, database, schemaname, tablename, username) "
                    f"values ('{datasetid}', 'db1', 'sales', 'public', '{datasetid}', 'etl')"
                )

    def following(self) -> tuple[str, int]:
        """Return the next chunk, and the generation that its claim will get."""
        generation = (
            "last + 1 from generation"
            if self.url.startswith("sqlite")
            else "last_value + 1 from generation"
        )
        with self._connection() as connection:
            [dataid] = connection.execute(
                "select dataid from pending where jobid = 'bench' "
                "order by rank, sortkey, dataid limit 1"
            ).fetchone()
            [number] = connection.execute(f"select {generation}").fetchone()
        return dataid, number

    def left(self) -> int:
        with self._connection() as connection:
            return connection.execute(
                "select count(*) from pending where jobid = 'bench'"
            ).fetchone()[0]

    def made(self) -> int:
        with self._connection() as connection:
            return connection.execute(
                "select count(*) from datastatus where datasetid = 'bench_out' and status = 'READY'"
            ).fetchone()[0]

    def check(self, chunks: int) -> None:
        """Fail if a chunk was lost, or finished twice."""
        if self.url.startswith("sqlite"):
            LiteOurs.check(Path(self.url.removeprefix("sqlite:///")), chunks + 1)
        else:
            Ours.check(self.url, chunks)

    def _connection(self) -> Any:
        if self.url.startswith("sqlite"):
            return _Closing(
                sqlite3.connect(
                    self.url.removeprefix("sqlite:///"), timeout=60, isolation_level=None
                )
            )
        return connect(self.url, "dataflow")


class _Closing:
    """An SQLite connection that `with` closes, like psycopg's."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __enter__(self) -> sqlite3.Connection:
        return self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, only=("cold", "all"))
    setting, report = SETTINGS[given.scale], Report("runjob", given, ("PostgreSQL",))
    # With PYTHONDONTWRITEBYTECODE set, an editable install would compile at every start.
    compileall.compile_dir(str(ROOT / "opendataflow_dagster"), quiet=1)
    folder = Path(tempfile.mkdtemp(prefix="odf-runjob-"))
    try:
        script = folder / "nothing.sh"
        script.write_text("#!/bin/sh\nexit 0\n")
        script.chmod(0o755)
        with Server() as server:
            databases = [
                Database("PostgreSQL", server.create_database("bench"), folder),
                Database("SQLite", f"sqlite:///{folder / 'dataflow.db'}", folder),
            ]
            if given.only != "all":
                cold(databases, setting, report)
            if given.only != "cold":
                catch_up(databases, setting, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report.verdict()


def cold(databases: list[Database], setting: Setting, report: Report) -> None:
    """Measure whole processes, from start to exit."""
    rounds, warm_up, samples = setting.cold, setting.warm_up, Samples()
    for database in databases:
        database.fill(3 * (rounds + warm_up) + 10)
        sent = recording("bench", database.script, database.env)
        for name, starts_script in ((BARE, False), (BARE_SCRIPT, True)):
            _file(database, name).write_text(
                program(database.url, sent, starts_script=starts_script)
            )
        _file(database, CONNECT).write_text(CONNECTS)
        before = database.made()
        for number in range(-warm_up, rounds):
            progress(f"{database.title}: cold start {number + 1} of {rounds}")
            for name in (RUN, BARE, BARE_SCRIPT, CONNECT):
                spent = _wall(_cold_line(database, name), database) * 1000
                if number >= 0:
                    samples.add((name, database.title), spent)
        progress("")
        if database.made() - before != 3 * (rounds + warm_up):
            raise RuntimeError("a process didn't claim and finish its chunk")
    names = [database.title for database in databases]
    rows = [
        [way, *(spread(samples[way, name]) for name in names)]
        for way in (RUN, BARE, BARE_SCRIPT, CONNECT)
    ]
    for other in (BARE, BARE_SCRIPT):
        ratios = (samples.ratios((RUN, name), (other, name)) for name in names)
        rows.append([f"{RUN} / {other}", *map(spread, ratios)])
    title = "Cold, one chunk, from process start to exit"
    report.table(f"{title}: ms, median (least–most) of {rounds} rounds", names, rows)
    for name in names:
        ratios = samples.ratios((RUN, name), (BARE, name))
        report.require(f"cold `odf run` / bare process, {name}", ratios, most=1.6)
        ratios = samples.ratios((RUN, name), (CONNECT, name))
        report.compare(f"{name}: cold `odf run` / {CONNECT}", ratios, better="less")


def catch_up(databases: list[Database], setting: Setting, report: Report) -> None:
    """Measure `--all`, less a loop that starts the same script as often."""
    rounds, chunks, samples = setting.rounds, setting.chunks, Samples()
    loop = databases[0].folder / "loop.py"
    loop.write_text(LOOP)
    for number in range(rounds):
        progress(f"--all over {chunks} chunks: round {number + 1} of {rounds}")
        line = [sys.executable, str(loop), databases[0].script, str(chunks)]
        spent = _wall(line, databases[0]) * 1000 / chunks
        samples.add("loop", spent)
        for database in databases:
            database.fill(chunks)
            all_line = [str(ODF), "run", "--all", "--job", "bench", database.script]
            whole = _wall(all_line, database) * 1000 / chunks
            if database.left():
                raise RuntimeError("--all left chunks undone")
            database.check(chunks)
            samples.add(database.title, whole)
            samples.add(f"on top, {database.title}", whole - spent)
    progress("")
    names = [database.title for database in databases]
    report.table(
        f"Catching up {chunks:,}: ms per chunk, median (least–most) of {rounds} rounds",
        names,
        [
            ["odf run --all", *(spread(samples[name]) for name in names)],
            ["bare loop that starts the script", *(spread(samples["loop"]) for _ in names)],
            ["on top of it", *(spread(samples[f"on top, {name}"]) for name in names)],
        ],
    )
    for name in names:
        what = f"`odf run --all` on top of the bare loop, ms per chunk, {name}"
        report.require(what, samples[f"on top, {name}"], most=8)
        ratios = samples.ratios(name, "loop")
        report.compare(f"{name}: `odf run --all` / bare loop", ratios, better="less")


def _cold_line(database: Database, name: str) -> list[str]:
    if name == RUN:
        return [str(ODF), "run", "--job", "bench", database.script]
    if name == CONNECT:
        return [sys.executable, str(_file(database, name)), database.url, database.script]
    dataid, generation = database.following()
    return [sys.executable, str(_file(database, name)), dataid, str(generation), database.script]


def _file(database: Database, name: str) -> Path:
    return database.folder / f"{database.title}_{name.replace(' ', '_')}.py"


def _wall(line: list[str], database: Database) -> float:
    """Return the seconds from the start of a process to its end, which must be a success."""
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    log = str(database.folder / "log")
    quiet.append((os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    start = time.perf_counter()
    pid = os.posix_spawn(line[0], line, database.env, file_actions=quiet)
    _, status = os.waitpid(pid, 0)
    spent = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{line} failed: {Path(log).read_text()[-2000:]}")
    return spent


def _environment(url: str) -> dict[str, str]:
    """Return our environment without variables that affect Python's start or select a database."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DATAFLOW", "PASSKEY"))
    }
    return env | {"DATAFLOW_URL": url}


if __name__ == "__main__":
    sys.exit(concluded(main))
