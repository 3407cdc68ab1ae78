"""Chunks packed by the previous version: read, counted, unpacked; complete after any kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from opendataflow_dagster.formats.parquet_format import check_types, same
from opendataflow_dagster.location import is_packed
from opendataflow_dagster.storage import cleanup, folder
from opendataflow_dagster.storage import compact as packs
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage.compact import unpack
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.store import Store
from tests.storage.test_compact import ODD, content, hurried, line, made, odf, table, url_of, whole
from tests.support.packs import put_packed
from tests.support.store_fixtures import sql, take

__all__ = ["hurried", "line"]  # fixtures


@pytest.fixture
def packed(line: Store) -> dict[str, dict]:
    """Return the facts of each packed chunk of `out`."""
    chunks = put_packed(line, "load", "out", Path.cwd() / "out", "arrow")
    return {chunk["dataid"]: chunk for chunk in chunks}


def expected(dataid: str) -> object:
    """The rows that a chunk had before it was packed."""
    if dataid == "10":
        return table(5).slice(0, 0)
    number = ODD.index(dataid)
    return whole([table(number), table(number, 4)])


def is_whole(store: Store, dataid: str) -> bool:
    return same(content(store, dataid).combine_chunks(), expected(dataid))


def location_of(store: Store, dataid: str) -> str:
    [(location,)] = sql(
        store,
        "select location from chunkfact where datasetid = 'out' and dataid = :d "
        "order by generation desc limit 1",
        d=dataid,
    )
    return location


def leftovers(store: Store) -> list[tuple[cleanup.Leftover, cleanup.Remove]]:
    return list(cleanup.in_folder(store, "out", str(Path.cwd() / "out"), 0))


def test_packed_chunks_are_read_with_their_notes(line: Store, packed: dict[str, dict]) -> None:
    for dataid, chunk in packed.items():
        assert is_whole(line, dataid), dataid
        assert packs.read_note(chunk["location"]) == chunk["note"]


def test_unpacked_chunks_are_the_chunks_that_they_were(
    line: Store, packed: dict[str, dict]
) -> None:
    done = odf(line, "compact", "out", "--unpack", "--json")

    assert done.exit_code == 0, done.output
    assert {row["left"] for row in json.loads(done.stdout)} == {""}
    assert f"{len(ODD)} chunks unpacked, 0 skipped." in done.stderr
    for dataid, chunk in packed.items():
        path = folders.chunk_path(str(Path.cwd() / "out"), dataid)
        assert location_of(line, dataid) == path
        assert is_whole(line, dataid)
        [file] = folder.data_files(path)
        metadata = pq.read_schema(file).metadata
        assert metadata is None or b"odf" not in metadata
        note = folders.read_note(path)
        changed = {"bytes": os.path.getsize(file), "generation": note["generation"]}
        assert note == {**chunk["note"], **changed, "store": line.id}
        [(size,)] = sql(
            line, "select bytes from chunkfact where datasetid='out' and dataid=:d", d=dataid
        )
        assert size == os.path.getsize(file)
    assert list(unpack(line, "out")) == []
    [(left, remove)] = leftovers(line)
    assert left.what == cleanup.PACK
    assert remove()
    assert sorted(os.listdir("out")) == sorted(map(folders.directory, ODD))
    assert all(is_whole(line, dataid) for dataid in ODD)


def test_a_plan_of_unpacking_changes_nothing(line: Store, packed: dict[str, dict]) -> None:
    rows = json.loads(odf(line, "compact", "out", "--unpack", "--plan", "--json").stdout)

    assert [row["dataid"] for row in rows] == [row.dataid for row in unpack(line, "out", plan=True)]
    assert {row["dataid"]: row["path"] for row in rows} == {
        dataid: chunk["location"] for dataid, chunk in packed.items()
    }
    assert os.listdir("out") == ["_packs"]


def test_doctor_counts_packed_chunks_and_says_how_to_unpack_them(
    line: Store, packed: dict[str, dict]
) -> None:
    def check() -> list[dict[str, str]]:
        rows = json.loads(odf(line, "doctor", "--json").stdout)
        return [row for row in rows if row["check"] == "packs"]

    [found] = check()
    assert found["result"] == "warn"
    assert found["detail"].startswith("9 chunks in packs")
    assert found["action"] == "odf compact out --unpack"
    list(unpack(line, "out", ["1", "a/b"]))
    assert check()[0]["detail"].startswith("7 chunks in packs")
    list(unpack(line, "out"))
    assert check() == []


def test_a_claimed_chunk_stays_in_its_pack(line: Store, packed: dict[str, dict]) -> None:
    [reading] = take(line, "use", only="1")

    done = {row.dataid: row.left for row in unpack(line, "out", ["1", "2"])}

    assert done == {"1": "it isn't READY, or it is claimed", "2": ""}
    assert is_packed(location_of(line, "1"))
    line.finish(reading)
    assert [row.dataid for row in unpack(line, "out", ["1"])] == ["1"]
    assert is_whole(line, "1")


def test_a_chunk_that_is_claimed_while_it_is_unpacked_stays_in_its_pack(
    line: Store, packed: dict[str, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = check_types

    def slow(*args: object, **more: object) -> None:
        plain(*args, **more)  # type: ignore[arg-type]
        take(line, "use", only="1")

    monkeypatch.setattr("opendataflow_dagster.storage.compact.check_types", slow)
    [row] = unpack(line, "out", ["1"])

    assert "meanwhile" in row.left
    assert is_packed(location_of(line, "1"))
    assert os.listdir("out") == ["_packs"]


def test_a_chunk_that_is_produced_again_leaves_its_pack(
    line: Store, packed: dict[str, dict]
) -> None:
    for dataid in ODD:
        assert leftovers(line) == []
        operations.resubmit(line, "load", [dataid])
        made(line, dataid, table(9))
        assert set(content(line, dataid).column("n").to_pylist()) == {9}
    [(left, remove)] = leftovers(line)
    assert left.what == cleanup.PACK
    assert remove()
    assert not Path("out/_packs").exists()


def test_a_pack_stays_while_its_chunks_fail(line: Store, packed: dict[str, dict]) -> None:
    for dataid in ODD:
        operations.resubmit(line, "load", [dataid])
        [claim] = take(line, "load", only=dataid)
        line.fail(claim, "NOT_VALIDATED")
        sql(
            line,
            "insert into chunkfact (datasetid, dataid, generation, location, validated) "
            "values ('out', :d, :g, :l, :v)",
            d=dataid,
            g=claim.generation,
            l=str(Path.cwd() / "out"),
            v=False,
        )

    assert leftovers(line) == []


def test_a_missing_pack_is_reported(line: Store, packed: dict[str, dict]) -> None:
    shutil.rmtree("out/_packs")

    assert {row.left for row in unpack(line, "out")} == {"its pack is gone"}


KILLED = """
import os, signal
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage import compact as unpacking
from opendataflow_dagster.store import open_store

