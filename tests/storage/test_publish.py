"""A chunk appears whole or not at all: in folders, through kills and zombies, and in tables."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pandas as pd
import psycopg
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from pandas.testing import assert_frame_equal

from opendataflow_dagster.chunk import Chunk, ChunkFailed, Result, open_chunk
from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim, WrongUse
from opendataflow_dagster.formats import FILE_FORMATS
from opendataflow_dagster.location import Folder, Table, chunk_place
from opendataflow_dagster.model import Fact
from opendataflow_dagster.runner.environment import job_environment
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage.chunks import ask, publish, read, read_chunk
from opendataflow_dagster.storage.compact import compact
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.operations import ready
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.split import by_number, by_shards, split
from opendataflow_dagster.store.store import Store
from opendataflow_dagster.util import system
from tests.support.store_fixtures import close, expire, put, register, sql, take

ODD = [
    "a/b",
    "..",
    ".",
    "a:b",
    "%",
    "%2F",
    "a%2Fb",
    " ",
    "a b",
    "日本",
    "é",
    "e\u0301",
    "a=b",
    "007",
    "a\nb",
    "-",
    "_x",
    ".x",
    "a\\b",
    '"',
    "'",
    "*",
    "[x]",
    "{y}",
    "~",
    "x" * 240,
    "\x7f",
]


def nothing() -> None:
    """A claim that is ours."""


def filled(text: str) -> Callable[[str], dict[str, Any]]:
    """Return a writer of two files with the same text: a reader can detect a mixture."""

    def write(folder: str) -> dict[str, Any]:
        for name in ("part-0.csv", "part-1.csv"):
            Path(folder, name).write_text(text)
        return {"rows": 2}

    return write


def texts(path: str) -> list[str]:
    return [Path(each).read_text() for each in folders.data_files(path)]


# --- two stores, one folder ---


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Two stores with one dataset: `load` of the first writes it, `use` of the second reads it."""
    made = [open_store(f"sqlite:///{tmp_path}/{name}.db") for name in ("first", "second")]
    for store in made:
        store.init()
        add_dataset(store, "shared", hostname=str(tmp_path / "shared"), format="csv")
        add_dataset(store, "mine", hostname=str(tmp_path / "mine"), format="csv")
    register(made[0], "load", [], ["shared"])
    register(made[1], "use", ["shared"], ["mine"])
    yield made[0], made[1]
    for store in made:
        close(store)


def load_one(store: Store, value: int, job: str = "load") -> Chunk:
    """Produce chunk 1 of `shared` again, and settle it."""
    put(store, "shared", "1", "RESUBMIT", jobid=job)
    chunk = claim_one(store, job)
    told = publish(store, chunk.outputs["shared"], chunk, pd.DataFrame({"n": [value]}))
    store.finish(chunk.claim, [Fact("shared", "1", location=told.location)])
    return chunk


def claim_one(store: Store, job: str) -> Chunk:
    [claim] = take(store, job)
    return open_chunk(store, claim, job_environment(store, store.read_plan(job), secrets=False))


def value_read(store: Store) -> int:
    def of(found: Any) -> Any:
        return read(found, found.target("csv"))

    return read_chunk(store, "shared", "1", of, format="csv")[0]["n"][0]


def test_a_second_store_reads_what_the_first_has_published(stores: tuple[Store, Store]) -> None:
    first, second = stores
    for number in range(6):
        load_one(first, number)
    ready(second, "shared", ["1"])
    assert value_read(second) == 5
    load_one(first, 7)
    assert value_read(second) == value_read(first) == 7


def test_chunks_of_the_same_store_are_compared(stores: tuple[Store, Store]) -> None:
    first, _ = stores
    load_one(first, 1)
    put(first, "shared", "1", "RESUBMIT", jobid="load")
    chunk = claim_one(first, "load")
    publish(first, chunk.outputs["shared"], chunk, pd.DataFrame({"n": [2]}))
    sql(first, "update datastatus set status = 'READY', generation = 1 where datasetid = 'shared'")
    with pytest.raises(Refused, match="of generation 2, but the tables say 1"):
        value_read(first)


def test_a_chunk_of_another_store_is_replaced_and_not_compacted(
    stores: tuple[Store, Store],
) -> None:
    first, second = stores
    for number in range(6):
        load_one(first, number)
    register(second, "load", [], ["shared"])
    chunk = load_one(second, 9)
    assert value_read(second) == 9
    note = folders.read_note(f"{chunk.outputs['shared'].columns['hostname']}/dataid=1")
    assert (note["store"], note["generation"]) == (second.id, chunk.generation)
    assert second.id != first.id
    assert chunk.generation < 6
    load_one(first, 7)
    [data] = Path("shared", "dataid=1").glob("*.csv")
    (data.parent / f"again-{data.name}").write_bytes(data.read_bytes())
    [found] = compact(second, "shared")
    assert found.left == "another store published it"


