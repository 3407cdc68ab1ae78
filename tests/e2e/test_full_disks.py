"""Full disks: nothing is lost or duplicated, and work continues when there is room."""

from pathlib import Path

import pandas as pd
import pytest

from opendataflow_dagster.errors import DataflowError, Refused
from opendataflow_dagster.pipelines.csv_file import CsvAppender
from opendataflow_dagster.pipelines.destinations import CsvDestination
from opendataflow_dagster.pipelines.frames import is_to_blame
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.item_folding import fold_items, folds, reclaim_room
from tests.pipelines.test_places import claim, good, nothing, row
from tests.store.test_item_folding import age, left, send, work
from tests.support.disks import fill, small
from tests.support.store_fixtures import check, close, everything, register

__all__ = ["small"]

PAGE = 4096


@pytest.mark.parametrize("tables", ["here", "elsewhere"])
def test_rows_appended_to_a_full_disk_are_stored_once(
    small: Path, tmp_path: Path, tables: str
) -> None:
    store = open_store(f"sqlite:///{small if tables == 'here' else tmp_path}/dataflow.db")
    store.init()
    path = small / "live.csv"

    def append(parts: list) -> None:
        where = CsvDestination(CsvAppender(str(path), store), str(path), "", "live")
        good(where.append(parts, nothing))

    append([(claim(0), row(0))])
    errors: list[DataflowError] = []
    for pages in range(0, 24, 2):
        numbers = range(3 * pages + 1, 3 * pages + 4)
        parts = [(claim(each), row(each, "x" * PAGE)) for each in numbers]
        parts.append((claim(0, pages + 2), row(0, "y" * (pages % 3))))  # it is written anew
        filler = fill(small, pages * PAGE)
        for _ in range(2):
            try:
                append(parts)
            except DataflowError as error:
                errors.append(error)
        filler.unlink()
        append(parts)
        found = pd.read_csv(path, keep_default_na=False)
        assert sorted(found.n) == sorted(
            [0, *(n for p in range(0, pages + 1, 2) for n in range(3 * p + 1, 3 * p + 4))]
        )
    full = "live.csv can't be written: No space left on device. Make room there, or make"
    assert any(full in str(each) for each in errors), errors
    assert not any("\n" in str(each) for each in errors)
    assert all(isinstance(each, Refused) or not is_to_blame(each) for each in errors)
    assert {each.name for each in small.glob(".live*")} == {".live.csv.odf"}
    close(store)


def test_items_wait_while_the_tables_disk_is_full(small: Path, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{small}/dataflow.db")
    store.init()
    path = tmp_path / "live.csv"
    where = CsvDestination(CsvAppender(str(path), store), str(path), "", "live")
    parts = [(claim(each), row(each)) for each in range(300)]
    store.db.drop()  # its log begins anew
    filler = fill(small, 12 * PAGE)
    with pytest.raises(DataflowError, match=r"disk is full\. Make room") as full:
        where.append(parts, nothing)
    assert not is_to_blame(full.value)
    filler.unlink()
    good(where.append(parts, nothing))
    assert sorted(pd.read_csv(path).n) == list(range(300))
    close(store)


def test_items_that_are_folded_on_a_full_disk_stay_until_there_is_room(small: Path) -> None:
    store = open_store(f"sqlite:///{small}/dataflow.db")
    store.init()
    register(store, "orders", [], ["sold"])
    done, told = 0, list[str]()
    for pages in range(0, 24, 4):
        send(store, 30)
        work(store)
        age(store)
        before = everything(store)
        filler, folded = fill(small, pages * PAGE), 0
        try:
            folded = fold_items(store)
            reclaim_room(store)
        except DataflowError as error:
            told.append(str(error))
        if not folded:
            assert everything(store) == before
        filler.unlink()
        folded += fold_items(store)
        done += 30
        assert folded == 30
        assert folds(store)[0].items == done
        assert set(left(store).values()) == {0}
        check(store)
    assert told
    assert all("Make room on the disk" in each for each in told)
    close(store)
