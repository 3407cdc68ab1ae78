"""`odf clean`: leftovers of crashes are removed, running writes stay, lost chunks come back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.model import Claim, Fact
from opendataflow_dagster.storage import cleanup
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import expire, register, take

POINTS = ["before", "during", "written", "shown"]


@pytest.fixture
def line(store: Store, tmp_path: Path) -> Store:
    """A job `load` that produces `out`, a folder, from `src`."""
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", hostname=str(tmp_path / "out"), format="csv")
    operations.ready(store, "src", ["1", "2", "a/b"])
    return store


def odf(store: Store, *words: str) -> Result:
    url = store.db.url if store.db.dialect == "postgres" else f"sqlite:///{store.db.path}"  # type: ignore[attr-defined]
    return CliRunner().invoke(app, list(words), prog_name="odf", env={"DATAFLOW_URL": url})


def cleaned(store: Store, *words: str) -> list[dict[str, Any]]:
    done = odf(store, "clean", "--json", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def made(store: Store, root: Path, dataid: str, text: str = "v\n1\n") -> Claim:
    """A chunk that is published and READY."""
    [claim] = take(store, "load", only=dataid)

    def write(folder: str) -> dict[str, Any]:
        Path(folder, "part-0.csv").write_text(text)
        return {"rows": 1, "format": "csv"}

    path = folders.put(str(root), dataid, claim.generation, write, confirm=lambda: None)
    store.finish(claim, [Fact("out", dataid, path, 1)])
    return claim


def killed(root: Path, dataid: str, generation: int, point: str) -> None:
    """Publish in a process that is killed at a given point."""
    code = f"""
import os, signal, sys
from pathlib import Path
from opendataflow_dagster.storage import folder as folders

def die(*more): os.kill(os.getpid(), signal.SIGKILL)

def write(folder):
    if {point!r} == "before": die()
    Path(folder, "part-0.csv").write_text("v\\n2\\n")
    if {point!r} == "during":
        Path(folder, "_temporary", "0").mkdir(parents=True)
        Path(folder, "_temporary", "0", ".part-1.csv.crc").write_text("x")
        die()
    return {{"rows": 1, "format": "csv"}}

if {point!r} == "shown":
    folders.sync_one = lambda path: die() if path == {str(root)!r} else None
if {point!r} == "swap":
    def swap(mine, final):
        os.rename(final, mine + ".old")
        die()
    folders._swap = swap
confirm = die if {point!r} == "written" else lambda: None
folders.put({str(root)!r}, {dataid!r}, {generation}, write, confirm=confirm)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def data(root: Path, dataid: str) -> list[int]:
    path = folders.find(str(root), dataid)
    assert path is not None
    before = os.stat(path).st_ino
    frame = folders.read_frame(path, "csv")
    if os.stat(path).st_ino != before:  # what was listed is being removed
        raise FileNotFoundError(path)
    return frame["v"].to_list()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dataid", ["1", "a/b"])
def test_leftovers_of_a_kill_are_removed_when_the_claim_has_ended(
    line: Store, tmp_path: Path, point: str, dataid: str
) -> None:
    root = tmp_path / "out"
    made(line, root, dataid)
    operations.resubmit(line, "load", [dataid])
    [claim] = take(line, "load", only=dataid)
    killed(root, dataid, claim.generation, point)
    before = sorted(map(str, root.rglob("*")))

    assert cleaned(line, "--older-than", "0s") == []  # the claim is alive: nobody knows better
    expire(line)
    line.recover()
    assert cleaned(line) == []  # it is young
    planned = cleaned(line, "--older-than", "0s", "--plan")
    assert sorted(map(str, root.rglob("*"))) == before
    done = cleaned(line, "--older-than", "0s")

    def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: row[name] for name in row if name != "age"} for row in rows]

    assert plain(done) == plain(planned)
    assert {(row["datasetid"], row["dataid"], row["generation"]) for row in done} == {
        ("out", dataid, claim.generation)
    }
    assert os.listdir(root) == [folders.directory(dataid)]
    assert data(root, dataid) == ([2] if point == "shown" else [1])
    assert cleaned(line, "--older-than", "0s") == []