def test_a_note_without_a_store_is_taken_for_our_own(stores: tuple[Store, Store]) -> None:
    _, second = stores
    root = chunk_place("shared", {"hostname": str(Path.cwd() / "shared"), "format": "csv"}, "csv")
    assert isinstance(root, Folder)
    folders.put(root.root, "1", 6, filled("n\n1\n"), confirm=nothing)
    ready(second, "shared", ["1"])
    with pytest.raises(Refused, match="of generation 6, but the tables say 1"):
        value_read(second)


# --- directories ---


@pytest.mark.parametrize("dataid", ODD)
def test_any_dataid_is_one_directory_in_the_root_and_comes_back(
    dataid: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "root")

    path = folders.put(root, dataid, 1, filled("x"), confirm=nothing)

    assert os.listdir(root) == [os.path.basename(path)]
    assert folders.unescaped(os.path.basename(path).removeprefix("dataid=")) == dataid
    assert folders.find(root, dataid) == path
    assert folders.read_note(path) == {"dataid": dataid, "generation": 1, "rows": 2}


def test_no_two_dataids_share_a_directory() -> None:
    assert len({folders.directory(each) for each in ODD}) == len(ODD)


@pytest.mark.parametrize("dataid", ["", "__HIVE_DEFAULT_PARTITION__", "x" * 249, ":" * 90])
def test_an_invalid_directory_name_is_refused(dataid: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"Use a(nother| shorter) dataid"):
        folders.put(str(tmp_path), dataid, 1, filled("x"), confirm=nothing)

    assert os.listdir(tmp_path) == []


def test_a_root_reads_as_one_partitioned_dataset(tmp_path: Path) -> None:
    for dataid, value in (("a/b", 1), ("007", 2)):
        frame = pd.DataFrame({"v": [value]})
        folders.put(
            str(tmp_path),
            dataid,
            1,
            lambda folder, frame=frame: folders.write(frame, folder, "parquet"),
            confirm=nothing,
        )
    os.makedirs(tmp_path / "_staging" / "dataid=x" / "3-ab")

    by_arrow = pyarrow.dataset.dataset(
        tmp_path,
        partitioning=pyarrow.dataset.partitioning(
            pa.schema([("dataid", pa.string())]), flavor="hive"
        ),
    )

    assert dict(by_arrow.to_table().select(["dataid", "v"]).to_pandas().to_numpy()) == {
        "a/b": 1,
        "007": 2,
    }
    assert len(pd.read_parquet(tmp_path)) == 2


