"""What pipelines read and write: CSV files through kills and edits, tables, folders, projects."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pandas as pd
import psycopg
import pytest
from pandas.testing import assert_frame_equal
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.chunk import Chunk, Place, Result, open_chunk
from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim
from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.location import POSTGRES, place_of
from opendataflow_dagster.model import Claim, Fact, Plan
from opendataflow_dagster.pipelines import csv_file, csv_journal, sources
from opendataflow_dagster.pipelines.csv_file import CsvAppender
from opendataflow_dagster.pipelines.csv_journal import Journal, Ledger, digest, path_of
from opendataflow_dagster.pipelines.destinations import (
    destination_of,
    output_file,
    publish_with_output,
    refuse_loss,
)
from opendataflow_dagster.pipelines.frames import Destination, registered
from opendataflow_dagster.pipelines.project import Pipeline, Project, read_project
from opendataflow_dagster.pipelines.sources import CsvSource, source_of
from opendataflow_dagster.pipelines.sql_table import columns_for
from opendataflow_dagster.runner.environment import job_environment
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import close, put, register, sql, take

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def nothing() -> None:
    pass


def stale() -> None:
    raise StaleClaim("it was taken over")


def claim(dataid: object, generation: int = 1) -> Claim:
    return Claim("orders", str(dataid), generation, "worker", 1, 60.0, None)


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def row(number: int, text: str = "x") -> pd.DataFrame:
    return frame(n=[number], text=[text])


def good(verdicts: list[Result | DataflowError]) -> list[Result]:
    assert all(isinstance(each, Result) for each in verdicts), verdicts
    return verdicts  # type: ignore[return-value]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with a source and two pipelines; the second reads what the first produces."""
    root = tmp_path / "shop"
    (root / "sources").mkdir(parents=True)
    (root / "sources" / "orders.csv").write_text("id,day,price\n1,2026-01-02,2.5\n2,,3\n")
    (root / "project.yml").write_text(
        "name: shop\n"
        "pipelines:\n"
        "  - {slug: daily, sources: [orders], destination: sums, transformations: [add]}\n"
        "  - {slug: weekly, sources: [sums], transformations: [add]}\n"
    )
    return read_project(root)


def to(store: Store, project: Project, slug: str = "daily", read: bool = False) -> Destination:
    pipeline: Pipeline = project.pipeline(slug)
    plan = Plan(slug, (), (pipeline.destination or slug,), (), (), False)
    return destination_of(store, project, pipeline, plan, read_by_others=read)


def chunk_of(store: Store, dataid: str, job: str = "daily", out: str = "sums") -> Chunk:
    """A claimed chunk of a job that is registered for it."""
    if not store.read_plan(job).outputs:
        register(store, job, outs=[out])
    put(store, out, dataid, "PENDING", jobid=job)
    [taken] = take(store, job, only=dataid)
    return open_chunk(store, taken, job_environment(store, store.read_plan(job), secrets=False))


# --- a CSV file ---


@pytest.fixture
def lite(sqlite_url: str) -> Iterator[Store]:
    """Tables on SQLite that record what was appended to a file."""
    made = open_store(sqlite_url)
    made.init()
    yield made
    close(made)


def test_a_file_is_replaced_in_one_step_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out" / "sums.csv"
    csv_file.replace(str(path), row(1))
    path.chmod(0o640)
    old = path.stat().st_ino

    told = csv_file.replace(str(path), row(2, 'say "x"\nor ü'))

    assert told.rows == 1
    assert told.bytes == path.stat().st_size
    assert told.fingerprint is not None
    assert told.fingerprint.startswith("sha256:")
    assert path.stat().st_ino != old
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert_frame_equal(pd.read_csv(path), row(2, 'say "x"\nor ü'))
    assert os.listdir(path.parent) == ["sums.csv"]


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "real" / "sums.csv")

    csv_file.replace(str(tmp_path / "link.csv"), row(1))

    assert (tmp_path / "link.csv").is_symlink()
    assert len(pd.read_csv(tmp_path / "real" / "sums.csv")) == 1


