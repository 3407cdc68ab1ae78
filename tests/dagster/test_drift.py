"""`odf drift`: the tables, Dagster's grid and the data, side by side."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.reconcile import repair
from opendataflow_dagster.model import FAILED, READY, Fact, new_owner
from opendataflow_dagster.storage import presence
from opendataflow_dagster.storage.presence import Drift, drift_of_data
from opendataflow_dagster.store import operations, overview, registry
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store.database import Database
from opendataflow_dagster.store.store import Store
from tests.support.dagster_instances import NAMES, Grid
from tests.support.store_fixtures import sql

DAYS = ["2026-11-02", "2026-11-03", "2026-11-04"]


def odf(store: Store, home: Path | None, *line: str) -> Result:
    url = store.db.url if store.db.dialect == "postgres" else f"sqlite:///{store.db.path}"  # type: ignore[attr-defined]
    env = {"DATAFLOW_URL": url, "DAGSTER_HOME": str(home) if home else None}
    return CliRunner().invoke(app, ["drift", *line], prog_name="odf", env=env)


def of_data(store: Store) -> list[Drift]:
    return list(drift_of_data(store, read_catalog(store)))


def test_each_kind_of_difference_is_reported(grid: Grid) -> None:
    operations.ready(grid.store, "orders", DAYS)
    grid.tick()
    sql(grid.store, f"update datastatus set status = 'FAILED' where dataid = '{DAYS[0]}'")
    sql(grid.store, f"delete from datastatus where dataid = '{DAYS[1]}'")
    operations.ready(grid.store, "orders", ["2026-12-01"])
    found = {(each.dataid, each.tables, each.dagster) for each in drift(grid.store, grid.mirror)}
    assert found == {
        (DAYS[0], "FAILED", "READY"),
        (DAYS[1], "missing", "READY"),
        (DAYS[1], "no chunk", "a partition key"),
        ("2026-12-01", "READY", "missing"),
        ("2026-12-01", "READY", "no partition key"),
    }
    repair(grid.store, grid.instance)
    assert drift(grid.store, grid.mirror) == []
    assert grid.squares("orders") == {DAYS[0]: FAILED, DAYS[2]: READY, "2026-12-01": READY}


def test_another_generation_is_a_difference(grid: Grid) -> None:
    operations.ready(grid.store, "orders", DAYS)
    for _ in range(2):
        [claim] = grid.store.claim("copy", owner=new_owner(), only=DAYS[0])
        grid.store.finish(claim)
        if not grid.cursor:
            grid.tick()
            operations.resubmit(grid.store, "copy", [DAYS[0]])
    [found] = drift(grid.store, grid.mirror)
    assert (found.tables, found.dagster) == (READY, "READY of an earlier generation")
    assert found.run == "odf drift --repair"


def test_an_outdated_cache_is_found_and_repaired(grid: Grid) -> None:
    operations.ready(grid.store, "orders", DAYS)
    grid.tick()
    key = NAMES.asset_key("orders")
    grid.squares("orders")
    record = grid.instance.get_asset_records([key])[0]
    stale = record.asset_entry.cached_status
    operations.hold(grid.store, "external", DAYS)
    operations.release(grid.store, "external", DAYS)
    sql(grid.store, f"delete from datastatus where dataid <> '{DAYS[0]}'")
    grid.tick()
    grid.instance.add_dynamic_partitions(NAMES.partitions_name("orders"), DAYS)
    grid.instance.update_asset_cached_status_data(key, stale)
    found = drift(grid.store, grid.mirror)
    assert {each.dagster for each in found} == {
        "READY, by an outdated cache",
        "a partition key",
    }
    repair(grid.store, grid.instance)
    assert drift(grid.store, grid.mirror) == []


def test_missing_and_orphaned_data_is_reported(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for name in (f"{DAYS[0]}.csv", f"day={DAYS[1]}", "2020-01-01.csv", "_SUCCESS"):
        (folder / name).mkdir(parents=True)
    registry.add_dataset(store, "orders")
    registry.add_dataset(store, "copies", hostname=str(folder))
    registry.add_job(store, "copy", ["orders"], ["copies"])
    operations.ready(store, "orders", DAYS)
    for claim in store.claim("copy", owner=new_owner(), k=3):
        store.finish(claim, [Fact("copies", claim.dataid, location=str(folder))])
    gone, unknown = sorted(of_data(store), key=lambda each: each.dataid, reverse=True)
    assert (gone.dataid, gone.data) == (DAYS[2], f"data is gone: {folder}/{DAYS[2]}")
    assert gone.run == f"odf resubmit copy {DAYS[2]}"
    assert (unknown.dataid, unknown.tables) == ("2020-01-01", "missing")
    assert unknown.data == f"data of no known chunk: {folder}/2020-01-01.csv"


def test_a_chunk_that_recorded_its_own_place_is_looked_for_there(
    store: Store, tmp_path: Path
) -> None:
    registry.add_dataset(store, "orders")
    registry.add_dataset(store, "copies", hostname="db1", tablename="copies")
    registry.add_job(store, "copy", ["orders"], ["copies"])
    operations.ready(store, "orders", DAYS[:2])
    (tmp_path / DAYS[0]).touch()
    for claim in store.claim("copy", owner=new_owner(), k=2):
        store.finish(claim, [Fact("copies", claim.dataid, location=str(tmp_path / claim.dataid))])
    [found] = of_data(store)
    assert (found.dataid, found.data) == (DAYS[1], f"data is gone: {tmp_path / DAYS[1]}")


def test_for_a_large_dataset_the_last_changed_chunks_are_compared(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "MANY", 2)
    monkeypatch.setattr(presence, "NEWEST", 1)
    folder = tmp_path / "data"
    folder.mkdir()
    registry.add_dataset(store, "bobin", hostname=str(folder))
    registry.add_job(store, "load", ["raw"], ["bobin"])
    for dataid in ("1", "2", "3"):
        operations.ready(store, "raw", [dataid])
        [claim] = store.claim("load", owner="me")
        store.finish([claim], [Fact("bobin", dataid, location=str(folder / dataid))])
        time.sleep(0.01)

    some = presence.newest_of_large(store, ["bobin", "raw"])
    assert list(some) == ["bobin", "raw"]
    newest = list(drift_of_data(store, read_catalog(store), "bobin", some))
    assert [(each.dataid, each.data.split(":")[0]) for each in newest] == [("3", "data is gone")]
    assert len(list(drift_of_data(store, read_catalog(store), "bobin"))) == 3


def test_all_chunks_are_compared_some_at_a_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "PAGE_CHUNKS", 2)
    monkeypatch.setattr(presence, "_PIECE", 2)
    sizes = []
    whole = presence.truths

    def some(store: Store, datasetid: str, dataids: list[str] | None = None) -> dict:
        sizes.append(9 if dataids is None else len(dataids))
        return whole(store, datasetid, dataids)

    monkeypatch.setattr(presence, "truths", some)
    names = ["a", "b", "c%2Fd", "e", "odd 1", "odd 2", "odd 3"]
    for name in names:
        (tmp_path / "data" / f"day={name}").mkdir(parents=True)
    registry.add_dataset(store, "orders", hostname=str(tmp_path / "data"))
    operations.ready(store, "orders", ["a", "b", "c/d", "e", "f", "g", "h"])

    found = of_data(store)

    assert max(sizes) == 2, "no more than a page is held in memory"
    assert [(each.dataid, each.data.split(":")[0]) for each in found] == [
        *((each, "data is gone") for each in "fgh"),
        *((f"odd {each}", "data of no known chunk") for each in "123"),
    ]


def test_drift_is_limited_and_filtered_like_other_listings(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    registry.add_dataset(store, "copies", hostname=str(folder))
    registry.add_job(store, "copy", ["orders"], ["copies"])
    operations.ready(store, "orders", DAYS)
    for claim in store.claim("copy", owner=new_owner(), k=3):
        place = str(folder / claim.dataid)
        store.finish(claim, [Fact("copies", claim.dataid, location=place)])
    (folder / "2020-01-01").touch()
    (folder / DAYS[2]).touch()
    sql(store, "update datastatus set modified = '2020-01-01' where dataid = :day", day=DAYS[0])

    read: list[str] = []
    run = Database.run

    def counted(db: Database, name: str, /, **params: Any) -> Any:
        read.append(name)
        return run(db, name, **params)

    monkeypatch.setattr(type(store.db), "run", counted)

    def days(*words: str) -> list[str]:
        read.clear()
        told = odf(store, None, "--no-dagster", "--json", *words)
        assert read.count("catalog.jobs") == 1
        return [row["dataid"] for row in json.loads(told.stdout)]

    assert days() == ["2020-01-01", *DAYS[:2]]
    assert days("--limit", "2") == ["2020-01-01", DAYS[0]]
    assert days("--status", "READY") == DAYS[:2]
    assert days("--status", "pending") == ["2020-01-01"]
    assert days("--since", "2021-01-01") == [DAYS[1]]
    assert days("copies", "--all") == ["2020-01-01", *DAYS[:2]]
    few = odf(store, None, "--no-dagster", "--limit", "1")
    assert few.exit_code == 1
    assert "The first 1 rows: --limit or --all shows more" in few.stderr
    assert "3 differences." in few.stderr
    for words in (("--limit", "1", "--all"), ("--status", "BAD"), ("--since", "soon")):
        assert odf(store, None, "--no-dagster", *words).exit_code == 2


def test_a_missing_folder_is_reported_in_one_line(store: Store) -> None:
    registry.add_dataset(store, "orders", hostname="/nowhere/at/all")
    operations.ready(store, "orders", DAYS)
    [found] = of_data(store)
    assert found.data == "folder is gone: /nowhere/at/all"


def test_directories_without_a_dataid_are_ignored(store: Store, tmp_path: Path) -> None:
    (tmp_path / "all.parquet").touch()
    registry.add_dataset(store, "orders", hostname=str(tmp_path))
    operations.ready(store, "orders", DAYS)
    assert of_data(store) == []


def test_the_command_reports_repairs_and_exits(grid: Grid) -> None:
    operations.ready(grid.store, "orders", DAYS)
    home = Path(grid.instance.root_directory)
    told = odf(grid.store, home, "--json", "--status", "READY", "--since", "2020-01-01")
    assert {row["dataid"] for row in json.loads(told.stdout)} == set(DAYS)
    told = odf(grid.store, home, "--json")
    assert told.exit_code == 1
    assert {row["dataid"] for row in json.loads(told.stdout)} == set(DAYS)
    mended = odf(grid.store, home, "--repair")
    assert mended.exit_code == 0, mended.stderr
    told = "7 corrections: 3 shown as READY, 3 partition keys, 1 run outside Dagster.\n"
    assert told in mended.stderr
    assert odf(grid.store, home).exit_code == 0
    assert "No drift." in odf(grid.store, home).stderr


def test_the_command_without_a_dagster_says_what_to_set(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = odf(grid.store, None)
    assert refused.exit_code == 2
    assert "DAGSTER_HOME isn't set" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert odf(grid.store, None, "--no-dagster").exit_code == 0
    unknown = odf(grid.store, Path(grid.instance.root_directory), "nothing")
    assert unknown.exit_code == 4
    assert "Dataset 'nothing' isn't registered. See `odf dataset list`." in unknown.stderr
    wrong = odf(grid.store, None, "--translator", "no_such:Thing")
    assert wrong.exit_code == 2
    assert "MODULE:CLASS" in wrong.stderr
    monkeypatch.setenv("DATAFLOW_TRANSLATOR", "no_such:Thing")
    assert odf(grid.store, None).stderr == wrong.stderr


def test_a_users_own_translator_is_used(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations.ready(grid.store, "orders", DAYS)
    home = Path(grid.instance.root_directory)
    (tmp_path / "house_names.py").write_text("from tests.dagster.test_drift import Renamed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    line = ["--repair", "--translator", "house_names:Renamed"]
    assert odf(grid.store, home, *line).exit_code == 0
    assert grid.instance.get_latest_materialization_event(dg.AssetKey(["house", "orders"]))


class Renamed(type(NAMES)):
    def asset_key(self, datasetid: str) -> dg.AssetKey:
        return dg.AssetKey(["house", datasetid])


@pytest.mark.parametrize("where", ["before", "after"])
def test_deleting_the_run_of_a_chunk_is_drift_until_a_tick(grid: Grid, where: str) -> None:
    operations.ready(grid.store, "orders", DAYS)
    grid.tick()

    @dg.asset(key=NAMES.asset_key("copies"), partitions_def=NAMES.partitions_def("orders"))
    def copies() -> None:
        [claim] = grid.store.claim("copy", owner=new_owner(), only=DAYS[0])
        grid.store.finish(claim)

    done = dg.materialize([copies], instance=grid.instance, partition_key=DAYS[0])
    grid.tick()
    if where == "before":
        dg.materialize(
            [copies], instance=grid.instance, partition_key=DAYS[1], raise_on_error=False
        )
    grid.instance.delete_run(done.run_id)
    grid.tick()
    assert grid.squares("copies") == {DAYS[0]: READY}
    grid.agrees()