@pytest.mark.parametrize("exchange", [True, False])
def test_a_chunk_is_replaced_and_nothing_is_left_over(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(folders.sys, "platform", "beos")
    root = str(tmp_path)
    leftovers = tmp_path / "_staging" / "dataid=1"
    for name in ("1-aa", "1-aa.old"):
        (leftovers / name).mkdir(parents=True)

    for generation in (2, 3):
        path = folders.put(root, "1", generation, filled(str(generation)), confirm=nothing)

    assert texts(path) == ["3", "3"]
    assert os.listdir(root) == ["dataid=1"]


def test_an_older_generation_replaces_no_newer_one(tmp_path: Path) -> None:
    path = folders.put(str(tmp_path), "1", 5, filled("new"), confirm=nothing)

    with pytest.raises(Refused, match=r"has generation 5, and this claim has 4.*_odf.json"):
        folders.put(str(tmp_path), "1", 4, filled("old"), confirm=nothing)

    assert texts(path) == ["new", "new"]
    assert os.listdir(tmp_path) == ["dataid=1"]


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a file system without locks."""

    def flock(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(system.fcntl, "flock", flock)


def test_without_locks_a_newer_one_that_came_in_between_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, calls = str(tmp_path), 0
    without_locks(monkeypatch)

    def newer() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            folders.put(root, "1", 9, filled("new"), confirm=nothing)

    folders.put(root, "1", 1, filled("first"), confirm=nothing)
    with pytest.raises((Refused, FileNotFoundError)):
        folders.put(root, "1", 2, filled("old"), confirm=newer)

    assert texts(folders.chunk_path(root, "1")) == ["new", "new"]
    assert os.listdir(root) == ["dataid=1"]


def test_a_writer_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = folders.put(str(tmp_path), "1", 1, filled("old"), confirm=nothing)

    def fails(folder: str) -> dict[str, Any]:
        filled("half")(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folders.put(str(tmp_path), "1", 2, fails, confirm=nothing)

    assert texts(path) == ["old", "old"]
    assert os.listdir(tmp_path) == ["dataid=1"]


def test_waiting_for_a_hanging_publish_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "LOCK_WAIT_SECONDS", 0.05)

    refused: list[str] = []

    def other() -> None:
        if not refused:
            with pytest.raises(Refused, match=r"Another process has been publishing") as error:
                folders.put(str(tmp_path), "1", 2, filled("second"), confirm=nothing)
            refused.append(str(error.value))

    path = folders.put(str(tmp_path), "1", 1, filled("first"), confirm=other)

    assert len(refused) == 1
    assert texts(path) == ["first", "first"]
    assert os.listdir(tmp_path) == ["dataid=1"]


@pytest.mark.parametrize("is_locking", [True, False])
@pytest.mark.parametrize("generation", [5, 6])  # of another compaction, of a new claim
def test_a_cleanup_removes_nothing_that_is_being_exchanged(
    is_locking: bool, generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)
    path = folders.put(root, "1", 5, filled("old"), confirm=nothing)
    if not is_locking:
        without_locks(monkeypatch)
    at_the_end, swept, exchanged = Event(), Event(), Event()
    exchange = folders._exchange

    def late(*names: str) -> None:
        at_the_end.set()
        assert swept.wait(20)
        try:
            exchange(*names)
        finally:
            exchanged.set()

    def by_handle(victim: str, **_: Any) -> None:
        """As it does: whatever the directory is called by now, what is in it goes."""
        handle = os.open(victim, os.O_RDONLY)
        swept.set()
        assert exchanged.wait(20)
        for name in os.listdir(handle):
            os.unlink(name, dir_fd=handle)
        os.close(handle)
        with suppress(OSError):
            os.rmdir(victim)

    monkeypatch.setattr(folders, "_exchange", late)
    monkeypatch.setattr(folders.shutil, "rmtree", by_handle)

    def first() -> None:
        with suppress(FileNotFoundError):
            folders.put(root, "1", 5, filled("new"), confirm=nothing)

    thread = Thread(target=first)
    thread.start()
    assert at_the_end.wait(20)
    folders.Staged(root, "1", generation)
    swept.set()
    thread.join()

    assert texts(path) == (["new", "new"] if is_locking else ["old", "old"])


# --- kill -9 ---

POINTS = ["writing", "syncing", "confirm", "before swap", "swapped", "shown", "sweeping"]

DOOMED = """
import os, signal, sys
from pathlib import Path
from opendataflow_dagster.storage import folder as folders

root, point, generation = sys.argv[1], sys.argv[2], int(sys.argv[3])
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def before(name): setattr(folders, name, die)
def after(name):
    plain = getattr(folders, name)
    def wrapped(*args): plain(*args); die()
    setattr(folders, name, wrapped)
def write(folder):
    for name in ("part-0.csv", "part-1.csv"):
        Path(folder, name).write_text(str(generation) * 1000)
        if point == "writing": die()
    return {"rows": 2}
if point == "syncing": before("sync")
if point == "before swap": before("_exchange")
if point == "swapped": after("_exchange")
if point == "shown": after("_show")
if point == "sweeping": folders.os.rmdir = die
folders.put(root, "1", generation, write, confirm=die if point == "confirm" else lambda: None)
"""


def test_killed_anywhere_readers_see_old_or_new_and_the_next_publish_clears_up(
    tmp_path: Path,
) -> None:
    root = str(tmp_path)
    path = folders.put(root, "1", 1, filled("1" * 1000), confirm=nothing)
    allowed, reads = {"1" * 1000}, 0

    def look() -> None:
        nonlocal reads
        note = folders.read_note(path)
        try:
            found = set(texts(path))
        except FileNotFoundError:
            return  # it was replaced while it was listed, and says so
        if folders.read_note(path) == note:
            assert len(found) == 1
            assert found <= allowed
            assert found == {str(note["generation"]) * 1000}
            reads += 1

    for generation, point in enumerate(POINTS, start=2):
        allowed = {*texts(path), str(generation) * 1000}
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, root, point, str(generation)])
        while doomed.poll() is None:
            look()
        assert doomed.returncode == -signal.SIGKILL, point
        look()
        done = point in ("swapped", "shown")  # "sweeping" is what the kill before has left
        assert (texts(path)[0] == str(generation) * 1000) is done, point

    assert reads > 100
    folders.put(root, "1", 90, filled("x"), confirm=nothing)
    assert os.listdir(root) == ["dataid=1"]


def test_many_writers_of_one_chunk_leave_the_newest(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(generation: int) -> None:
        with suppress(Refused, FileNotFoundError):
            folders.put(str(tmp_path), "1", generation, filled(str(generation)), confirm=nothing)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, [3, 1, 8, 2, 5, 9, 4, 7, 6]))

    assert texts(folders.chunk_path(str(tmp_path), "1")) == ["9", "9"]
    assert os.listdir(tmp_path) == ["dataid=1"]


# --- files ---


FRAME = pd.DataFrame(
    {
        "number": [1, 2, 3],
        "real": [0.1 + 0.2, None, 1e-20],
        "text": ["007", "", None],
        "lines": ["a\nb", 'c,"d"', "日本"],
        "time": pd.to_datetime(
            ["2026-01-01", "2026-01-02 03:04:05.123456", None], format="ISO8601"
        ),
        "zoned": pd.to_datetime(["2026-01-01", "2026-06-01", None], utc=True),
        "flag": [True, False, True],
        "maybe": pd.array([2**60 + 1, None, 3], dtype="Int64"),
    }
)


@pytest.mark.parametrize("format", [each.name for each in FILE_FORMATS])
@pytest.mark.parametrize("rows", [3, 0])
def test_a_frame_comes_back_as_it_was(format: str, rows: int, tmp_path: Path) -> None:
    frame = FRAME.head(rows)

    told = folders.write(frame, str(tmp_path), format)

    assert told["rows"] == rows
    assert told["bytes"] == sum(each.stat().st_size for each in tmp_path.iterdir())
    again = folders.read_frame(str(tmp_path), format, json.loads(json.dumps(told["columns"])))
    assert_frame_equal(again, frame)


def test_nanoseconds_stay_and_microseconds_are_what_spark_reads(tmp_path: Path) -> None:
    for name, text in (("us", "2026-01-01 00:00:01.000001"), ("ns", "2026-01-01 00:00:01.1234567")):
        (tmp_path / name).mkdir()
        frame = pd.DataFrame({"t": pd.to_datetime([text])})
        told = folders.write(frame, str(tmp_path / name), "parquet")
        [path] = folders.data_files(str(tmp_path / name))
        assert pyarrow.parquet.read_schema(path).field("t").type == pa.timestamp(name)
        assert_frame_equal(folders.read_frame(path, "parquet", told["columns"]), frame)


def test_an_index_with_a_name_is_kept_and_another_is_left_out(tmp_path: Path) -> None:
    named = FRAME[["number", "text"]].set_index("number")
    filtered = FRAME[["number"]][1:]

    assert folders.as_table(named).column_names == ["number", "text"]
    assert folders.as_table(filtered).column_names == ["number"]


@pytest.mark.parametrize("format", [each.name for each in FILE_FORMATS])
def test_a_frame_without_columns_and_arrow_tables_are_fine(format: str, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "arrow").mkdir()

    folders.write(pd.DataFrame(), str(tmp_path / "none"), format)
    told = folders.write(pa.table({"a": [1, 2]}), str(tmp_path / "arrow"), format)

    (tmp_path / "spark").mkdir()
    spark = type("DataFrame", (), {"toArrow": lambda self: pa.table({"b": [3]})})()
    assert folders.write(spark, str(tmp_path / "spark"), format)["rows"] == 1

    assert folders.read_frame(str(tmp_path / "none"), format).empty
    assert told["rows"] == 2
    assert folders.read_table(str(tmp_path / "arrow"), format).to_pydict() == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("obj", "format", "told"),
    [
        (pd.DataFrame({"a": [1, "x"]}), "parquet", "can't be written"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "csv", "Duplicate column names"),
        (pd.DataFrame({"a": [b"x"]}), "json", "bytes can't be written as JSON"),
        ([1], "csv", "A list can't be published"),
        (None, "csv", "A NoneType can't be published"),
        (Path("nowhere"), "csv", "The job returned the path nowhere, which doesn't exist"),
    ],
)
def test_data_that_cant_be_written_is_refused_with_the_reason(
    obj: Any, format: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises((WrongUse, ValueError), match=told):
        folders.write(obj, str(tmp_path), format)


def test_bytes_and_existing_files_are_published_unchanged(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "part-7.csv").write_text("a\n1\n")
    (tmp_path / "made" / "_SUCCESS").touch()
    for name in ("bytes", "file", "folder"):
        (tmp_path / name).mkdir()

    folders.write(b"\x00\x01", str(tmp_path / "bytes"), "parquet")
    folders.write(tmp_path / "made" / "part-7.csv", str(tmp_path / "file"), "csv")
    folders.write(tmp_path / "made", str(tmp_path / "folder"), "csv")

    assert folders.read_bytes(str(tmp_path / "bytes")) == b"\x00\x01"
    assert folders.read_bytes(str(tmp_path / "file")) == b"a\n1\n"
    assert folders.read_frame(str(tmp_path / "folder"), "csv").to_dict("list") == {"a": [1]}


# --- claims ---

BOTH = pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """SQLite, unless a test runs on both: this module doesn't depend on the dialect."""
    return request.getfixturevalue(f"{getattr(request, 'param', 'sqlite')}_url")


@pytest.fixture
def line(store: Store, tmp_path: Path) -> Store:
    """A job `loadbob` that produces `bobout`, a folder, from `bobin`, whose chunk 1 is READY."""
    add_dataset(store, "bobin", hostname=str(tmp_path))
    add_dataset(store, "bobout", hostname=str(tmp_path / "out"))
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1")
    return store


def claimed(store: Store, dataid: str = "1", owner: str = "worker", job: str = "loadbob") -> Chunk:
    [claim] = take(store, job, owner, only=dataid)
    return open_chunk(store, claim, job_environment(store, store.read_plan(job), secrets=False))


def published(store: Store, chunk: Chunk, obj: Any) -> Result:
    [place] = chunk.outputs.values()
    return publish(store, place, chunk, obj)


def loaded(store: Store, datasetid: str, dataid: str, kind: str = "pandas") -> Any:
    return read_chunk(
        store,
        datasetid,
        dataid,
        lambda found: read(found, found.target("parquet"), kind),
        format="parquet",
    )[0]


@BOTH
def test_a_published_chunk_is_read_back_once_it_is_ready(line: Store, tmp_path: Path) -> None:
    chunk = claimed(line)

    result = published(line, chunk, FRAME)

    assert result.rows == 3
    assert result.location == str(tmp_path / "out" / "dataid=1")
    with pytest.raises(Refused, match="'bobout' is being produced by 'loadbob'"):
        loaded(line, "bobout", "1")
    line.finish(chunk.claim)
    assert_frame_equal(loaded(line, "bobout", "1"), FRAME)
    assert loaded(line, "bobout", "1", "arrow").num_rows == 3
    assert loaded(line, "bobout", "1", "path") == result.location


@BOTH
def test_a_zombie_publishes_nothing_before_or_after_its_successor(line: Store) -> None:
    zombie = claimed(line)
    expire(line, zombie.claim)
    line.recover()

    with pytest.raises(StaleClaim):
        published(line, zombie, FRAME)
    heir = claimed(line, owner="heir")
    published(line, heir, FRAME.head(1))
    line.finish(heir.claim)
    with pytest.raises(StaleClaim):
        published(line, zombie, FRAME)

    assert len(loaded(line, "bobout", "1")) == 1


def test_a_folder_of_older_tables_is_refused_with_the_way_out(line: Store, tmp_path: Path) -> None:
    folders.put(str(tmp_path / "out"), "1", 10**9, filled("x"), confirm=nothing)

    with pytest.raises(
        ChunkFailed, match=r"If the tables were created again since, remove _odf.json"
    ):
        published(line, claimed(line), FRAME)


@BOTH
def test_a_read_overtaken_by_a_publish_is_repeated(line: Store) -> None:
    first = claimed(line)
    published(line, first, FRAME)
    line.finish(first.claim)
    reads = 0

    def slow(found: Any) -> Any:
        nonlocal reads
        reads += 1
        data = read(found, found.target("parquet"))
        if reads == 1:
            sql(line, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
            again = claimed(line)
            published(line, again, FRAME.head(1))
            line.finish(again.claim)
        return data

    data, found = read_chunk(line, "bobout", "1", slow, format="parquet")

    assert (len(data), reads) == (1, 2)
    assert found.generation != first.generation


def test_published_but_not_settled_isnt_read(line: Store, tmp_path: Path) -> None:
    first = claimed(line)
    published(line, first, FRAME)
    line.finish(first.claim)
    folders.put(str(tmp_path / "out"), "1", 10**9, filled("x"), confirm=nothing)

    with pytest.raises(Refused, match=r"published but not settled. Run: odf re"):
        loaded(line, "bobout", "1")


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ("update datastatus set status = 'FAILED'", "DATA_NOT_READY", "'bobin' is FAILED"),
        ("delete from datastatus", "DATA_NOT_READY", "'bobin' isn't there yet"),
        ("update dataset set hostname = '/nowhere'", "INVALID_LOCATION", "/nowhere, which doesn't"),
        ("update dataset set hostname = null", "INVALID_LOCATION", "without a place"),
        ("update dataset set hostname = 'ftp://x'", "INVALID_LOCATION", "no folder that can be"),
        ("update dataset set format = 'pickle'", "INVALID_LOCATION", "'pickle', which isn't read"),
        ("delete from dataset", "NOT_REGISTERED", "dataset 'bobin' isn't registered"),
        (
            "update dataset set hostname = '/tmp'",
            "INVALID_LOCATION",
            "chunk '1' has no data in /tmp",
        ),
    ],
)
def test_a_chunk_that_shouldnt_be_read_says_why_and_what_to_run(
    line: Store, change: str, code: str, told: str, tmp_path: Path
) -> None:
    sql(line, change)

    with pytest.raises(Refused, match=told) as refused:
        loaded(line, "bobin", "1")

    assert "Run: odf " in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.code == code