def test_without_confirmation_nothing_is_replaced_or_appended(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "sums.csv"
    csv_file.replace(str(path), row(1))
    before = path.read_bytes()

    with pytest.raises(StaleClaim):
        csv_file.replace(str(path), row(2), stale)
    with pytest.raises(StaleClaim):
        CsvAppender(str(path), lite).append([(claim(1), row(2))], stale)

    assert path.read_bytes() == before


def test_items_are_appended_by_the_names_of_the_header(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "sums.csv"
    path.write_bytes(b"\xef\xbb\xbfn,text\r\n1,one")

    verdicts = CsvAppender(str(path), lite).append(
        [
            (claim(1), frame(text=["two"], n=[2])),
            (claim(2), frame(n=[3], price=[1.0])),
            (claim(3), frame(text=["four"])),
            (claim(4), frame()),
        ],
        nothing,
    )

    assert [isinstance(each, Result) for each in verdicts] == [True, False, True, True]
    assert str(verdicts[1]) == (
        f"{path} has no column 'price': its first line names n, text. "
        "Leave the column out of the result, or add it to the file."
    )
    assert path.read_bytes() == b"\xef\xbb\xbfn,text\r\n1,one\r\n2,two\r\n,four\r\n"


def test_the_first_item_creates_the_file_and_its_header(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "out" / "sums.csv"
    twice = pd.DataFrame([[1, 2]], columns=["n", "n"])

    verdicts = CsvAppender(str(path), lite).append(
        [(claim(1), twice), (claim(2), row(1)), (claim(3), row(2))], nothing
    )

    assert "two columns called 'n'" in str(verdicts[0])
    assert_frame_equal(pd.read_csv(path), frame(n=[1, 2], text=["x", "x"]))


def test_a_chunk_appended_again_replaces_its_old_rows(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "sums.csv"
    appender = CsvAppender(str(path), lite)
    for number in range(5):
        good(appender.append([(claim(number), row(number))], nothing))

    again = [
        (claim(1, 9), row(1, "longer\nby a line")),
        (claim(3, 9), row(3, "")),
        (claim(7, 9), row(7)),
    ]
    good(CsvAppender(str(path), lite).append(again, nothing))
    good(CsvAppender(str(path), lite).append([(claim(3, 10), row(3, "third"))], nothing))
    good(appender.append([(claim(4, 11), row(4))], nothing))  # as it was: nothing is written

    found = pd.read_csv(path, keep_default_na=False)
    assert list(found.n) == [0, 1, 2, 3, 4, 7]
    assert list(found.text) == ["x", "longer\nby a line", "x", "third", "x", "x"]
    [late] = appender.append([(claim(3, 2), row(3, "late"))], nothing)
    assert "of generation 10, but this claim has 2" in str(late)


def test_a_persons_edits_stay_and_no_item_is_duplicated(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "sums.csv"
    appender = CsvAppender(str(path), lite)
    for number in range(4):
        good(appender.append([(claim(number), row(number))], nothing))

    path.write_text("n,text\n100,by hand\n0,changed\n3,x\n2,x")  # 1 is gone, no line's end
    good(appender.append([(claim(n, 9), row(n, "again")) for n in range(4)], nothing))

    found = pd.read_csv(path)
    # 0 is the person's now, 1 is new; 2 lost its line's end, so it is the person's too.
    assert list(zip(found.n, found.text, strict=True)) == [
        (100, "by hand"),
        (0, "changed"),
        (3, "again"),
        (2, "x"),
        (0, "again"),
        (1, "again"),
        (2, "again"),
    ]

    path.unlink()
    good(appender.append([(claim(8), row(8))], nothing))
    assert list(pd.read_csv(path).n) == [8]


def test_chunks_with_the_same_rows_each_have_their_own(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "sums.csv"
    good(CsvAppender(str(path), lite).append([(claim(n), row(1)) for n in range(4)], nothing))
    path.write_text(path.read_text().replace("text\n", "text\n9,by hand\n"))

    again = [(claim(n, 2), row(n, "again")) for n in range(3)]
    good(CsvAppender(str(path), lite).append(again, nothing))
    good(CsvAppender(str(path), lite).append([(claim(3, 3), row(3, "again"))], nothing))

    found = pd.read_csv(path)
    assert sorted(zip(found.n, found.text, strict=True)) == [
        *[(n, "again") for n in range(4)],
        (9, "by hand"),
    ]


def test_a_removed_file_is_missing_to_readers(tmp_path: Path, lite: Store) -> None:
    path = tmp_path / "sums.csv"
    assert not in_a_child(
        lambda: CsvAppender(str(path), lite).append([(claim(1), row(1))], nothing), Doom(3)
    )
    path.unlink()

    with pytest.raises(Refused, match="which doesn't exist"):
        CsvSource(str(path), "sums").pandas()

    assert not path.exists()


def test_a_replaced_file_has_no_journal_left(tmp_path: Path, lite: Store) -> None:
    path = str(tmp_path / "sums.csv")
    appender = CsvAppender(path, lite)
    good(appender.append([(claim(1), row(1))], nothing))

    csv_file.replace(path, row(1))
    assert not os.path.exists(path_of(path))
    good(appender.append([(claim(1, 2), row(1, "again"))], nothing))

    assert list(pd.read_csv(path).text) == ["x", "again"]


def test_appended_rows_are_not_replaced_unless_the_writemode_says_so(
    tmp_path: Path, lite: Store
) -> None:
    path = tmp_path / "out" / "sums.csv"
    appender = CsvAppender(str(path), lite)
    good(appender.append([(claim(n), row(n)) for n in range(2)], nothing))
    before = path.read_bytes()

    for refused in (
        lambda: csv_journal.refuse_loss(str(path), "Do this."),
        lambda: csv_file.replace(str(path), row(9), instead="Do this."),
    ):
        with pytest.raises(Refused) as error:
            refused()
        assert str(error.value) == (
            f"{path} has rows that 2 items have appended, and this run would replace them. Do this."
        )
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == [".sums.csv.odf", "sums.csv"]

    path.rename(tmp_path / "aside.csv")  # its owner has taken it away
    csv_file.replace(str(path), row(9), instead="Do this.")
    csv_file.replace(str(path), row(10), instead="Do this.")
    good(appender.append([(claim(3), frame())], nothing))  # it has no row to lose
    csv_file.replace(str(path), row(11), instead="Do this.")
    assert list(pd.read_csv(path).n) == [11]


def test_half_appended_rows_of_a_killed_process_may_be_replaced(
    tmp_path: Path, lite: Store
) -> None:
    path = tmp_path / "sums.csv"
    csv_file.replace(str(path), row(1))
    assert not in_a_child(
        lambda: CsvAppender(str(path), lite).append([(claim(1), row(2))], nothing), Doom(2)
    )
    csv_file.replace(str(path), row(3), instead="Do this.")
    assert list(pd.read_csv(path).n) == [3]


def test_two_processes_append_and_a_third_reads_whole_lines(tmp_path: Path, lite: Store) -> None:
    path = str(tmp_path / "sums.csv")
    code = (
        "import sys; from tests.pipelines.test_places import *\n"
        "store = open_store('sqlite:///' + sys.argv[3])\n"
        "appender, who = CsvAppender(sys.argv[1], store), int(sys.argv[2])\n"
        "for n in range(who, who + 60):\n"
        "    appender.append([(claim(n), row(n, 'y' * 300))], nothing)\n"
    )
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, str(who), lite.db.path], cwd=root)
        for who in (1000, 2000)
    ]
    most = 0
    while any(each.poll() is None for each in writers):
        if os.path.exists(path):
            with csv_file.held_for_reading(path):
                found = Path(path).read_text()
            assert all(len(line) in (6, 305) for line in found.splitlines())
            most = max(most, found.count("\n"))
        time.sleep(0.005)

    assert [each.returncode for each in writers] == [0, 0]
    assert most > 1
    assert sorted(pd.read_csv(path).n) == [*range(1000, 1060), *range(2000, 2060)]


class Doom:
    """Kills the process at the n-th call that changes a file or informs the tables.

    Of what it writes then, half is written.
    """

    def __init__(self, n: int) -> None:
        self.left = n

    def arm(self) -> None:
        for name in ("pwrite", "fsync", "replace", "ftruncate", "unlink"):
            setattr(os, name, self._doomed(name, getattr(os, name)))
        for name in ("expect", "commit"):
            setattr(Ledger, name, self._doomed(name, getattr(Ledger, name)))

    def _doomed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def doomed(*args: Any) -> Any:
            if self.left == 0:
                if name == "pwrite":
                    handle, data, at = args
                    call(handle, bytes(data)[: len(data) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return call(*args)

        return doomed


def in_a_child(work: Callable[[], Any], doom: Doom) -> bool:
    """Do some work in a separate process that is killed on the way; return whether it finished."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        pid = os.fork()
    if pid == 0:
        try:
            doom.arm()
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


BEFORE = "n,text\n0,x\n1,x\n2,x\n"
AFTER = [
    (0, "x"),
    (1, "again and longer"),
    (2, "x"),
    (3, "x"),
    (4, "x"),
]


@pytest.mark.parametrize("kind", ["first", "more", "again", "replace"])
def test_killed_at_any_moment_the_file_is_whole_and_holds_each_item_once(
    kind: str, tmp_path: Path, lite: Store
) -> None:
    parts = [(claim(3, 2), row(3)), (claim(4, 2), row(4))]
    if kind == "again":
        parts.append((claim(1, 2), row(1, "again and longer")))

    for n in range(40):
        path = tmp_path / str(n) / "sums.csv"
        if kind != "first":
            good(
                CsvAppender(str(path), lite).append([(claim(i), row(i)) for i in range(3)], nothing)
            )

        def work(path: Path = path) -> Any:
            if kind == "replace":
                return csv_file.replace(str(path), row(9))
            return good(CsvAppender(str(path), lite).append(parts, nothing))

        through = in_a_child(work, Doom(n))
        if path.exists():
            with csv_file.held_for_reading(str(path)):
                seen = path.read_text()
            assert seen == "" or seen.endswith("\n")
            assert seen == "" or seen.startswith("n,text\n")
            assert (
                len(seen.splitlines())
                in {
                    "first": (0, 3),
                    "more": (4, 6),
                    "again": (4, 6),
                    "replace": (2, 4),
                }[kind]
            )
        if kind == "replace":
            assert seen in (BEFORE, "n,text\n9,x\n")
            assert not through or seen == "n,text\n9,x\n"
        else:
            # Whoever was killed has settled nothing: all of it comes again, with a new generation.
            again = [(claim(each.dataid, 3), frame) for each, frame in parts]
            good(CsvAppender(str(path), lite).append(again, nothing))
            found = pd.read_csv(path)
            kept = [each for each in AFTER if kind != "first" or each[0] > 2]
            if kind == "more":
                kept[1] = (1, "x")
            assert list(zip(found.n, found.text, strict=True)) == kept, n
        if through:
            break
    assert through
    assert n > (5 if kind == "replace" else 4)


def test_after_repeated_kills_nothing_is_lost_or_duplicated(tmp_path: Path, lite: Store) -> None:
    path = str(tmp_path / "sums.csv")
    settled: dict[int, int] = {}
    generation, deadline = 0, time.monotonic() + 4.0
    reader, writer = os.pipe()

    while time.monotonic() < deadline or generation < 25:
        todo = [n for n in range(len(settled) + 50) if n not in settled][:50]
        generation += 1

        def work(todo: list[int] = todo, generation: int = generation) -> None:
            appender = CsvAppender(path, lite)
            for at in range(0, len(todo), 5):
                some = todo[at : at + 5]
                parts = [(claim(n, generation), row(n, "y" * (n % 50))) for n in some]
                good(appender.append(parts, nothing))
                os.write(writer, b"".join(b"%9d\n" % n for n in some))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(0)
        time.sleep(0.004 * (generation % 13))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.set_blocking(reader, False)
        try:
            for line in os.read(reader, 65536).splitlines():
                settled[int(line)] = generation
        except BlockingIOError:
            pass
    os.close(reader)
    os.close(writer)

    with csv_file.held_for_reading(path):
        found = pd.read_csv(path)
    assert generation > 20
    assert found.n.is_unique
    assert set(settled) <= set(found.n)
    assert len(found) - len(settled) <= 50
    assert [len(str(text)) for text in found.text.fillna("")] == [n % 50 for n in found.n]


def test_a_thousand_items_of_one_call_are_two_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lite: Store
) -> None:
    path = tmp_path / "sums.csv"
    appender = CsvAppender(str(path), lite)
    good(appender.append([(claim(0), row(0))], nothing))
    waits = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (waits.append(handle), fsync(handle)))

    good(appender.append([(claim(n, n), row(n)) for n in range(1, 1001)], nothing))

    assert len(waits) == 2
    assert list(pd.read_csv(path).n) == list(range(1001))


def test_a_torn_line_of_the_journal_is_forgotten(tmp_path: Path, lite: Store) -> None:
    path = str(tmp_path / "sums.csv")
    good(CsvAppender(path, lite).append([(claim(1), row(1))], nothing))
    with open(path_of(path), "ab") as file:
        file.write(b'{"at": 14, "before": "0\0\0')

    good(CsvAppender(path, lite).append([(claim(1, 2), row(1, "y"))], nothing))

    assert Path(path).read_text() == "n,text\n1,y\n"
    journal = Journal(path)
    with journal.held():
        assert [each.generation for each in Ledger(lite).parts(journal.number, ["1"])["1"]] == [2]
        assert journal.batch is None


def committed(store: Store) -> int:
    [(length,)] = sql(store, "select length from csvfile")
    return length


COMMIT = 4
"""The call of an append to an existing file that informs the tables."""


def test_uncommitted_bytes_are_cut_off(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    appender = CsvAppender(str(path), store)
    good(appender.append([(claim(1), row(1))], nothing))
    assert committed(store) == path.stat().st_size
    assert not in_a_child(lambda: appender.append([(claim(2), row(2))], nothing), Doom(COMMIT))
    assert path.read_text() == "n,text\n1,x\n2,x\n"
    assert committed(store) < path.stat().st_size
    with csv_file.held_for_reading(str(path)):
        pass  # who reads doesn't know what was committed

    good(CsvAppender(str(path), store).append([(claim(3), row(3))], nothing))

    assert path.read_text() == "n,text\n1,x\n3,x\n"
    assert committed(store) == path.stat().st_size
    good(CsvAppender(str(path), store).append([(claim(2, 9), row(2))], nothing))
    assert list(pd.read_csv(path).n) == [1, 3, 2]


def test_committed_bytes_stay_even_if_the_journal_missed_it(store: Store, tmp_path: Path) -> None:
    path, said = tmp_path / "sums.csv", list[str]()
    good(CsvAppender(str(path), store).append([(claim(1), row(1))], nothing))
    assert not in_a_child(
        lambda: CsvAppender(str(path), store).append([(claim(2), row(2))], nothing),
        Doom(COMMIT + 1),
    )
    with pytest.raises(Refused, match="has rows that 2 items have appended"):
        csv_journal.refuse_loss(str(path), "Do this.")
    again = [(claim(2, 9), row(2)), (claim(3, 9), row(3))]
    good(CsvAppender(str(path), store, said.append).append(again, nothing))
    assert list(pd.read_csv(path).n) == [1, 2, 3]
    assert said == []


def test_what_a_person_adds_after_a_kill_stays(lite: Store, tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    good(CsvAppender(str(path), lite).append([(claim(1), row(1))], nothing))
    assert not in_a_child(
        lambda: CsvAppender(str(path), lite).append([(claim(2), row(2))], nothing), Doom(COMMIT)
    )
    with path.open("a") as file:
        file.write("100,by hand\n")
    good(CsvAppender(str(path), lite).append([(claim(2, 2), row(2))], nothing))
    assert list(pd.read_csv(path).n) == [1, 100, 2]


@pytest.mark.parametrize(
    ("text", "told", "left"),
    [
        ("n,text\n1,x\n", "4 bytes shorter than", [1, 3]),
        ("n,text\n1,x\n2,x\n9,mine\n", "7 bytes longer than", [1, 2, 9, 3]),
        (None, "was removed", [3]),
    ],
    ids=["shorter", "longer", "gone"],
)
def test_a_changed_file_is_reported_in_one_line_and_nothing_is_lost(
    text: str | None, told: str, left: list[int], lite: Store, tmp_path: Path
) -> None:
    path, said = tmp_path / "sums.csv", list[str]()
    appender = CsvAppender(str(path), lite, said.append)
    good(appender.append([(claim(1), row(1)), (claim(2), row(2))], nothing))
    assert said == []
    path.unlink() if text is None else path.write_text(text)
    good(appender.append([(claim(3), row(3))], nothing))
    [line] = said
    assert line.startswith(f"{path} ")
    assert told in line
    assert list(pd.read_csv(path).n) == left
    good(appender.append([(claim(3, 2), row(3, "again"))], nothing))
    assert len(said) == 1


def test_a_journal_of_an_earlier_version_is_migrated(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    lines = [f"{n},x\n" for n in range(4)]
    path.write_text("n,text\n" + "".join(lines[:3]) + "3,")  # killed in the middle of the last
    parts = [[str(n), 1, 7 + 4 * n, 4, digest(lines[n].encode())] for n in range(4)]
    before = digest(path.read_bytes()[:19])
    Path(path_of(str(path))).write_text(
        "".join(
            json.dumps(line) + "\n"
            for line in (
                {"kept": parts[:1]},
                {"at": 11, "before": digest(b"n,text\n0,x\n"), "end": 19, "parts": parts[1:3]},
                {"done": 19},
                {"at": 19, "before": before, "end": 23, "parts": parts[3:]},
            )
        )
    )
    with pytest.raises(Refused, match="has rows that 3 items have appended"):
        csv_journal.refuse_loss(str(path), "Do this.")

    good(CsvAppender(str(path), store).append([(claim(1, 2), row(1, "again"))], nothing))

    assert path.read_text() == "n,text\n0,x\n1,again\n2,x\n"
    rows = sql(store, "select dataid, generation, jobid, start from csvpart")
    assert sorted(rows) == [
        ("0", 1, "orders", 7),
        ("1", 2, "orders", 11),
        ("2", 1, "orders", 19),
    ]
    assert committed(store) == path.stat().st_size
    assert "parts" not in Path(path_of(str(path))).read_text().splitlines()[0]
    good(CsvAppender(str(path), store).append([(claim(3, 2), row(3))], nothing))
    assert list(pd.read_csv(path).n) == [0, 1, 2, 3]
    with pytest.raises(Refused, match="has rows that 4 items have appended"):
        csv_journal.refuse_loss(str(path), "Do this.")


def test_a_journal_does_not_grow(
    lite: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_journal, "MAX_JOURNAL_BYTES", 1000)
    path = tmp_path / "sums.csv"
    for n in range(20):
        good(CsvAppender(str(path), lite).append([(claim(n), row(n))], nothing))
        assert os.path.getsize(path_of(str(path))) < 1600
    with pytest.raises(Refused, match="has rows that 20 items have appended"):
        csv_journal.refuse_loss(str(path), "Do this.")
    good(CsvAppender(str(path), lite).append([(claim(3, 2), row(3, "again"))], nothing))
    assert list(pd.read_csv(path).n) == list(range(20))


def test_what_another_store_has_committed_is_not_cut_off(
    lite: Store, tmp_path: Path, postgres_url: str
) -> None:
    other, path = open_store(postgres_url), tmp_path / "sums.csv"
    other.init()
    good(CsvAppender(str(path), lite).append([(claim(1), row(1))], nothing))
    assert not in_a_child(
        lambda: CsvAppender(str(path), lite).append([(claim(2), row(2))], nothing), Doom(COMMIT + 1)
    )
    good(CsvAppender(str(path), other).append([(claim(3), row(3))], nothing))
    assert list(pd.read_csv(path).n) == [1, 2, 3]
    close(other)


# --- tables ---


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> "Shop":
    """A database with a table of orders, and the dataset `sums` in it."""
    if request.param == "sqlite":
        shop = Shop(store, "sqlite", {"database": str(tmp_path / "shop.db")})
    else:
        parts = conninfo_to_dict(request.getfixturevalue("postgres_url"))
        host = f"{parts.get('host', '')}:{parts['port']}" if "port" in parts else parts["host"]
        shop = Shop(
            store,
            "postgresql",
            {
                "hostname": str(host),
                "database": str(parts["dbname"]),
                "username": str(parts.get("user", "")),
            },
        )
    shop.add()
    return shop


class Shop:
    """A database of its own, and a person's connection to it."""

    def __init__(self, store: Store, format: str, columns: dict[str, str]) -> None:
        self.store, self.format, self.columns = store, format, columns

    def add(self, slug: str = "sums", **more: str) -> None:
        columns = {"tablename": slug} | self.columns | more
        add_dataset(self.store, slug, format=self.format, **columns)

    def run(self, text: str) -> list[tuple]:
        if self.format == "sqlite":
            connection: Any = sqlite3.connect(self.columns["database"])
        else:
            host, _, port = self.columns["hostname"].partition(":")
            connection = psycopg.connect(
                host=host,
                port=port or None,
                dbname=self.columns["database"],
                user=self.columns["username"] or None,
            )
        try:
            cursor = connection.execute(text)
            found = cursor.fetchall() if cursor.description else []
            connection.commit()
            return found
        finally:
            connection.close()


@pytest.fixture
def url(sqlite_url: str) -> str:
    """The database of our own tables doesn't matter here."""
    return sqlite_url


def test_a_missing_table_is_created_for_the_frame(place: Shop, project: Project) -> None:
    made = frame(
        n=[1, 2],
        x=[1.5, None],
        ok=[True, False],
        day=[date(2026, 1, 2), None],
        at=pd.to_datetime(["2026-01-02T03:04:05", "2026-01-03T00:00:00"]),
        text=["a'b%s\n", None],
        price=[Decimal("1.20"), Decimal("3.00")],
        whole=pd.array([1, None], "Int64"),
        told=[{"a": "ü"}, None],
    ).rename(columns={"told": '100% "told"'})

    told = to(place.store, project).publish(made, chunk_of(place.store, "1"), nothing)
    again = to(place.store, project).publish(made[::-1], chunk_of(place.store, "2"), nothing)

    assert told == Result(2, location=to(place.store, project).location)
    assert again.rows == 2
    rows = place.run("select * from sums")
    assert len(rows) == 4
    assert rows[0] == rows[3]
    assert rows[0][:3] == (1, 1.5, True)
    assert rows[1][1] is None
    assert [str(each) for each in rows[0][3:6]] == ["2026-01-02", "2026-01-02 03:04:05", "a'b%s\n"]
    assert float(rows[0][6]) == 1.2
    assert rows[0][7:] == (1, '{"a": "\\u00fc"}')
    back = source_of(place.store, project, "sums").pandas()
    assert list(back.columns) == list(made.columns)
    assert list(back.n) == [1, 2, 2, 1]
    assert list(back.price) == [1.2, 3.0, 3.0, 1.2]


def test_a_run_replaces_all_rows_or_none(place: Shop, project: Project) -> None:
    place.add(writemode="replace")
    destination = to(place.store, project)
    destination.publish(row(1), chunk_of(place.store, "1"), nothing)

    destination.publish(row(2), chunk_of(place.store, "2"), nothing)
    with pytest.raises(StaleClaim):
        destination.publish(row(3), chunk_of(place.store, "3"), stale)
    with pytest.raises(Refused, match=r"has no column 'price': it has n, text\. Leave"):
        destination.publish(frame(price=[1]), chunk_of(place.store, "4"), nothing)

    assert place.run("select n, text from sums") == [(2, "x")]


def test_items_are_one_transaction_and_a_bad_one_is_left_out(place: Shop, project: Project) -> None:
    place.run(
        "create table sums (n integer primary key, text varchar(20) not null default 'none', "
        "day date)"
    )
    destination = to(place.store, project)
    parts = [
        (claim(1), frame(n=[1], text=["one"], day=["2026-01-02"])),
        (claim(2), frame(n=[1], text=["again"])),
        (claim(3), frame(n=[3.0], more=[1])),
        (claim(4), frame(n=[4.0, 5.0], text=["four", None])),
        (claim(5), frame(n=[6.0, 7.0])),
        (claim(6), frame()),
    ]

    verdicts = destination.append(parts, nothing)
    with pytest.raises(StaleClaim):
        destination.append([(claim(7), frame(n=[70]))], stale)

    assert [isinstance(each, Result) for each in verdicts] == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]
    assert all("\n" not in str(each) for each in verdicts)
    assert "sums" in str(verdicts[1])
    assert [(n, text) for n, text in place.run("select n, text from sums order by n")] == [
        (1, "one"),
        (6, "none"),
        (7, "none"),
    ]


def test_a_select_is_read_and_writes_nothing(place: Shop, project: Project) -> None:
    to(place.store, project).publish(
        frame(n=[1, 2], text=["50%", "b"]), chunk_of(place.store, "1"), nothing
    )
    place.add(
        "few", tablename="-- those that\nselect n + 1 as m from sums where text like '50%';\n"
    )

    found = source_of(place.store, project, "few")

    assert found.location.endswith("(SELECT)")
    assert found.version() is None
    assert_frame_equal(found.pandas(), frame(m=[2]))
    for text in (
        "select 1; delete from sums",
        "with gone as (delete from sums returning n) select * from gone",
        "with gone as (select 1) delete from sums",
    ):
        place.add("few", tablename=text)
        with pytest.raises((DataflowError, sqlite3.Warning)):
            source_of(place.store, project, "few").pandas()
    assert place.run("select count(*) from sums") == [(2,)]
    place.add("sums", tablename="select 1")
    with pytest.raises(Refused, match="is a SELECT, which can't be written to"):
        to(place.store, project)


def test_a_table_is_read_by_spark(place: Shop, project: Project, spark: "SparkSession") -> None:
    to(place.store, project).publish(
        frame(n=[1, 2], x=[1.5, None], text=["a", None]), chunk_of(place.store, "1"), nothing
    )
    place.add("few", tablename="select n from sums where n > 1")

    found = source_of(place.store, project, "sums").spark(spark)

    assert found.dtypes == [("n", "bigint"), ("x", "double"), ("text", "string")]
    assert sorted(map(tuple, found.collect())) == [(1, 1.5, "a"), (2, None, None)]
    few = source_of(place.store, project, "few").spark(spark)
    assert [tuple(each) for each in few.collect()] == [(2,)]


def test_a_frame_of_spark_is_written(
    place: Shop, project: Project, spark: "SparkSession", tmp_path: Path
) -> None:
    made = spark.sql(
        "select * from values (1L, 'a', timestamp'2026-01-02 03:04:05'), (null, 'b', null) "
        "as t(n, text, at)"
    )
    to(place.store, project).publish(made, chunk_of(place.store, "1"), nothing)
    add_dataset(
        place.store,
        "sums",
        format="csv",
        hostname=str(tmp_path / "sums.csv"),
        database="",
        tablename="",
        username="",
    )
    to(place.store, project).publish(made, chunk_of(place.store, "2"), nothing)

    assert [(n, text, str(at)) for n, text, at in place.run("select * from sums")] == [
        (1, "a", "2026-01-02 03:04:05"),
        (None, "b", "None"),
    ]
    assert (tmp_path / "sums.csv").read_text() == "n,text,at\n1,a,2026-01-02 03:04:05\n,b,\n"


def test_times_of_spark_are_written_as_its_clock_shows_them(
    place: Shop, project: Project, spark: "SparkSession"
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    zoned = "timestamptz" if place.format == "postgresql" else "text"
    place.run(f"create table sums (at timestamp, moment {zoned})")
    times = ["2020-01-01 10:00:00", "2020-11-01 01:30:00"]
    parsed = spark.createDataFrame([(each,) for each in times], "at string").selectExpr(
        "to_timestamp(at) as at", "to_timestamp(at) as moment"
    )
    destination = to(place.store, project)
    assert destination.publish(parsed, chunk_of(place.store, "1"), nothing).rows == 2
    read = source_of(place.store, project, "sums").spark(spark)  # and from a table to a table
    destination.publish(read.where("year(at) = 2020"), chunk_of(place.store, "2"), nothing)
    if place.format == "sqlite":
        assert place.run("select at, moment from sums") == [(each, each) for each in times] * 2
        return
    utc = ["2020-01-01 15:00:00", "2020-11-01 05:30:00"]  # of two hours, Spark takes the earlier
    rows = place.run("select at::text, (moment at time zone 'UTC')::text from sums order by at")
    assert sorted(rows) == sorted([*zip(times, utc, strict=True)] * 2)
    place.run("drop table sums")
    destination.publish(parsed, chunk_of(place.store, "3"), nothing)
    assert place.run("select at::text, moment::text from sums") == [(each, each) for each in times]


def test_a_table_kept_by_chunks_replaces_only_its_own(place: Shop, project: Project) -> None:
    place.add(chunkcolumn="run", writemode="append")
    place.run("create table sums (n integer, run varchar(20))")
    destination = to(place.store, project)
    chunk = chunk_of(place.store, "1")

    destination.publish(frame(n=[1, 2]), chunk, nothing)
    destination.publish(frame(n=[3]), chunk, nothing)
    verdicts = destination.append(
        [(claim(8, 8), frame(n=[8])), (claim(9, 9), frame(m=[9]))], nothing
    )
    destination.append([(claim(8, 9), frame(n=[80]))], nothing)

    assert isinstance(verdicts[0], Result)
    assert isinstance(verdicts[1], DataflowError)
    assert place.run("select n, run from sums order by n") == [(3, "1"), (80, "8")]
    tracked = source_of(place.store, project, "sums", Place("sums", {}), "8")
    assert list(tracked.pandas().n) == [80]
    assert sorted(source_of(place.store, project, "sums").pandas().n) == [3, 80]


def test_an_unusable_database_is_reported_in_one_line(
    store: Store, project: Project, tmp_path: Path, sqlite_url: str
) -> None:
    path = str(tmp_path / "no" / "shop.db")
    add_dataset(store, "sums", format="sqlite", database=path, tablename="sums")
    with pytest.raises(Refused, match="there is no file"):
        source_of(store, project, "sums").pandas()
    with pytest.raises(Refused, match="there is no file"):
        to(store, project).publish(row(1), chunk_of(store, "1"), nothing)
    ours = sqlite_url.removeprefix("sqlite:///")
    add_dataset(store, "sums", database=ours)
    with pytest.raises(Refused, match="has the tables of OpenDataFlow itself"):
        to(store, project).publish(row(1), chunk_of(store, "2"), nothing)
    add_dataset(store, "sums", format="jdbc", hostname="jdbc:h2:mem", database="")
    with pytest.raises(Refused, match=r"reached by JDBC.*--chunkcolumn COLUMN"):
        source_of(store, project, "sums")
    sql(store, "update dataset set writemode = 'often', format = 'csv', hostname = '/x.csv'")
    sql(store, "update dataset set tablename = null")
    with pytest.raises(
        Refused, match=r"has the writemode 'often', but it must be append or replace"
    ):
        to(store, project)


# --- what a slug stands for ---


def test_a_slug_without_a_registration_is_a_file_of_the_project(
    store: Store, project: Project
) -> None:
    found = source_of(store, project, "orders")

    assert found.location == str(project.root / "sources" / "orders.csv")
    assert registered(store, "orders", project.root) is None
    got = found.pandas()
    assert_frame_equal(got, pd.read_csv(project.root / "sources" / "orders.csv"))
    got.loc[0, "price"] = 100.0
    assert found.pandas().price[0] == 2.5

    version = found.version()
    assert version == source_of(store, project, "orders").version()
    with open(found.location, "a") as file:
        file.write("3,,1\n")
    assert found.version() != version

    with pytest.raises(Refused) as error:
        source_of(store, project, "gone").pandas()
    assert str(error.value) == (
        f"Source 'gone' is {project.root}/sources/gone.csv, which doesn't exist. Put a file "
        "there, or run: odf dataset add gone --hostname /path/FILE.csv"
    )
    assert error.value.code == "INVALID_LOCATION"
    with pytest.raises(Refused, match="doesn't exist"):
        source_of(store, project, "gone").version()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty: it has no header line. Correct the file."),
        (b"a,b\n1,2\n1,2,3\n", "can't be read as CSV: Error tokenizing data."),
        (b"a\n\xff\n", "isn't utf-8 at line 2, column 1: the byte 0xff"),
    ],
)
def test_a_file_that_isnt_csv_is_reported_in_one_line(
    store: Store, project: Project, data: bytes, said: str
) -> None:
    (project.root / "sources" / "orders.csv").write_bytes(data)

    with pytest.raises(Refused) as error:
        source_of(store, project, "orders").pandas()

    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_source_that_another_pipeline_makes_is_its_chunk_or_its_last_output(
    store: Store, project: Project, spark: "SparkSession"
) -> None:
    destination = to(store, project, read=True)
    told = destination.publish(row(1), chunk_of(store, "2026-01-02"), nothing)
    later = destination.append([(claim("7", 7), row(7))], nothing)
    csv_file.replace(output_file(project, "daily"), row(9))
    place = Place("sums", {}, told.location, 1)

    assert told.location == str(project.root / "output" / "sums" / "dataid=2026-01-02")
    tracked = source_of(store, project, "sums", place, "2026-01-02")
    assert_frame_equal(tracked.pandas(), row(1))
    assert [tuple(each) for each in tracked.spark(spark).collect()] == [(1, "x")]
    [seven] = good(later)
    place = Place("sums", {}, seven.location, 7)
    assert_frame_equal(source_of(store, project, "sums", place, "7").pandas(), row(7))
    assert_frame_equal(source_of(store, project, "sums").pandas(), row(9))


def test_an_unregistered_destination_is_the_file_for_people(store: Store, project: Project) -> None:
    destination = to(store, project)
    named = row(1).set_index(pd.Index(["a"], name="key"))

    told = destination.publish(named, chunk_of(store, "1"), nothing)
    path = output_file(project, "daily")
    good(destination.append([(claim(2), row(2))], nothing))

    assert told.location == destination.location == path == f"{project.root}/output/daily.csv"
    assert Path(path).read_text() == "n,text\n1,x\n2,x\n"


def test_the_writemode_of_a_csv_file_says_what_runs_and_items_do(
    store: Store, project: Project, tmp_path: Path
) -> None:
    path = tmp_path / "sums.csv"
    add_dataset(store, "sums", hostname=str(path), writemode="append")
    chunk = chunk_of(store, "1")
    to(store, project).publish(row(1), chunk, nothing)
    to(store, project).publish(row(1, "again"), chunk, nothing)
    to(store, project).publish(row(2), chunk_of(store, "2"), nothing)
    assert path.read_text() == "n,text\n1,again\n2,x\n"
    with pytest.raises(Refused, match="has no column 'price'"):
        to(store, project).publish(frame(price=[1]), chunk_of(store, "3"), nothing)

    add_dataset(store, "sums", writemode="replace")
    good(to(store, project).append([(claim(4), row(4)), (claim(5), row(5))], nothing))
    assert path.read_text() == "n,text\n5,x\n"
    assert source_of(store, project, "sums").location == str(path)


@pytest.mark.parametrize("registered_at", ["", "{tmp}/sums.csv"])
def test_a_run_does_not_replace_what_items_have_appended(
    store: Store, project: Project, tmp_path: Path, registered_at: str
) -> None:
    if registered_at:
        add_dataset(store, "sums", hostname=registered_at.format(tmp=tmp_path))
    good(to(store, project).append([(claim(1), row(1))], nothing))
    path = Path(to(store, project).location)

    to_folder = to(store, project, read=True)
    for refused in (
        to(store, project).refuse_loss,
        lambda: to(store, project).publish(row(9), chunk_of(store, "1"), nothing),
    ):
        with pytest.raises(Refused, match="has rows that 1 item has appended") as error:
            refused()
    where = "" if registered_at else f" --hostname {path}"
    assert f"run: odf dataset add sums{where} --writemode append. " in str(error.value)
    assert path.read_text() == "n,text\n1,x\n"
    if not registered_at:  # what others read is a folder, and the file for people another's
        to_folder.refuse_loss()
        with pytest.raises(Refused, match=f"Move it away: mv -n {path} {path.parent}/daily-items"):
            refuse_loss(project, project.pipeline("daily"), to_folder)

    add_dataset(store, "sums", hostname=str(path), writemode="append")
    to(store, project).refuse_loss()
    to(store, project).publish(row(2), chunk_of(store, "2"), nothing)
    assert list(pd.read_csv(path).n) == [1, 2]
    add_dataset(store, "sums", writemode="replace")
    to(store, project).refuse_loss()
    to(store, project).publish(row(3), chunk_of(store, "3"), nothing)
    assert list(pd.read_csv(path).n) == [3]


def test_the_file_for_people_is_known_by_any_path(
    store: Store, project: Project, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(project.root)
    linked = f"{tmp_path}/link/output/daily.csv"
    add_dataset(store, "sums", hostname=linked, writemode="append")
    pipeline = project.pipeline("daily")
    for number in (1, 2):
        chunk = chunk_of(store, str(number))
        publish_with_output(project, pipeline, to(store, project), row(number), chunk, nothing)
    assert list(pd.read_csv(linked).n) == [1, 2]


@pytest.mark.parametrize(
    "columns",
    [
        {"hostname": "./data/sums.csv"},
        {"hostname": "../sums.csv"},
        {"hostname": "./data/sums", "format": "parquet"},
        {"database": "./data.db", "tablename": "sums", "format": "sqlite"},
        {"database": "./data.db", "tablename": "sums", "chunkcolumn": "chunk", "format": "sqlite"},
    ],
)
def test_a_relative_place_is_in_the_project_wherever_it_is_run_from(
    store: Store,
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: dict[str, str],
    spark: "SparkSession",
) -> None:
    add_dataset(store, "sums", **columns)
    sqlite3.connect(project.root / "data.db").execute(
        "create table sums (n integer, text varchar(9), chunk varchar(9))"
    )
    chunk = chunk_of(store, "1")
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    told = to(store, project).publish(row(1), chunk, nothing)
    store.finish(chunk.claim, [Fact("sums", "1", told.location, told.rows)])

    monkeypatch.chdir(tmp_path / "there")
    assert told.location is not None
    assert told.location.startswith(str(tmp_path))
    assert source_of(store, project, "sums").pandas().n.tolist() == [1]
    for made in (told.location, place_of(columns)):  # the second is that of a chunk made by hand
        place = Place("sums", columns, made, chunk.generation)
        found = source_of(store, project, "sums", place, "1")
        assert found.pandas().n.tolist() == [1]
        assert [each.n for each in found.spark(spark).collect()] == [1]
    assert not [*(tmp_path / "here").iterdir(), *(tmp_path / "there").iterdir()]
    [answer] = [
        each for each in explain(store, "daily", "1").answers if each.question == "location"
    ]
    assert answer.ok is True, answer.text


def test_a_bare_file_name_is_explained_to_be_a_host(store: Store, project: Project) -> None:
    add_dataset(store, "orders", hostname="ORDERS.csv")
    with pytest.raises(Refused) as error:
        source_of(store, project, "orders")
    assert str(error.value) == (
        "'orders' is registered at ORDERS.csv, which is the name of a host and not a path. "
        "Run: odf dataset add orders --hostname /path/ORDERS.csv"
    )


def test_a_folder_source_is_its_ready_chunks(
    store: Store, project: Project, tmp_path: Path, spark: "SparkSession"
) -> None:
    root = tmp_path / "sums"
    add_dataset(store, "sums", hostname=str(root), format="parquet")
    found = source_of(store, project, "sums")
    with pytest.raises(Refused, match="which doesn't exist"):
        found.pandas()
    root.mkdir()
    row(0).to_parquet(root / "by-hand.parquet")
    assert_frame_equal(found.pandas(), row(0))
    (root / "by-hand.parquet").unlink()

    for dataid in ("10", "9", "11"):
        chunk = chunk_of(store, dataid)
        told = to(store, project).publish(row(int(dataid)), chunk, nothing)
        if dataid == "10":
            with pytest.raises(Refused, match="no READY chunk"):
                found.pandas()
            empty = found.version()
        if dataid != "11":
            store.finish(chunk.claim, [Fact("sums", dataid, told.location, told.rows)])

    assert list(found.pandas().n) == [9, 10]
    assert [each.n for each in found.spark(spark).orderBy("n").collect()] == [9, 10]
    assert found.version() not in (None, empty)
    assert found.version() == source_of(store, project, "sums").version()


@pytest.mark.parametrize("whole", [64 * 2**20, 1])
def test_a_source_is_read_as_it_is_declared(
    store: Store,
    project: Project,
    spark: "SparkSession",
    monkeypatch: pytest.MonkeyPatch,
    whole: int,
) -> None:
    """By pandas, and by Spark's own tasks if it is large."""
    monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", whole)
    monkeypatch.setattr("opendataflow_dagster.pipelines.sources.WHOLE_FILE_BYTES", whole)
    file = project.root / "sources" / "orders.csv"
    file.write_bytes("id;zip;name\n1;007;Müller\n2;NA;-\n".encode("cp1252"))
    with pytest.raises(Refused, match="isn't utf-8 at line 2, column 8: the byte 0xfc"):
        source_of(store, project, "orders").pandas()
    options = '{"delimiter": ";", "encoding": "cp1252", "strings": ["zip"], "null": "-"}'
    add_dataset(store, "orders", hostname=str(file), options=options)

    source = source_of(store, project, "orders")

    assert source.pandas().astype(object).values.tolist()[0] == [1, "007", "Müller"]
    rows = [(1, "007", "Müller"), (2, "NA", None)]
    assert [tuple(row) for row in source.spark(spark).collect()] == rows
    add_dataset(store, "sums", hostname="./sums.csv", options=options)
    with pytest.raises(Refused, match="a pipeline writes commas and UTF-8"):
        to(store, project)


def test_a_large_csv_file_has_the_types_of_pandas_in_spark(
    tmp_path: Path, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.csv"
    path.write_text(
        "n,x,ok,maybe,day,code,nothing,text,text\n"
        '1,1,True,TRUE,2026-01-02,007,,"a ""b"", c",NA\n'
        "\n"
        "2,2.5,False,,,7,NaN, y ,null\n"
        "-3,inf,true,false,2026-01-04 ,08,NA,\\z,d\n"
    )
    small = CsvSource(str(path), "large").spark(spark)
    monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr(sources, "INFERENCE_ROWS", 2)
    large = CsvSource(str(path), "large").spark(spark)

    assert (
        large.dtypes
        == small.dtypes
        == [
            ("n", "bigint"),
            ("x", "double"),
            ("ok", "boolean"),
            ("maybe", "boolean"),
            ("day", "string"),
            ("code", "bigint"),
            ("nothing", "double"),
            ("text", "string"),
            ("text.1", "string"),
        ]
    )
    assert large.collect() == small.collect()
    path.write_text('n,text\n1,"two\nlines"\n2,x\n')
    assert [tuple(each) for each in CsvSource(str(path), "large").spark(spark).collect()] == [
        (1, "two\nlines"),
        (2, "x"),
    ]
    path.write_text("a,b\n1,2,3\n4,5,6\n")  # pandas takes the first for the index
    assert [tuple(each) for each in CsvSource(str(path), "large").spark(spark).collect()] == [
        (2, 3),
        (5, 6),
    ]


# --- the types of a table that is made ---


def types_of(place: Shop) -> dict[str, str]:
    """Column → type, as PostgreSQL has it."""
    return dict(
        place.run(
            "select column_name, data_type from information_schema.columns "
            "where table_name = 'sums' and table_schema = current_schema()"
        )
    )  # type: ignore[arg-type]


def test_other_values_in_a_text_column_are_written_as_in_csv(
    place: Shop, project: Project, tmp_path: Path
) -> None:
    which = UUID("8dfd7e02-976f-49bd-a6b4-3c1f4a7e9f10")
    made = frame(id=[which, which], told=["x", [1]], odd=["y", Decimal("1.50")])
    csv_file.replace(str(tmp_path / "sums.csv"), made)

    to(place.store, project).publish(made, chunk_of(place.store, "1"), nothing)

    assert place.run("select id, told, odd from sums") == [
        (str(which), "x", "y"),
        (str(which), "[1]", "1.50"),
    ]
    assert list(pd.read_csv(tmp_path / "sums.csv").id) == [str(which)] * 2


def test_booleans_and_json_have_their_own_texts_in_postgres(place: Shop, project: Project) -> None:
    if place.format == "sqlite":
        pytest.skip("it has no such types")
    place.run("create table sums (text text, told jsonb, id uuid, flag boolean)")
    which = UUID("8dfd7e02-976f-49bd-a6b4-3c1f4a7e9f10")
    made = frame(
        text=pd.Series([True, "x", {"a": 1}], dtype=object),
        told=pd.Series([True, 1.5, {"a": None}], dtype=object),
        id=[which, None, str(which)],
        flag=[True, False, None],
    )
    to(place.store, project).publish(made, chunk_of(place.store, "1"), nothing)
    assert place.run("select * from sums") == [
        ("True", True, which, True),
        ("x", 1.5, None, False),
        ('{"a": 1}', {"a": None}, which, None),
    ]


def test_a_column_of_dates_and_times_keeps_the_times(place: Shop, project: Project) -> None:
    made = frame(at=pd.Series([date(2020, 1, 1), datetime(2020, 1, 1, 2, 30)], dtype=object))
    to(place.store, project).publish(made, chunk_of(place.store, "1"), nothing)
    found = [str(at) for (at,) in place.run("select at from sums")]
    assert found[1] == "2020-01-01 02:30:00"
    assert found[0].startswith("2020-01-01")
    if place.format == "postgresql":
        assert types_of(place) == {"at": "timestamp without time zone"}
        zoned = frame(at=pd.Series([date(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC)]))
        assert columns_for(zoned, POSTGRES) == {"at": "timestamptz"}
        assert columns_for(zoned[:1], POSTGRES) == {"at": "date"}


def test_a_time_that_a_column_of_dates_would_lose_is_refused(place: Shop, project: Project) -> None:
    if place.format == "sqlite":
        pytest.skip("its columns lose nothing")
    place.run("create table sums (n integer, day date)")
    destination = to(place.store, project)
    for late in (datetime(2020, 1, 1, 2, 30), pd.Timestamp("2020-01-01 02:30", tz="UTC")):
        verdicts = destination.append(
            [
                (claim(1), frame(n=[1], day=[late])),
                (claim(2), frame(n=[2], day=[datetime(2020, 1, 2)])),
            ],
            nothing,
        )
        assert str(verdicts[0]).startswith(f"Column 'day' is of dates, and {late} has a time.")
        assert "\n" not in str(verdicts[0])
        assert isinstance(verdicts[1], Result)
    assert place.run("select n, day from sums") == [(2, date(2020, 1, 2))] * 2


def test_the_first_item_does_not_decide_what_numbers_the_next_may_have(
    place: Shop, project: Project
) -> None:
    destination = to(place.store, project)
    for number, celsius in enumerate((-18, -18.5, 4)):
        made = frame(celsius=[celsius], id=[2**60 + number], big=[2**64 if not number else 1.5])
        if place.format == "sqlite":  # it has no whole numbers of more than 64 bits
            made = made.drop(columns="big")
        good(destination.append([(claim(number), made)], nothing))
    both = pd.Series([4, 4.5], dtype=object)
    good(destination.append([(claim(9), frame(celsius=both))], nothing))

    found = place.run("select celsius, id from sums")
    assert [float(celsius) for celsius, _ in found] == [-18, -18.5, 4, 4, 4.5]
    assert [each and int(each) for _, each in found] == [2**60, 2**60 + 1, 2**60 + 2, None, None]
    if place.format == "postgresql":
        assert types_of(place) == {
            "celsius": "double precision",
            "id": "numeric",
            "big": "numeric",
        }
        [told] = destination.append([(claim(10), frame(celsius=[2**60 + 1]))], nothing)
        assert str(told).startswith(
            f"Column 'celsius' is of double precision, which would round {2**60 + 1}. Change"
        )


def test_whole_numbers_of_a_run_stay_so_and_large_ones_are_kept(
    place: Shop, project: Project
) -> None:
    if place.format == "sqlite":
        pytest.skip("it has no whole numbers of more than 64 bits")
    made = frame(n=[1, 2**60 + 1], unsigned=[1, 2**63], large=[-(2**70), None])
    made["both"] = pd.Series([1, 2.5], dtype=object)
    to(place.store, project).publish(made, chunk_of(place.store, "1"), nothing)
    assert types_of(place) == {
        "n": "bigint",
        "unsigned": "numeric",
        "large": "numeric",
        "both": "double precision",
    }
    assert place.run("select * from sums") == [
        (1, 1, -(2**70), 1.0),
        (2**60 + 1, 2**63, None, 2.5),
    ]