def die(*more, **also): os.kill(os.getpid(), signal.SIGKILL)

def after(module, name):
    plain = getattr(module, name)
    def worked(*args, **more):
        plain(*args, **more)
        die()
    setattr(module, name, worked)

store = open_store({url!r})
point = {point!r}
if point == "begun": unpacking._write_file = die
if point == "written": after(unpacking, "_write_file")
if point == "confirmed": folders._show = die
if point == "shown": after(folders, "_show")
if point == "recorded": after(unpacking, "_record")
print(list(unpacking.unpack(store, "out")))
"""


@pytest.mark.parametrize("point", ["begun", "written", "confirmed", "shown", "recorded"])
def test_killed_anywhere_the_next_call_unpacks_the_rest(
    line: Store, packed: dict[str, dict], point: str
) -> None:
    code = KILLED.format(url=url_of(line), point=point)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert all(is_whole(line, dataid) for dataid in ODD)
    assert len(list(unpack(line, "out"))) == len(ODD) - (point == "recorded")
    for _, remove in leftovers(line):
        remove()
    assert leftovers(line) == []
    assert all(is_whole(line, dataid) for dataid in ODD)
    # An empty directory of the killed process may remain: the next publish of the chunk uses it.
    assert {*os.listdir("out")} - {"_staging"} == {*map(folders.directory, ODD)}