def test_a_chunk_without_its_files_isnt_read_as_empty(line: Store, tmp_path: Path) -> None:
    chunk = claimed(line)
    told = published(line, chunk, FRAME)
    line.finish(chunk.claim, [Fact("bobout", "1", told.location)])
    for each in Path(told.location or "").glob("part-*"):
        each.unlink()

    with pytest.raises(Refused, match=r"the files of chunk '1' are gone from .* odf resubmit loa"):
        loaded(line, "bobout", "1")


@BOTH
def test_a_chunk_that_didnt_pass_its_checks_isnt_read(line: Store, tmp_path: Path) -> None:
    chunk = claimed(line)
    told = published(line, chunk, FRAME)
    line.finish(chunk.claim, [Fact("bobout", "1", told.location, validated=False, checks="nulls")])

    with pytest.raises(Refused, match=r"nulls\. Run: odf resubmit loadbob 1"):
        loaded(line, "bobout", "1")
    answers = {each.question: each.ok for each in ask(line, "bobout", "1", "parquet").answers}
    assert answers["validated"] is False
    assert answers["ready"] is True


@pytest.mark.parametrize("name", ["1.csv", "1", "dataid=1/part-0.csv"])
def test_the_output_of_a_script_is_found_by_its_name(
    line: Store, name: str, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a,b\n1,x\n")
    add_dataset(line, "bobin", format="csv")

    assert loaded(line, "bobin", "1").to_dict("list") == {"a": [1], "b": ["x"]}


# --- tables ---


@pytest.fixture(params=["sqlite", "postgres"])
def table(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Store, Callable[..., list[tuple]]]]:
    """A job that produces `orders`, a table of either kind split by `day`; and SQL on it."""
    store = open_store(f"sqlite:///{tmp_path / 'odf.db'}")
    store.init()
    if request.param == "sqlite":
        path = tmp_path / 'my "data".db'
        connection: Any = sqlite3.connect(path, isolation_level=None)
        add_dataset(store, "orders", database=str(path), tablename='or"de%rs', chunkcolumn="d%ay")
    else:
        url = request.getfixturevalue("postgres_url")
        connection = psycopg.connect(url, autocommit=True)
        info = connection.info
        add_dataset(
            store,
            "orders",
            hostname=f"{info.host}:{info.port}",
            database=info.dbname,
            schemaname="public",
            username=info.user,
            tablename='or"de%rs',
            chunkcolumn="d%ay",
        )
    register(store, "sell", [], ["orders"])
    for dataid in ("1", "2"):
        put(store, "orders", dataid, "PENDING", jobid="sell")
    connection.execute(
        'create table "or""de%rs" ("d%ay" varchar(10), amount numeric, at timestamp, note text)'
    )
    connection.execute(
        """insert into "or""de%rs" values ('1', 9, null, 'old'), ('0', 8, null, 'o')"""
    )
    yield store, lambda text: connection.execute(text).fetchall()
    connection.close()
    close(store)


