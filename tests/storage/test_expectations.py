"""What a flow expects of a chunk: that the job wrote it, and how many rows."""

import sqlite3
from pathlib import Path
from urllib.parse import quote

import pytest

from opendataflow_dagster.chunk import Chunk, Place, Result, Unpublished
from opendataflow_dagster.model import Claim
from opendataflow_dagster.storage.presence import Expectation, expectations_of


def chunk(dataid: str = "1", result: Result = Result(), **columns: str) -> Chunk:  # noqa: B008
    claim = Claim("load", dataid, 7, "me", 1, 60.0, None)
    place = Place("made", columns, columns.get("hostname"))
    return Chunk(claim, {}, {"made": place}, {}, {"made": result})


def exists(given: Chunk) -> str:
    [rule] = expectations_of("made", {"exists": True})
    checked = rule(given)
    assert checked.passed == (checked.message == "")
    return checked.message


@pytest.mark.parametrize(
    "name", ["1", "1.csv", "1.txt", "1.csv.gz", "dataid=1", "dataid=1/part-0.csv", "1/x"]
)
def test_a_file_named_after_a_chunk_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "made" / name
    path.parent.mkdir(parents=True)
    assert "nothing in" in exists(chunk(hostname=str(tmp_path / "made")))
    path.touch()
    assert exists(chunk(hostname=str(tmp_path / "made"))) == ""
    assert exists(chunk(hostname="./made")) == ""


@pytest.mark.parametrize("name", ["10", "11.csv", "_1", ".1.csv", "dataid=2/1", "1.d/_odf.json"])
def test_a_file_with_another_name_is_not_the_chunk(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert exists(chunk(hostname=str(tmp_path))) == (
        f"nothing in {tmp_path} is named after chunk '1'"
    )


def test_missing_folders_reported_files_and_unpublished_data_are_checked(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert exists(chunk(hostname=gone)) == f"there is no folder {gone}"
    told = Result(location=str(tmp_path / "elsewhere.csv"))
    assert exists(chunk(hostname=gone, result=told)) == f"{tmp_path}/elsewhere.csv isn't there"
    (tmp_path / "elsewhere.csv").touch()
    assert exists(chunk(hostname=gone, result=told)) == ""
    assert exists(chunk(hostname=gone, result=Unpublished())) == ""
    assert "can't be asked of s3a://b/x" in exists(chunk(hostname="s3a://b/x", format="parquet"))
    assert exists(chunk(hostname=gone, format="nosuch")).startswith("it can't be told: ")


@pytest.mark.parametrize("dataid", ["../x", "a/b", "..", "x" * 400, "%2e", "é 😀"])
def test_a_chunk_with_an_odd_name_is_looked_for_in_its_folder_alone(
    tmp_path: Path, dataid: str
) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "made").mkdir()
    fault = exists(chunk(dataid, hostname=str(tmp_path / "made")))
    assert fault == f"nothing in {tmp_path}/made is named after chunk {dataid!r}" or (
        fault.startswith("it can't be told: ")
    )
    (tmp_path / "made" / f"dataid={quote(dataid, safe=' ')}"[:255]).mkdir()
    exists(chunk(dataid, hostname=str(tmp_path / "made")))  # raises nothing


def test_a_table_has_a_row_of_the_chunk(tmp_path: Path) -> None:
    place = {"hostname": str(tmp_path / "x.db"), "tablename": "made", "format": "sqlite"}
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("create table made (dataid text, n integer)")
        connection.execute("insert into made values ('2', 5)")
    connection.close()
    assert exists(chunk("2", chunkcolumn="dataid", **place)) == ""
    assert "has no row of chunk '1'" in exists(chunk("1", chunkcolumn="dataid", **place))


@pytest.mark.parametrize(
    ("rows", "span", "fault"),
    [
        (5, (1, None), ""),
        (0, (1, None), "0, where at least 1 are expected"),
        (5, (None, 4), "5, where at most 4 are expected"),
        (12345, (1, 9999), "12,345, where 1 to 9,999 are expected"),
        (1, (1, 1), ""),
        (None, (1, None), "the number of rows is unknown"),
    ],
)
def test_rows_are_counted(rows: int | None, span: tuple, fault: str) -> None:
    least, most = span
    checked = Expectation("made", "rows", least, most)(chunk(result=Result(rows)))
    assert (checked.passed, checked.message) == (not fault, fault)
