"""Places × promises: what every place of data keeps, and with which reason one can't.

A new place is one class below and one line in `PLACES`; a new format is there by itself. `CANNOT`
has the marks; the table in docs/storage.md is made of them, and a test compares.
"""

import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psycopg
import pytest

from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.formats import FILE_FORMATS
from opendataflow_dagster.location import DEFAULT_FORMAT, ObjectStore, Table, address, chunk_place
from opendataflow_dagster.model import Claim, Fact
from opendataflow_dagster.pipelines import csv_file
from opendataflow_dagster.spark.object_store import StagedRemote, in_remote
from opendataflow_dagster.storage import cleanup, folder
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage.chunks import publish_to_folder
from opendataflow_dagster.storage.presence import look_at, misplaced
from opendataflow_dagster.storage.table import Rows
from opendataflow_dagster.store import open_store, operations
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import close, register, take

ROWS = 500
Confirm = Callable[[], None]


def frame_of(number: int, dataid: str = "1") -> pd.DataFrame:
    """Rows that each have the number, so that a mixture shows."""
    return pd.DataFrame(
        {"chunk": [dataid] * ROWS, "n": [number] * ROWS, "text": [f"é, {number}"] * ROWS}
    )


class FolderPlace:
    """A folder of files of one format."""

    def __init__(
        self, request: pytest.FixtureRequest, root: Path, format: str = DEFAULT_FORMAT
    ) -> None:
        self.format = format
        self.columns = {"hostname": str(root / "out"), "format": format}

    @property
    def place(self) -> Any:
        return chunk_place("out", self.columns)

    def publish(self, store: Store, claim: Claim, frame: pd.DataFrame, confirm: Confirm) -> str:
        return str(publish_to_folder(self.place, claim, frame, confirm, store.id).location)

    def read(self, store: Store, dataid: str = "1") -> pd.DataFrame:
        path = folders.chunk_path(self.place.root, dataid)
        return folder.read_frame(path, self.format, folders.read_note(path).get("columns"))

    def lose(self, store: Store) -> None:
        folders.remove(folders.chunk_path(self.place.root, "1"))

    def add_stranger(self) -> None:
        os.mkdir(os.path.join(self.place.root, "dataid=stranger"))

    def clean(self, store: Store) -> list[str]:
        found = list(cleanup.in_folder(store, "out", self.place.root, 0))
        return [row.what for row, remove in found if remove()]

    def leftovers(self) -> list[str]:
        found = Path(self.place.root).rglob("*")
        return [str(path) for path in found if path.is_file() and folders.STAGING in path.parts]


class VersionsPlace(FolderPlace):
    """A place without renames: pandas writes what Spark would write into a version."""

    def __init__(self, request: pytest.FixtureRequest, root: Path) -> None:
        self.columns = {"hostname": f"remote+file://{root}/out", "format": "parquet"}

    def publish(self, store: Store, claim: Claim, frame: pd.DataFrame, confirm: Confirm) -> str:
        assert isinstance(self.place, ObjectStore)
        staged = StagedRemote(None, self.place, claim.dataid, claim.generation)
        path = staged.path.removeprefix("file://")
        os.makedirs(path)
        staged.tell(folder.write(frame, path, "parquet"))
        location = staged.show(confirm)
        staged.discard()
        return location

    def read(self, store: Store, dataid: str = "1") -> pd.DataFrame:
        chunk = Path(address(self.place.root).removeprefix("file://")) / folders.directory(dataid)
        pointer = json.loads((chunk / "_odf.json").read_text())
        return folder.read_frame(str(chunk / pointer["version"]), "parquet")

    def clean(self, store: Store) -> list[str]:
        found = list(in_remote(store, self.place, lambda: None, 0))
        return [row.what for row, remove in found if remove()]

    def leftovers(self) -> list[str]:
        root = Path(address(self.place.root).removeprefix("file://"))
        pointed = "".join(path.read_text() for path in root.rglob("_odf.json"))
        return [path.name for path in root.glob("dataid=*/v=*") if path.name not in pointed]