NOTES = """select "d%ay", note from "or""de%rs" order by 1, 2"""

ORDERS = pd.DataFrame(
    {"amount": [Decimal("1.5"), 2], "at": pd.to_datetime(["2026-01-01", None]), "note": ["'", None]}
)


def test_a_chunk_of_a_table_is_replaced_alone_and_read_by_its_column(table: Any) -> None:
    store, run = table

    for _ in range(2):
        chunk = claimed(store, job="sell")
        result = published(store, chunk, ORDERS)
        store.finish(chunk.claim)
        sql(store, "update datastatus set status = 'RESUBMIT' where dataid = '1'")
    sql(store, "update datastatus set status = 'READY' where dataid = '1'")

    assert result.rows == 2
    assert 'or"de%rs' in (result.location or "")
    assert sorted(run(NOTES), key=str) == [("0", "o"), ("1", "'"), ("1", None)]
    frame = loaded(store, "orders", "1")
    assert list(frame.columns) == ["d%ay", "amount", "at", "note"]
    assert sorted(map(float, frame["amount"])) == [1.5, 2.0]
    assert loaded(store, "orders", "1", "arrow").num_rows == 2


def test_rows_of_another_chunk_and_a_stale_claim_change_no_table(table: Any) -> None:
    store, run = table
    before = run(NOTES)
    chunk = claimed(store, job="sell")

    with pytest.raises(ChunkFailed, match=r"NOT_VALIDATED: Only 1 of 2 rows .* have a 'd%ay'"):
        published(store, chunk, ORDERS.assign(**{"d%ay": ["1", "2"]}))
    expire(store, chunk.claim)
    store.recover()
    with pytest.raises(StaleClaim):
        published(store, chunk, ORDERS)

    assert run(NOTES) == before