def test_the_only_whole_chunk_is_put_back(line: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    made(line, root, "1")
    operations.resubmit(line, "load", ["1"])
    [claim] = take(line, "load", only="1")
    killed(root, "1", claim.generation, "swap")
    assert cleaned(line) == []  # the claim is alive: it may be in the middle of it
    line.fail(claim, "killed")
    assert folders.find(str(root), "1") is None

    done = cleaned(line)  # at once: it is missing from where it is read

    assert [row["what"] for row in done] == [cleanup.BACK]
    assert data(root, "1") == [1]


def test_of_two_chunks_moved_aside_the_newer_is_put_back(line: Store, tmp_path: Path) -> None:
    staging = tmp_path / "out" / "_staging" / "dataid=1"
    for generation in (3, 12):
        old = staging / f"{generation + 1}-ab.old"
        old.mkdir(parents=True)
        (old / "part-0.csv").write_text(f"v\n{generation}\n")
        (old / folders.NOTE).write_text(json.dumps({"generation": generation}))

    found = cleaned(line, "--older-than", "0s")

    assert sorted(row["what"] for row in found) == [cleanup.BACK, cleanup.OLD]
    assert data(tmp_path / "out", "1") == [12]
    assert os.listdir(tmp_path / "out") == ["dataid=1"]


def test_a_publish_in_progress_isnt_touched(line: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    [claim] = take(line, "load", only="1")
    staged = folders.Staged(str(root), "1", claim.generation)
    Path(staged.path, "part-0.csv").write_text("v\n5\n")
    batch = root / "_staging" / f"{folders.BATCH}{claim.generation}-ab" / "dataid=1"
    batch.mkdir(parents=True)
    other = root / "_staging" / f"{folders.BATCH}{claim.generation + 100}-ab"
    other.mkdir()
    past = time.time() - 7200
    for each in (staged.path, batch):  # for hours
        os.utime(each, (past, past))
    before = sorted(map(str, root.rglob("*")))

    assert cleaned(line, "--older-than", "0s") == []
    assert sorted(map(str, root.rglob("*"))) == before
    staged.tell({"rows": 1, "format": "csv"})
    staged.show(lambda: None)
    line.finish(claim)
    assert [row["what"] for row in cleaned(line, "--older-than", "0s")] == [cleanup.BATCH] * 2
    staged.discard()
    assert os.listdir(root) == ["dataid=1"]
    assert data(root, "1") == [5]


def test_a_batch_older_than_every_live_claim_is_removed(line: Store, tmp_path: Path) -> None:
    batch = tmp_path / "out" / "_staging" / f"{folders.BATCH}1-ab"
    batch.mkdir(parents=True)
    past = time.time() - 7200
    os.utime(batch, (past, past))
    take(line, "load", only="1")

    assert [row["what"] for row in cleaned(line)] == [cleanup.BATCH]
    assert not (tmp_path / "out").joinpath("_staging").exists()


def test_sparks_leftovers_in_a_chunk_are_removed_unless_it_is_running(
    line: Store, tmp_path: Path
) -> None:
    for dataid in ("1", "2"):
        (tmp_path / "out" / f"dataid={dataid}" / "_temporary" / "0").mkdir(parents=True)
    take(line, "load", only="2")

    found = cleaned(line, "--older-than", "0s")

    assert [(row["dataid"], row["what"]) for row in found] == [("1", cleanup.SPARK)]
    assert os.listdir(tmp_path / "out" / "dataid=2") == ["_temporary"]
    assert (tmp_path / "out" / "dataid=1").is_dir()


def test_a_folder_that_two_datasets_share_is_listed_once(line: Store, tmp_path: Path) -> None:
    add_dataset(line, "twin", hostname=str(tmp_path / "out"))
    (tmp_path / "out" / "_staging" / "dataid=1" / "3-ab").mkdir(parents=True)

    assert len(cleaned(line, "--older-than", "0s", "--plan")) == 1
    assert len(cleaned(line, "twin", "--older-than", "0s")) == 1


def test_a_dataset_that_cant_be_cleaned_doesnt_keep_others_from_it(
    line: Store, tmp_path: Path
) -> None:
    database = {"hostname": "127.0.0.1:1", "database": "d", "tablename": "t", "username": "u"}
    add_dataset(line, "a", **database)  # without a chunkcolumn
    add_dataset(line, "aa", hostname="nobody")
    add_dataset(line, "b", **database, chunkcolumn="day")
    (tmp_path / "out" / "_staging" / "dataid=1" / "3-ab").mkdir(parents=True)

    done = odf(line, "clean", "--older-than", "0s")

    assert done.exit_code == 1
    assert "Can't clean 'b'" in done.stderr
    assert "1 leftover removed, 0 bytes." in done.stderr
    assert done.stdout == ""


def test_an_unknown_dataset_is_refused(line: Store) -> None:
    done = odf(line, "clean", "nothing")
    assert done.exit_code == 4
    assert "'nothing' isn't registered" in done.stderr


def test_a_reader_sees_whole_chunks_while_clean_and_publish_go_on(
    line: Store, tmp_path: Path
) -> None:
    root = tmp_path / "out"
    made(line, root, "1")
    code = f"""
import sys
from pathlib import Path
from opendataflow_dagster.storage import folder as folders
for number in range(2, 200):
    def write(folder):
        for _ in "ab":
            Path(folders.new_file(folder, ".csv")).write_text(f"v\\n{{number}}\\n")
        return {{"rows": 2, "format": "csv"}}
    while True:
        try:
            folders.put({str(root)!r}, "1", 1000 + number, write, confirm=lambda: None)
            break
        except FileNotFoundError:  # it took half a second, and was taken for a zombie's
            continue
"""
    [claim] = take(line, "load", only="2")
    writer = subprocess.Popen([sys.executable, "-c", code])
    reads = 0
    try:
        while writer.poll() is None:
            # Its generations are no claim's, as a zombie's: removing them makes it fail, at worst.
            for _, remove in cleanup.in_folder(line, "out", str(root), 0.5):
                remove()
            try:
                found = data(root, "1")
            except FileNotFoundError:  # replaced while it was read: who reads asks again
                continue
            assert len(set(found)) == 1, found
            reads += 1
    finally:
        writer.wait()
    assert writer.returncode == 0
    assert reads > 5
    assert data(root, "1") == [199, 199]
    line.fail(claim, "done")


def test_the_size_and_age_of_leftovers(line: Store, tmp_path: Path) -> None:
    left = tmp_path / "out" / "_staging" / "dataid=1" / "3-ab"
    left.mkdir(parents=True)
    pd.DataFrame({"v": [1]}).to_csv(left / "x.csv", index=False)
    past = time.time() - 5000
    for each in (left / "x.csv", left):
        os.utime(each, (past, past))

    [row] = cleaned(line, "--plan")

    assert (row["what"], row["bytes"], row["path"]) == (cleanup.STAGED, 4, str(left))
    assert 4990 < row["age"] < 5100
