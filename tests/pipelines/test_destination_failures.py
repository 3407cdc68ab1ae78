"""Rows that a destination refuses fail alone, in every place; an outage is waited for."""

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.chunk import Result
from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim, Unreachable
from opendataflow_dagster.formats import FILE_FORMATS
from opendataflow_dagster.pipelines.csv_file import CsvAppender
from opendataflow_dagster.pipelines.project import Project
from opendataflow_dagster.pipelines.sources import source_of
from opendataflow_dagster.storage.folder import read_frame
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.pipelines.test_places import Shop, claim, frame, nothing, project, stale, to, url

__all__ = ["project", "url"]


def row(number: int, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame([{"id": number, "v": "x"} | columns])


def named(*names: Any) -> pd.DataFrame:
    return pd.DataFrame([[2] * len(names)], columns=pd.Index(list(names)))


BAD: dict[str, pd.DataFrame] = {
    "half a character": row(2, v="q\ud800b"),
    "half a character within": row(2, v=[{"a": ["q\ud800b"]}]),
    "half a character in a key": row(2, v={"q\ud800b": 1}),
    "half a character in a name": pd.DataFrame([{"id": 2, "v\ud800": "x"}]),
    "nul": row(2, v="a\0b"),
    "long number": row(2, v=2**63),
    "longer number": row(2, v=-(2**70)),
    "number of 400 digits": frame(id=[2], v=pd.Series([10**400], dtype=object)),
    "empty dict": row(2, v={}),
    "empty dict within": row(2, v=[{"a": {}}]),
    "list": row(2, v=["x", "y"]),
    "set": row(2, v={"x"}),
    "tuple as key": row(2, v={("a", 1): 2}),
    "object": row(2, v=object()),
    "period": row(2, v=pd.Period("2026-01")),
    "name twice": named("id", "v", "v"),
    "name twice, in capitals": named("id", "v", "V"),
    "no name": named("id", "v", ""),
    "names of two levels": pd.DataFrame(
        [[2, 2]], columns=pd.MultiIndex.from_tuples([("id", "a"), ("v", "b")])
    ),
    "many columns": named("id", "v", *(f"c{n}" for n in range(2100))),
}

NOWHERE = ("half a character", "half a character in a name")
"""Values that no place can store."""

SAYS: dict[tuple[str, str], str] = {
    ("parquet", "half a character"): "column 'v' has a string that isn't Unicode",
    ("parquet", "half a character within"): "column 'v' has a string that isn't Unicode",
    (
        "parquet",
        "half a character in a name",
    ): r"the name of column 'v\\ud800' is a string that isn't",
    ("parquet", "longer number"): "column 'v' has an integer of more than 64 bits",
    ("parquet", "empty dict"): "column 'v' has an empty dict, which can't be written there",
    ("parquet", "empty dict within"): "column 'v' has an empty dict",
    ("parquet", "tuple as key"): "Expected dict key of type str or bytes, got 'tuple'",
    ("parquet", "name twice"): "two columns are called 'v'",
    ("sqlite", "half a character"): "column 'v' has a string that isn't Unicode",
    ("sqlite", "longer number"): "column 'v' has an integer of more than 64 bits",
    ("sqlite", "tuple as key"): "column 'v' has a dict with a key that isn't a string",
    ("sqlite", "name twice"): "two columns called 'v'",
    ("sqlite", "name twice, in capitals"): "columns 'v' and 'V', which are the same in SQLite",
    ("sqlite", "many columns"): "too many columns|no column",
    ("sqlite chunks", "tuple as key"): "type 'dict' is not supported",
    ("postgres chunks", "tuple as key"): "cannot adapt type 'dict'",
    ("postgres", "half a character"): "column 'v' has a string that isn't Unicode",
    ("postgres", "nul"): "NUL",
    ("postgres", "tuple as key"): "column 'v' has a dict with a key that isn't a string",
    ("postgres", "name twice"): "two columns called 'v'",
    ("postgres", "no name"): "zero-length|no column ''",
    ("postgres", "many columns"): "1600 columns|no column 'c0'|\"c0\" of relation",
    ("csvfile", "half a character"): "Column 'v' has a string that isn't Unicode",
}

PLACES = (
    "parquet",
    "csv",
    "json",
    "sqlite new",
    "sqlite there",
    "sqlite chunks",
    "postgres new",
    "postgres there",
    "postgres chunks",
    "csvfile new",
    "csvfile there",
    "csvfile replace",
)


class Somewhere:
    """The dataset `sums` in a place of some kind, which can be reset."""

    def __init__(self, kind: str, store: Store, tmp_path: Path, request: Any) -> None:
        self.store, self.kind, self.root = store, kind, tmp_path / "place"
        self.name, _, self.how = kind.partition(" ")
        self.root.mkdir()
        if self.name == "sqlite":
            self.shop = Shop(store, "sqlite", {"database": str(self.root / "shop.db")})
        elif self.name == "postgres":
            parts = conninfo_to_dict(request.getfixturevalue("postgres_url"))
            host = f"{parts.get('host', '')}:{parts['port']}" if "port" in parts else parts["host"]
            self.shop = Shop(
                store,
                "postgresql",
                {
                    "hostname": str(host),
                    "database": str(parts["dbname"]),
                    "username": str(parts.get("user", "")),
                },
            )

    def begin(self) -> None:
        """Reset to nothing, or to an empty table or file."""
        if self.name in ("sqlite", "postgres"):
            self.shop.add(**({"chunkcolumn": "run"} if self.how == "chunks" else {}))
            self.shop.run("drop table if exists sums")
            if self.how != "new":
                self.shop.run("create table sums (id bigint, v text, run varchar(20))")
        elif self.name == "csvfile":
            path, mode = self.root / "sums.csv", "replace" * (self.how == "replace")
            add_dataset(self.store, "sums", hostname=str(path), writemode=mode)
            for each in (path, self.root / ".sums.csv.odf"):
                each.unlink(missing_ok=True)
            if self.how == "there":
                path.write_text("id,v\n")
        else:
            folder = self.root / "sums"
            add_dataset(self.store, "sums", hostname=str(folder), format=self.name)
            shutil.rmtree(folder, ignore_errors=True)

    def bad(self) -> list[tuple[str, pd.DataFrame]]:
        """What is bad for some place of this kind: a file may have any number of columns."""
        limited = self.name in ("sqlite", "postgres")
        return [each for each in BAD.items() if limited or each[0] != "many columns"]

    def kept(self, project: Project, verdicts: list[Any]) -> list[int]:
        """Return the numbers of the rows that exist."""
        if self.name not in [format.name for format in FILE_FORMATS]:
            return sorted(int(each) for each in source_of(self.store, project, "sums").pandas().id)
        found = [each.location for each in verdicts if isinstance(each, Result)]
        assert len(os.listdir(self.root / "sums")) == len(found)
        return [int(read_frame(str(each), "parquet").iloc[-1, 0]) for each in found]


@pytest.fixture(params=PLACES)
def somewhere(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Somewhere:
    return Somewhere(request.param, store, tmp_path, request)


@pytest.fixture(params=["sqlite new", "postgres new"])
def new_table(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Somewhere:
    return Somewhere(request.param, store, tmp_path, request)


def check(somewhere: Somewhere, bad: str, verdict: Any) -> None:
    """Check the verdict on a bad item; return what is wrong with it."""
    said = str(verdict) if isinstance(verdict, DataflowError) else ""
    assert "\n" not in said
    assert said or bad not in NOWHERE, (somewhere.kind, bad)
    words = SAYS.get((somewhere.kind, bad), SAYS.get((somewhere.name, bad), ""))
    assert re.search(words, said), (somewhere.kind, bad, said)


@pytest.mark.filterwarnings("ignore:DataFrame columns are not unique")
def test_rows_that_a_place_refuses_fail_alone(somewhere: Somewhere, project: Project) -> None:
    for bad, what in somewhere.bad():
        somewhere.begin()
        parts = [(claim(1, 1), row(1)), (claim(2, 2), what), (claim(3, 3), row(3))]

        verdicts = to(somewhere.store, project).append(parts, nothing)

        assert [type(verdicts[0]), type(verdicts[2])] == [Result, Result], (bad, verdicts)
        check(somewhere, bad, verdicts[1])
        failed = isinstance(verdicts[1], DataflowError)
        wanted = [3] if somewhere.how == "replace" else [1, 3] if failed else [1, 2, 3]
        assert somewhere.kept(project, verdicts) == wanted, (bad, verdicts)


@pytest.mark.filterwarnings("ignore:DataFrame columns are not unique")
def test_a_refused_run_is_reported_and_leaves_nothing(
    somewhere: Somewhere, project: Project
) -> None:
    for bad, what in somewhere.bad():
        somewhere.begin()

        [verdict] = to(somewhere.store, project).append([(claim(2, 2), what)], nothing)

        check(somewhere, bad, verdict)
        if isinstance(verdict, DataflowError):
            parts = [(claim(3, 3), frame(id=[3], v=[4]))]
            verdicts = to(somewhere.store, project).append(parts, nothing)
            assert somewhere.kept(project, verdicts) == [3], (bad, verdicts)


def test_a_bad_item_does_not_define_a_new_place(new_table: Somewhere, project: Project) -> None:
    parts = [
        (claim(1, 1), frame(other=["q\ud800", "x"])),
        (claim(2, 2), frame(id=[2], v=["x"])),
        (claim(3, 3), frame(id=[3, 4], v=["x", "y"])),
    ]
    new_table.begin()
    verdicts = to(new_table.store, project).append(parts, nothing)
    assert [isinstance(each, Result) for each in verdicts] == [False, True, True]
    assert new_table.kept(project, verdicts) == [2, 3, 4]

    path = new_table.root / "sums.csv"
    verdicts = CsvAppender(str(path), new_table.store).append(parts, nothing)
    assert [isinstance(each, Result) for each in verdicts] == [False, True, True]
    assert path.read_text() == "id,v\n2,x\n3,x\n4,y\n"


def test_the_item_with_most_columns_defines_a_new_table(
    new_table: Somewhere, project: Project
) -> None:
    empty = frame(id=[], v=[]).astype(object)
    new_table.begin()
    to(new_table.store, project).append([(claim(1), empty), (claim(2), row(2, v=5))], nothing)
    assert new_table.shop.run("select id, v from sums") == [(2, 5)]


@pytest.mark.parametrize("column", ["", "run"])
def test_a_database_that_cannot_be_used_fails_no_item(
    new_table: Somewhere, project: Project, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, parts = new_table.shop, [(claim(1, 1), row(1)), (claim(2, 2), row(2))]
    new_table.begin()
    shop.add(chunkcolumn=column)
    shop.run("create table sums (id bigint, v text, run varchar(20))")

    with pytest.raises(StaleClaim):
        to(new_table.store, project).append(parts, stale)
    if shop.format == "sqlite":
        monkeypatch.setattr("opendataflow_dagster.storage.table._PATIENCE", 0.1)
        with closing(sqlite3.connect(shop.columns["database"])) as other:
            other.execute("begin immediate")
            with pytest.raises(Unreachable, match="database is locked"):
                to(new_table.store, project).append(parts, nothing)
        away = {"database": str(new_table.root / "no" / "shop.db")}
    else:
        shop.run(
            f"alter database {shop.columns['database']} set default_transaction_read_only = on"
        )
        with pytest.raises(Unreachable, match="read-only transaction"):
            to(new_table.store, project).append(parts, nothing)
        away = {"hostname": "127.0.0.1:9"}
    shop.add(chunkcolumn=column, **away)
    with pytest.raises(Unreachable, match=r"can't be opened|there is no file"):
        to(new_table.store, project).append(parts, nothing)


def test_a_place_that_cannot_be_written_to_fails_no_item(
    store: Store, project: Project, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    parts = [(claim(1, 1), row(1)), (claim(2, 2), row(2))]
    for columns in (
        {"hostname": str(tmp_path / "file" / "sums"), "format": "parquet"},
        {"hostname": str(tmp_path / "file" / "sums.csv"), "format": "csv"},
        {"hostname": str(tmp_path / "file" / "sums.csv"), "writemode": "replace"},
    ):
        add_dataset(store, "sums", **columns)
        with pytest.raises((OSError, Unreachable, Refused)):
            to(store, project).append(parts, nothing)