@pytest.mark.parametrize("way", ["number", "shards"])
def test_a_chunk_of_a_split_table_is_the_rows_in_its_bounds(table: Any, way: str) -> None:
    store, run = table
    add_dataset(store, "numbers", **_place_like(store, "orders"), tablename="numbers")
    _execute(run, "create table numbers (id integer, note text)")
    _execute(run, "insert into numbers values (1, 'a'), (5, 'b'), (6, 'c'), (12, 'd')")
    register(store, "count", [], ["numbers"])
    chunks = by_number(0, 20, size=10) if way == "number" else by_shards(2)
    split(store, "numbers", chunks, column="id", pending=True, jobid="count")
    dataid, mine, left = ("0", [2, 3], [12]) if way == "number" else ("1", [3, 7], [6, 12])
    frame = pd.DataFrame({"id": mine, "note": "new"})

    with pytest.raises(ChunkFailed, match="have no column 'id'"):
        published(store, claimed(store, dataid, "first", "count"), frame[["note"]])
    expire(store)
    store.recover()
    chunk = claimed(store, dataid, job="count")
    published(store, chunk, frame)
    store.finish(chunk.claim)

    assert run("select id from numbers order by id") == [(each,) for each in sorted(mine + left)]
    assert sorted(loaded(store, "numbers", dataid)["id"]) == mine


