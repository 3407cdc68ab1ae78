"""`odf compact`: fewer files, the same chunks; killed anywhere, a rerun converges."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.formats import CSV, FORMATS, format_of, parquet_format
from opendataflow_dagster.formats.parquet_format import Parquet, same
from opendataflow_dagster.location import is_packed
from opendataflow_dagster.model import Claim, Fact
from opendataflow_dagster.storage import cleanup, presence
from opendataflow_dagster.storage import compact as compacting
from opendataflow_dagster.storage import compact as packs
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage.compact import compact
from opendataflow_dagster.store import open_store, operations, overview
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import register, sql, take

ODD = ["1", "2", "10", "a/b", "a b", "a%2Fb", "日本", "x#y", '"']


@pytest.fixture
def line(store: Store, tmp_path: Path) -> Store:
    """A job `load` that produces `out`, a folder of Parquet, from `src`; `use` reads `out`."""
    register(store, "load", ["src"], ["out"])
    register(store, "use", ["out"], ["end"])
    add_dataset(store, "out", hostname=str(tmp_path / "out"))
    operations.ready(store, "src", ODD)
    return store


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "LINGER", 0.05)


def url_of(store: Store) -> str:
    return store.db.url if store.db.dialect == "postgres" else f"sqlite:///{store.db.path}"  # type: ignore[attr-defined]


def odf(store: Store, *words: str) -> Result:
    env = {"DATAFLOW_URL": url_of(store)}
    return CliRunner().invoke(app, list(words), prog_name="odf", env=env)


def table(number: int, rows: int = 10) -> pa.Table:
    """Rows that each name their chunk, so that a mixture shows."""
    return pa.table(
        {
            "n": pa.array([number] * rows, pa.int64()),
            "x": pa.array([float("nan"), None, -0.0] + [1.5] * (rows - 3), pa.float64()),
            "t": pa.array([None, "é"] * (rows // 2), pa.string()),
            "d": pa.array([Decimal("1.25")] * rows, pa.decimal128(9, 2)),
            "l": pa.array([[1, None], []] * (rows // 2), pa.list_(pa.int64())),
            "m": pa.array([[("k", 1.0)], None] * (rows // 2), pa.map_(pa.string(), pa.float64())),
            "w": pa.array([1] * rows, pa.timestamp("us", "UTC")),
        }
    )


def made(store: Store, dataid: str, *tables: pa.Table, **note: Any) -> Claim:
    """A READY chunk of several files."""
    [claim] = take(store, "load", only=dataid)
    root = Path.cwd() / "out"

    def write(folder: str) -> dict[str, Any]:
        for number, each in enumerate(tables):
            name = f"part-{number:05d}-{os.urandom(4).hex()}.parquet"
            pq.write_table(each, os.path.join(folder, name))
        rows = sum(each.num_rows for each in tables)
        return {"jobid": "load", "format": "parquet", "rows": rows, "bytes": 1, **note}

    path = folders.put(str(root), dataid, claim.generation, write, confirm=lambda: None)
    store.finish(claim, [Fact("out", dataid, path, note.get("rows"), 1)])
    return claim


def content(store: Store, dataid: str) -> pa.Table:
    """Read a chunk as the tables say."""
    [(location,)] = sql(
        store,
        "select f.location from chunkfact f join datastatus s on s.datasetid = f.datasetid "
        "and s.dataid = f.dataid and s.generation = f.generation where s.datasetid = 'out' "
        "and s.dataid = :d and s.locktype = 'OUT' and s.status = 'READY'",
        d=dataid,
    )
    if is_packed(location):
        return packs.read_packed(location)
    before = os.stat(location).st_ino
    tables = [pq.ParquetFile(each).read() for each in folders.data_files(location)]
    if os.stat(location).st_ino != before or not tables:
        raise FileNotFoundError(location)
    return pa.concat_tables(tables)


def whole(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks()


def data_of(path: str) -> list[str]:
    return folders.data_files(path)


# --- many files of a chunk ---


def test_a_chunk_of_many_files_becomes_one_and_stays_the_chunk(line: Store) -> None:
    for dataid in ODD:
        made(line, dataid, *[table(n) for n in range(7)])
    before = {each: content(line, each) for each in ODD}
    path = folders.chunk_path(str(Path.cwd() / "out"), "1")
    note = folders.read_note(path)

    done = odf(line, "compact", "out", "--json")

    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["dataid"] for row in rows][:3] == ["1", "2", "10"] or len(rows) == len(ODD)
    assert {(row["files_before"], row["files_after"], row["left"]) for row in rows} == {(7, 1, "")}
    for dataid in ODD:
        assert same(content(line, dataid).combine_chunks(), before[dataid].combine_chunks())
    [one] = data_of(path)
    size = os.path.getsize(one)
    assert folders.read_note(path) == {**note, "bytes": size, "store": line.id}
    [(size,)] = sql(line, "select bytes from chunkfact where datasetid = 'out' and dataid = '1'")
    assert size == os.path.getsize(one)
    assert "_staging" not in os.listdir("out")
    assert list(compact(line, "out")) == []


def test_files_reach_the_target_and_no_more(line: Store) -> None:
    noise = pa.table({"n": pa.array(range(200_000), pa.int64())})
    made(line, "1", *[noise.slice(at, 20_000) for at in range(0, 200_000, 20_000)])
    paths = data_of("out/dataid=1")
    size = sum(map(os.path.getsize, paths))

    [done] = compact(line, "out", target=10**9)
    assert done.files_after == 1
    assert content(line, "1").column("n").to_pylist() == list(range(200_000))
    assert done.bytes_before == size


def test_rows_keep_their_order_in_however_many_files(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_format, "_ROW_GROUP_BYTES", 50_000)
    noise = pa.table({"n": pa.array(range(400_000), pa.int64())})
    made(line, "1", *[noise.slice(at, 10_000) for at in range(0, 400_000, 10_000)])
    size = sum(map(os.path.getsize, data_of("out/dataid=1")))

    [done] = compact(line, "out", target=size // 12)

    assert done.files_after > 8
    assert content(line, "1").column("n").to_pylist() == list(range(400_000))


def test_lines_keep_their_order_in_however_many_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.csv" for number in range(12)]
    for number, each in enumerate(paths):
        each.write_text(f"n\n{number}\n")
    (tmp_path / "out").mkdir()

    CSV.merge(list(map(str, paths)), str(tmp_path / "out"), 1)

    written = data_of(str(tmp_path / "out"))
    assert [Path(each).read_text() for each in written] == [f"n\n{n}\n" for n in range(12)]


def test_a_plan_changes_nothing(line: Store) -> None:
    made(line, "1", table(1), table(1))
    before = {each: os.stat(each) for each in data_of("out/dataid=1")}

    [row] = json.loads(odf(line, "compact", "out", "--plan", "--json").stdout)

    assert (row["files_before"], row["files_after"], row["bytes_after"]) == (2, 1, None)
    assert {each: os.stat(each) for each in data_of("out/dataid=1")} == before
    assert json.loads(odf(line, "compact", "out", "--plan", "--unpack", "--json").stdout) == []
    assert os.listdir("out") == ["dataid=1"]


def test_a_plan_looks_at_the_chunks_of_a_large_dataset_that_changed_last(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "MANY", 2)
    monkeypatch.setattr(presence, "NEWEST", 2)
    for number, dataid in enumerate(["1", "2", "10"]):
        made(line, dataid, table(number), table(number))
        time.sleep(0.01)

    quick = odf(line, "compact", "out", "--plan", "--json")
    assert [row["dataid"] for row in json.loads(quick.stdout)] == ["2", "10"]
    assert "only the 2 chunks that changed last are looked at: --all" in quick.stderr
    for whole in (["--plan", "--all"], ["--plan", "1", "2", "10"], []):
        done = odf(line, "compact", "out", *whole)
        assert "3 chunks" in done.stderr, whole
    assert "0 chunks" in odf(line, "compact", "out", "--plan").stderr


def test_chunks_are_looked_at_some_at_a_time(line: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "PAGE_CHUNKS", 2)
    asked = []
    some = compacting.standing

    def counted(store: Store, datasetid: str, dataids: list[str]) -> dict:
        asked.append(len(dataids))
        return some(store, datasetid, dataids)

    monkeypatch.setattr(compacting, "standing", counted)
    for number, dataid in enumerate(["1", "2", "10"]):
        made(line, dataid, table(number), table(number))

    assert sorted(each.dataid for each in compact(line, "out", plan=True)) == ["1", "10", "2"]
    assert asked == [2, 1]


def test_claimed_chunks_are_left_alone(line: Store) -> None:
    for dataid in ("1", "2", "10"):
        made(line, dataid, table(1), table(1))
    [reading] = take(line, "use", only="1")
    operations.resubmit(line, "load", ["2"])

    done = {row.dataid: row for row in compact(line, "out", ["1", "2", "10"])}

    assert done["1"].left == done["2"].left == "it isn't READY, or it is claimed"
    assert done["10"].left == ""
    assert [len(data_of(f"out/dataid={each}")) for each in ("1", "2", "10")] == [2, 2, 1]
    line.finish(reading)
    assert [row.dataid for row in compact(line, "out")] == ["1"]


def test_a_chunk_claimed_while_it_is_rewritten_stays_unchanged(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(line, "1", table(1), table(1))
    plain = Parquet.merge
    other = open_store(url_of(line))

    def slow(*args: Any) -> None:
        plain(*args)
        take(other, "use", only="1")

    monkeypatch.setattr(Parquet, "merge", slow)
    [row] = compact(line, "out")

    assert row.left == "it was claimed or replaced meanwhile"
    assert len(data_of("out/dataid=1")) == 2
    assert os.listdir("out") == ["dataid=1"]
    other.close()


def test_a_newer_chunk_isnt_replaced_by_the_old_rows(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(line, "1", table(1), table(1))
    plain = Parquet.merge

    def slow(*args: Any) -> None:
        plain(*args)
        operations.resubmit(line, "load", ["1"])
        made(line, "1", table(2))

    monkeypatch.setattr(Parquet, "merge", slow)
    [row] = compact(line, "out")

    assert row.left
    assert set(content(line, "1").column("n").to_pylist()) == {2}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("other types", "different columns or types"),
        ("folder", "it has subfolders"),
        ("other file", "doesn't end in .parquet"),
        ("broken", "Parquet magic bytes not found"),
    ],
)
def test_chunks_that_cant_be_rewritten_are_left_with_the_reason(
    line: Store, what: str, why: str
) -> None:
    made(line, "1", table(1), table(1), *([pa.table({"z": [1]})] if what == "other types" else []))
    if what == "folder":
        os.mkdir("out/dataid=1/x=1")
        shutil.copy(data_of("out/dataid=1")[0], "out/dataid=1/x=1/part.parquet")
    if what == "broken":
        Path(data_of("out/dataid=1")[1]).write_text("no Parquet at all")
    if what == "other file":
        Path("out/dataid=1/readme.txt").write_text("x")
    before = data_of("out/dataid=1")

    done = odf(line, "compact", "out")

    assert why in done.stdout
    assert "0 chunks compacted, 1 skipped." in done.stderr
    assert data_of("out/dataid=1") == before


@pytest.mark.parametrize("format", [each.name for each in FORMATS if each.can_merge])
def test_files_of_each_format_are_joined(store: Store, tmp_path: Path, format: str) -> None:
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", hostname=str(tmp_path / "out"), format=format)
    operations.ready(store, "src", ["1"])
    [claim] = take(store, "load", only="1")
    frame = pd.DataFrame({"a\nb": ["x", 'q"\n', ""], "n": [1, 2, 3]})

    def write(folder: str) -> dict[str, Any]:
        told = [folders.write(frame, folder, format) for _ in range(3)]
        if format_of(format).is_text:
            Path(folder, f"part-z.{format}").touch()
        return {**told[0], "rows": 9}

    path = folders.put(str(tmp_path / "out"), "1", claim.generation, write, confirm=lambda: None)
    store.finish(claim, [Fact("out", "1", path, 9)])
    columns = folders.read_note(path)["columns"]
    before = folders.read_frame(path, format, columns)

    [done] = compact(store, "out")

    empty = int(format_of(format).is_text)
    assert (done.files_before, done.files_after, done.left) == (3 + empty, 1, "")
    pd.testing.assert_frame_equal(folders.read_frame(path, format, columns), before)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"hostname": "s3a://b/p"}, "run its chunks again"),
        ({"hostname": "/x", "format": "orc"}, "only parquet, csv, json can be rewritten"),
        ({"hostname": "h", "database": "d", "tablename": "t", "chunkcolumn": "c"}, "is a table"),
    ],
)
def test_places_that_arent_folders_of_files_are_refused(
    line: Store, columns: dict[str, str], why: str
) -> None:
    add_dataset(line, "other", **columns)
    done = odf(line, "compact", "other")
    assert done.exit_code == 4
    assert why in done.stderr


def test_sizes_are_parsed_or_refused(line: Store) -> None:
    assert odf(line, "compact", "out", "--target-size", "many").exit_code == 2
    assert odf(line, "compact", "out", "--target-size", "0MB").exit_code == 2
    assert odf(line, "compact", "out", "--target-size", "1 GiB").exit_code == 0


def test_a_folder_that_nothing_can_be_written_to_says_so(line: Store) -> None:
    made(line, "1", table(1), table(2))
    Path("out/_packs").touch()
    done = odf(line, "compact", "out")
    assert done.exit_code != 0
    assert "Can't create" in done.stderr
    assert len(data_of("out/dataid=1")) == 2


def test_of_two_compactions_one_is_refused(line: Store) -> None:
    for dataid in ("1", "2"):
        made(line, dataid, table(1), table(2))
    going = compact(line, "out")
    next(going)
    for more in ((), ("--unpack",)):
        done = odf(line, "compact", "out", *more)
        assert done.exit_code == 4
        assert "Another process is compacting" in done.stderr
    list(going)
    assert sorted(os.listdir("out")) == ["dataid=1", "dataid=2"]


# --- kills ---

KILLED = """
import os, signal, sys
from opendataflow_dagster.storage import compact as compacting
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.formats.parquet_format import Parquet
from opendataflow_dagster.store import open_store