class SqliteTable:
    """A table in a file of SQLite."""

    def __init__(self, request: pytest.FixtureRequest, root: Path) -> None:
        self.columns = {
            "database": str(root / "data.db"),
            "tablename": "t",
            "chunkcolumn": "chunk",
        }
        self.execute("create table t (chunk varchar(20), n integer, text varchar(20))")

    @property
    def table(self) -> Table:
        found = chunk_place("out", self.columns)
        assert isinstance(found, Table)
        return found

    def execute(self, text: str) -> None:
        with closing(sqlite3.connect(self.columns["database"], isolation_level=None)) as data:
            data.execute(text)

    def publish(self, store: Store, claim: Claim, frame: pd.DataFrame, confirm: Confirm) -> str:
        Rows(self.table, claim.dataid).replace(frame, confirm)
        return self.table.location

    def read(self, store: Store, dataid: str = "1") -> pd.DataFrame:
        return Rows(self.table, dataid).read()

    def lose(self, store: Store) -> None:
        self.execute("delete from t")

    def add_stranger(self) -> None:
        self.execute("insert into t values ('stranger', 1, '')")

    def clean(self, store: Store) -> list[str]:
        return []

    def leftovers(self) -> list[str]:
        return []


class PostgresTable(SqliteTable):
    """A table of PostgreSQL."""

    def __init__(self, request: pytest.FixtureRequest, root: Path) -> None:
        self.url = request.getfixturevalue("postgres_url")
        with psycopg.connect(self.url, autocommit=True) as data:
            info = data.info
            self.columns = {
                "hostname": f"{info.host}:{info.port}",
                "database": info.dbname,
                "schemaname": "public",
                "tablename": "t",
                "chunkcolumn": "chunk",
                "username": info.user,
            }
        self.execute("create table t (chunk varchar(20), n bigint, text varchar(20))")

    def execute(self, text: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as data:
            data.execute(text.encode())


class WholeCsvFile:
    """One CSV file of a pipeline, which each run replaces."""

    def __init__(self, request: pytest.FixtureRequest, root: Path) -> None:
        self.path = str(root / "out.csv")
        self.columns = {"hostname": self.path}

    def publish(self, store: Store, claim: Claim, frame: pd.DataFrame, confirm: Confirm) -> str:
        csv_file.replace(self.path, frame, confirm)
        return self.path

    def read(self, store: Store, dataid: str = "1") -> pd.DataFrame:
        return pd.read_csv(self.path, dtype={"chunk": str})

    def lose(self, store: Store) -> None:
        os.unlink(self.path)

    def add_stranger(self) -> None:
        raise NotImplementedError

    def clean(self, store: Store) -> list[str]:
        return []

    def leftovers(self) -> list[str]:
        return []


PLACES: dict[str, Any] = {
    **{
        f"folder of {format.title}": partial(FolderPlace, format=format.name)
        for format in FILE_FORMATS
    },
    "object store": VersionsPlace,
    "table of PostgreSQL": PostgresTable,
    "table of SQLite": SqliteTable,
    "CSV file": WholeCsvFile,
}

PROMISES = {
    "atomic": "a reader sees the old chunk or the new one",
    "equal": "what is read back equals what was published",
    "listed": "`odf drift` finds data that no chunk stands for",
    "clean": "a crash before the commit shows nothing, and its leftovers are removed",
    "drift": "`odf drift` or `odf why` sees that a chunk's data is gone",
}

_ROWS = "a database lists no chunks, only rows"
CANNOT = {
    ("object store", "listed"): "listing a bucket costs a request per 1,000 objects",
    ("object store", "drift"): "the bucket isn't asked for one chunk",
    ("table of PostgreSQL", "listed"): _ROWS,
    ("table of SQLite", "listed"): _ROWS,
    ("CSV file", "listed"): "it is one chunk: the newest",
}


def cases(promise: str) -> Any:
    """The places that are to keep a promise; one that can't is skipped with its reason."""
    marked = []
    for name in PLACES:
        reason = CANNOT.get((name, promise))
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        marked.append(pytest.param(name, marks=marks, id=name))
    return pytest.mark.parametrize("place", marked, indirect=True)


@pytest.fixture
def store(sqlite_url: str) -> Any:
    """The tables; another suite tests both databases."""
    store = open_store(sqlite_url)
    store.init()
    yield store
    close(store)


@pytest.fixture
def place(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Any:
    """A place, registered as the dataset `out`, which the job `load` produces from `src`."""
    found = PLACES[request.param](request, tmp_path)
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", **found.columns)
    operations.ready(store, "src", ["1", "2"])
    return found


def made(store: Store, place: Any, number: int, dataid: str = "1") -> None:
    """Publish a chunk, and settle it."""
    [claim] = take(store, "load", only=dataid)
    location = place.publish(store, claim, frame_of(number, dataid), lambda: None)
    store.finish(claim, [Fact("out", dataid, location, ROWS)])


@cases("atomic")
def test_a_reader_sees_the_old_chunk_or_the_new_one(store: Store, place: Any) -> None:
    made(store, place, 0)
    seen: list[tuple[int, int]] = []
    odd: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                found = place.read(store)
            except FileNotFoundError:
                continue  # replaced while it was listed: a job asks again
            except Exception as error:
                odd.append(error)
                return
            seen.append((len(found), found["n"].nunique()))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 8):
        operations.resubmit(store, "load", ["1"])
        made(store, place, number)
    over.set()
    thread.join()

    assert odd == []
    assert set(seen) == {(ROWS, 1)}
    assert set(place.read(store)["n"]) == {7}


@cases("equal")
def test_data_read_back_equals_what_was_published(store: Store, place: Any) -> None:
    made(store, place, 3)

    pd.testing.assert_frame_equal(place.read(store), frame_of(3), check_dtype=False)


@cases("listed")
def test_data_that_no_chunk_stands_for_is_found(store: Store, place: Any) -> None:
    for dataid in ("1", "2"):
        made(store, place, 1, dataid)
    assert list(misplaced(store, "out", place.columns)) == []

    place.add_stranger()

    assert [held.dataid for held in misplaced(store, "out", place.columns)] == ["stranger"]


@cases("clean")
def test_a_crash_before_the_commit_shows_nothing_and_is_cleaned(store: Store, place: Any) -> None:
    made(store, place, 1)
    operations.resubmit(store, "load", ["1"])
    [claim] = take(store, "load", only="1")

    child = os.fork()
    if not child:
        place.publish(store, claim, frame_of(2), lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    _, status = os.waitpid(child, 0)

    assert os.WTERMSIG(status) == signal.SIGKILL
    assert set(place.read(store)["n"]) == {1}
    store.fail(claim, "FAILED")
    place.clean(store)
    assert place.leftovers() == []
    assert set(place.read(store)["n"]) == {1}


@cases("drift")
def test_missing_data_is_noticed(store: Store, place: Any) -> None:
    made(store, place, 1)
    assert not is_seen_as_gone(store, place)

    place.lose(store)

    assert is_seen_as_gone(store, place)


def is_seen_as_gone(store: Store, place: Any) -> bool:
    """Whether `odf drift` or `odf why` reports that the data of chunk 1 is missing."""
    if any(misplaced(store, "out", place.columns)):
        return True
    told = str(explain(store, "load", "1", look=look_at))
    return any(word in told for word in ("is gone", "are gone", "no row", "nothing"))


def table_of_promises() -> str:
    """The table of docs/storage.md."""
    lines = ["| | " + " | ".join(PROMISES.values()) + " |", "|---" * (len(PROMISES) + 1) + "|"]
    for name in PLACES:
        cells = [CANNOT.get((name, promise), "yes") for promise in PROMISES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_docs_have_the_table_of_promises() -> None:
    text = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    assert table_of_promises() in text, table_of_promises()