def test_every_number_is_in_one_shard_negative_ones_too(table: Any) -> None:
    store, run = table
    add_dataset(store, "numbers", **_place_like(store, "orders"), tablename="numbers")
    _execute(run, "create table numbers (id smallint, note text)")
    numbers = [-32768, -20001, -7, -3, -1, 0, 1, 2, 7, 32767]
    _execute(run, f"insert into numbers (id) values {', '.join(f'({each})' for each in numbers)}")
    register(store, "count", [], ["numbers"])
    split(store, "numbers", by_shards(20_000), column="id", pending=True, jobid="count")

    chunk = claimed(store, "19999", job="count")
    published(store, chunk, pd.DataFrame({"id": [-20001, -1, 19999], "note": "new"}))
    store.finish(chunk.claim)

    now = sorted([*numbers, 19999])
    assert run("select id from numbers order by id") == [(each,) for each in now]
    assert sorted(loaded(store, "numbers", "19999")["id"]) == [-20001, -1, 19999]


def test_two_publishes_of_a_new_chunk_of_a_table_dont_double_it(table: Any) -> None:
    from opendataflow_dagster.storage.table import Rows

    store, run = table
    target = ask(store, "orders", "1", "").target("")
    assert isinstance(target, Table)
    threads: list[Thread] = []

    def second() -> None:
        """Begin another publish while the first one's rows are written but not committed."""
        threads.append(Thread(target=lambda: Rows(target, "new").replace(ORDERS, nothing)))
        threads[0].start()
        time.sleep(0.2)

    Rows(target, "new").replace(ORDERS, second)
    threads[0].join()

    assert len(run("""select * from "or""de%rs" where "d%ay" = 'new'""")) == 2