def die(*more): os.kill(os.getpid(), signal.SIGKILL)

def after(module, name, ready=lambda *args: True):
    plain = getattr(module, name)
    def worked(*args, **more):
        found = plain(*args, **more)
        if ready(*args): die()
        return found
    setattr(module, name, worked)

def before(module, name):
    setattr(module, name, die)

store = open_store({url!r})
point = {point!r}
if point == "read": before(Parquet, "merge")
if point == "written": after(Parquet, "merge")
if point == "confirmed": before(folders, "_swap")
if point == "swapped": after(folders, "_swap")
print(list(compacting.compact(store, "out")))
"""
COMPACTING = ["read", "written", "confirmed", "swapped"]


@pytest.mark.parametrize("point", COMPACTING)
def test_killed_anywhere_a_rerun_converges_and_nothing_is_left(line: Store, point: str) -> None:
    ids = ["1", "2", "a/b"]
    for number, dataid in enumerate(ids):
        made(line, dataid, table(number), table(number))
    before = {each: content(line, each).combine_chunks() for each in ids}
    code = KILLED.format(url=url_of(line), point=point)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    for dataid in ids:
        assert same(content(line, dataid).combine_chunks(), before[dataid])
    list(compact(line, "out"))
    assert len([each for each in os.listdir("out") if each[0] != "_"]) == 3
    for dataid in ids:
        assert same(content(line, dataid).combine_chunks(), before[dataid])
    root = str(Path.cwd() / "out")
    for _, remove in list(cleanup.in_folder(line, "out", root, 0)):
        remove()
    assert list(cleanup.in_folder(line, "out", root, 0)) == []
    for dataid in ids:
        assert same(content(line, dataid).combine_chunks(), before[dataid])
    assert sorted(os.listdir("out")) == sorted(map(folders.directory, ids))
    assert {len(data_of(f"out/{folders.directory(each)}")) for each in ids} == {1}


def test_a_reader_in_a_loop_sees_the_chunk_whole(line: Store) -> None:
    ids = ["1", "2", "10"]
    for number, dataid in enumerate(ids):
        made(line, dataid, *[table(number) for _ in range(6)])
    reader = open_store(url_of(line))
    seen: list[tuple[int, set[int]]] = []
    missing, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            for number, dataid in enumerate(ids):
                try:
                    found = content(reader, dataid)
                except (FileNotFoundError, ValueError) as error:  # replaced: it asks again
                    missing.append(error)
                    continue
                seen.append((found.num_rows, set(found.column("n").to_pylist()) - {number}))
        reader.close()
        vars(reader).pop("person").close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(5):
            assert {row.left for row in compact(line, "out")} == {""}
            for number, dataid in enumerate(ids):
                operations.resubmit(line, "load", [dataid])
                made(line, dataid, *[table(number) for _ in range(6)])
    finally:
        over.set()
        thread.join()
    assert {rows for rows, _ in seen} == {60}
    assert {each for _, odd in seen for each in odd} == set()
    assert len(seen) > 10