def test_a_table_that_isnt_there_or_a_database_that_is_away_says_so_without_a_secret(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = table
    monkeypatch.setenv("PASSKEY", "a key for tests")
    add_dataset(store, "orders", tablename="nothing", password="tr0ub4dor")
    sql(store, "update datastatus set status = 'READY' where dataid = '2'")

    with pytest.raises(DataflowError, match=r"/nothing|\.nothing") as missing:
        loaded(store, "orders", "2")
    with pytest.raises(ChunkFailed, match="nothing"):
        published(store, claimed(store, job="sell"), ORDERS)
    add_dataset(store, "orders", hostname="127.0.0.1:1", database="none", format="postgresql")
    with pytest.raises(Refused, match=r"which can't be opened.*Run: odf dataset list") as away:
        loaded(store, "orders", "2")

    assert away.value.code == "INVALID_LOCATION"
    assert "tr0ub4dor" not in f"{missing.value}{away.value}"


def test_the_tables_of_odf_themselves_are_no_place_for_data(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    store.init()
    path = sqlite_url.removeprefix("sqlite:///")
    add_dataset(store, "x", database=path, tablename="mine", chunkcolumn="day")
    register(store, "j", [], ["x"])
    put(store, "x", "1", "PENDING", jobid="j")
    sql(store, "create table mine (day text)")

    with pytest.raises(ChunkFailed, match=r"INVALID_LOCATION: .* Put the data into another file"):
        published(store, claimed(store, job="j"), pd.DataFrame({"day": ["1"]}))
    close(store)


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"hostname": "/a"}, Folder),
        ({"hostname": "file:///a", "format": "csv"}, Folder),
        ({"database": "/a", "tablename": "t"}, Folder),
        ({"database": "/a/x.db", "tablename": "t"}, "sqlite"),
        ({"database": "/a/x", "tablename": "t", "format": "sqlite"}, "sqlite"),
        ({"hostname": "sqlite:///x.db", "tablename": "t"}, "sqlite"),
        ({"hostname": "h:5433", "database": "d", "tablename": "t"}, "postgres"),
        ({"database": "d", "tablename": "t"}, "postgres"),
        ({"hostname": "postgresql://h", "database": "d", "tablename": "t"}, "postgres"),
    ],
)
def test_the_place_decides_the_kind_of_storage(columns: dict[str, str], kind: Any) -> None:
    target = chunk_place("x", {**columns, "chunkcolumn": "day"})

    assert isinstance(target, Folder) if kind is Folder else target.dialect == kind  # type: ignore[union-attr]


def _place_like(store: Store, datasetid: str) -> dict[str, Any]:
    [row] = store.db.records("state.dataset", datasetid=datasetid)
    return {name: row[name] for name in ("hostname", "database", "username")}


def _execute(run: Callable[..., Any], text: str) -> None:
    with suppress(psycopg.ProgrammingError):  # it has no rows to fetch
        run(text)


# --- functions that return their value ---


def test_a_functions_result_is_published_after_its_checks(line: Store, tmp_path: Path) -> None:
    from opendataflow_dagster.model import READY
    from opendataflow_dagster.runner.heartbeat import Pulse
    from opendataflow_dagster.runner.produce import Checked, produce
    from opendataflow_dagster.storage.chunks import publishing

    def made(obj: Any, passed: bool = True) -> Any:
        compute, publish = publishing(line, lambda chunk: obj)
        [claim] = take(line, "loadbob", only="1")
        environment = job_environment(line, line.read_plan("loadbob"), secrets=False)
        with Pulse(line, claim.owner) as pulse:
            produced = produce(
                line,
                claim,
                environment,
                compute,
                publish=publish,
                pulse=pulse,
                checks=[lambda chunk: Checked("seen", "bobout", passed)],
            )
        sql(line, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
        return produced

    assert "NOT_VALIDATED" in made(FRAME, passed=False).reason
    assert not (tmp_path / "out").exists()
    assert made(FRAME).facts[0].rows == 3
    assert made({"bobout": FRAME.head(1)}).facts[0].rows == 1
    assert made(Result(7)).facts[0].rows == 7
    assert made(None).status == READY
    assert "A list can't be published" in made([1]).reason
    assert "a dict for 'other'" in made({"other": FRAME}).reason


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.symlink_to("/nowhere/volume"), "is a link to /nowhere/volume, which"),
        (lambda path: path.write_text("x"), "root is a file"),
        (lambda path: path.symlink_to("/proc"), "Can't create "),
    ],
)
def test_a_folder_that_cannot_be_created_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], Any], told: str
) -> None:
    make(tmp_path / "root")
    start = time.monotonic()
    with pytest.raises(Refused) as caught:
        folders.put(f"{tmp_path}/root/nope", "1", 1, filled("x"), confirm=nothing)

    assert caught.value.code == "INVALID_LOCATION"
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5


def test_a_password_in_a_url_is_not_shown() -> None:
    columns = {"tablename": "t", "chunkcolumn": "c"}
    for host in ("jdbc:postgresql://h/d?user=u&password=hunter2", "jdbc:oracle:thin:u/hunter2@h/x"):
        found = chunk_place("sales", {"hostname": host, **columns})
        assert isinstance(found, Table)
        assert "hunter2" not in found.location
        assert found.location.endswith("/t")
        assert found.host == host
    with pytest.raises(Refused, match="--username USER --password") as caught:
        chunk_place("sales", {"hostname": "postgresql://u:hunter2@h", "database": "d", **columns})
    assert "hunter2" not in str(caught.value)
