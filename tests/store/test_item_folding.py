"""Finished items leave the tables: a count, a range and a digest stay of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import Refused
from opendataflow_dagster.location import Folder, is_packed
from opendataflow_dagster.model import Fact
from opendataflow_dagster.pipelines.sources import FolderSource
from opendataflow_dagster.pipelines.worker import Bell, ItemWorker
from opendataflow_dagster.store import item_folding
from opendataflow_dagster.store.history import Step, record
from opendataflow_dagster.store.item_folding import fold_items, fold_of, folds
from opendataflow_dagster.store.items import Accepted, Post, accept
from opendataflow_dagster.store.operations import delete_run, hold, ready, release, resubmit
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, connect, pending, register, sql, take

TABLES = ("datastatus", "dataevent", "chunkfact", "streamitem", "pipelinestep", "claim", "pending")


@pytest.fixture(autouse=True)
def pipeline(store: Store) -> None:
    register(store, "orders", [], ["sold"])


def send(store: Store, count: int, key: str | None = None) -> list[str]:
    [answer] = accept(store, [Post("orders", tuple(map(str, range(count))), key)])
    assert isinstance(answer, Accepted), answer
    return list(answer.dataids)


def work(store: Store, jobid: str = "orders", out: str = "sold", **fact: Any) -> list[str]:
    """Finish everything that may be claimed; return the chunks."""
    claims = take(store, jobid, k=99)
    if claims:
        store.finish(claims, [Fact(out, each.dataid, rows=1, **fact) for each in claims])
        record(
            store,
            [
                Step(jobid, each.dataid, each.generation, 1, "price", "READY", 1.0, 2.0)
                for each in claims
            ],
        )
    return [each.dataid for each in claims]


def age(store: Store) -> None:
    """Age all items: they arrived and finished ten days ago."""
    for table, column in (
        ("streamitem", "received"),
        ("chunkfact", "at"),
        ("streamkey", "received"),
    ):
        sql(store, f"update {table} set {column} = '2026-01-01 00:00:00'")


def left(store: Store) -> dict[str, int]:
    """How many rows each table has."""
    return {table: sql(store, f"select count(*) from {table}")[0][0] for table in TABLES}


def odf(store: Store, *words: str) -> Any:
    db: Any = store.db
    url = f"sqlite:///{db.path}" if db.dialect == "sqlite" else db.url
    return CliRunner().invoke(app, words, env={"DATAFLOW_URL": url})


def test_a_finished_item_leaves_every_table_and_a_count_a_range_and_a_digest_stay(
    store: Store,
) -> None:
    ids = send(store, 5)
    work(store)
    assert fold_items(store) == 0, "they are too young"
    age(store)

    assert fold_items(store) == 5

    assert left(store) == dict.fromkeys(TABLES, 0)
    [fold] = folds(store)
    assert fold[:4] == ("orders", 5, int(ids[0]), int(ids[-1]))
    [(digest,)] = sql(store, "select digest from streamfold")
    more = send(store, 2)
    work(store)
    age(store)
    assert fold_items(store) == 2
    [fold] = folds(store)
    assert fold[:4] == ("orders", 7, int(ids[0]), int(more[-1]))
    [(later,)] = sql(store, "select digest from streamfold")
    assert len(later) == 64
    assert later != digest
    check(store)


def test_more_than_a_page_is_folded_despite_items_that_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_folding, "FOLD_PAGE_ITEMS", 3)
    ids = send(store, 10)
    claims = take(store, "orders", k=4)
    for claim in claims:
        store.fail(claim, "no good")
    work(store)
    age(store)
    assert fold_items(store) == 6
    assert sorted(sql(store, "select dataid, status from datastatus")) == sorted(
        (each, "FAILED") for each in ids[:4]
    )
    resubmit(store, "orders", ids[:1])
    work(store)
    age(store)
    assert fold_items(store) == 1
    assert folds(store)[0][1:4] == (7, int(ids[0]), int(ids[-1]))


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "FAILED", "RESUBMIT", "HOLD"])
def test_only_what_is_ready_is_folded(store: Store, status: str) -> None:
    [dataid] = send(store, 1)
    if status == "RUNNING":
        take(store, "orders")
    elif status != "PENDING":
        work(store)
        sql(store, "update datastatus set status = :s", s=status)
    age(store)
    before = left(store)
    assert fold_items(store) == 0
    assert left(store) == before
    assert fold_of(store, "orders", dataid) is None


def test_items_that_a_second_pipeline_has_yet_to_read_stay(store: Store) -> None:
    register(store, "mail", ["sold"], ["mailed"])
    register(store, "count", ["mailed"], ["counted"])
    ids = send(store, 3)
    work(store)
    age(store)
    assert fold_items(store) == 0, "nobody has read them"
    assert work(store, "mail", "mailed") == ids
    [late] = take(store, "count")
    age(store)
    assert fold_items(store) == 0, "the last of the chain lags"

    store.finish([late], [Fact("counted", late.dataid)])
    age(store)
    assert fold_items(store) == 1
    assert {key for key in pending(store)} == {("count", each) for each in ids[1:]}
    work(store, "count", "counted")
    age(store)
    assert fold_items(store) == 2
    assert left(store) == dict.fromkeys(TABLES, 0)
    assert [fold[:2] for fold in folds(store)] == [("count", 3), ("mail", 3), ("orders", 3)]
    check(store)


def test_stale_chunks_stay(store: Store) -> None:
    register(store, "mail", ["sold"], ["mailed"])
    [dataid] = send(store, 1)
    work(store)
    work(store, "mail", "mailed")
    resubmit(store, "orders", [dataid])
    work(store)
    age(store)
    assert fold_items(store) == 0
    resubmit(store, "mail", [dataid])
    work(store, "mail", "mailed")
    age(store)
    assert fold_items(store) == 1


def test_chunks_in_replaced_files_and_packs_stay(store: Store) -> None:
    ids = send(store, 3)
    work(store, replaces=True)
    age(store)
    assert fold_items(store) == 2
    assert sql(store, "select dataid from datastatus") == [(ids[-1],)]

    register(store, "packed", [], ["elsewhere"])
    [answer] = accept(store, [Post("packed", ("1",))])
    assert isinstance(answer, Accepted)
    place = f"/data/_packs/pack-1.parquet#dataid={answer.dataids[0]}"
    work(store, "packed", "elsewhere", location=place)
    age(store)
    assert is_packed(place)
    assert fold_items(store) == 0


def test_the_dial_says_when_items_are_folded(store: Store) -> None:
    send(store, 1)
    work(store)
    sql(store, "update streamitem set received = '2026-01-01 00:00:00'")
    hour_ago = (
        "now() - interval '1 hour'"
        if store.db.dialect == "postgres"
        else ("strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 hour')")
    )
    sql(store, f"update chunkfact set at = {hour_ago}")
    assert fold_items(store) == 0
    assert odf(store, "policy", "orders", "fold_after=2h").exit_code == 0
    assert fold_items(store) == 0
    assert odf(store, "policy", "orders", "fold_after=30m").exit_code == 0
    assert fold_items(store) == 1
    refused = odf(store, "policy", "orders", "fold_after=1")
    assert refused.exit_code != 0
    assert "60" in refused.stderr


def test_a_retried_post_is_not_doubled_within_the_window(store: Store) -> None:
    ids = send(store, 2, key="k")
    work(store)
    for table, column in (("streamitem", "received"), ("chunkfact", "at")):
        sql(store, f"update {table} set {column} = '2026-01-01 00:00:00'")
    assert fold_items(store) == 2
    assert send(store, 2, key="k") == ids
    assert left(store) == dict.fromkeys(TABLES, 0), "nothing was accepted again"

    sql(store, "update streamkey set received = '2026-01-01 00:00:00'")
    assert fold_items(store) == 0
    assert sql(store, "select count(*) from streamkey") == [(0,)], "the window is over"


def test_a_key_is_kept_as_long_as_an_item_of_its_post(store: Store) -> None:
    send(store, 2, key="k")
    [claim] = take(store, "orders")
    store.finish([claim], [Fact("sold", claim.dataid)])
    age(store)
    assert fold_items(store) == 1
    assert sql(store, "select count(*) from streamkey") == [(1,)]


def test_a_folded_item_is_reported_and_cannot_be_produced_again(store: Store) -> None:
    register(store, "mail", ["sold"], ["mailed"])
    ids = send(store, 3)
    work(store)
    work(store, "mail", "mailed")
    age(store)
    fold_items(store)
    item = ids[1]

    for refused in (
        lambda: resubmit(store, "orders", [item]),
        lambda: resubmit(store, "mail", [item]),
        lambda: release(store, "orders", [item]),
        lambda: hold(store, "orders", [item]),
        lambda: ready(store, "sold", [item]),
        lambda: delete_run(store, "orders", item),
    ):
        with pytest.raises(Refused, match=f"'{item}' .*folded.* nothing was changed") as error:
            refused()
        assert "\n" not in str(error.value)
        assert error.value.code == "FOLDED"
    assert left(store) == dict.fromkeys(TABLES, 0)

    why = odf(store, "why", "orders", item)
    assert f"3 items of 'orders' from {ids[0]} to {ids[-1]}" in why.stdout
    assert "FOLDED" in why.stdout
    [[told]] = [
        each["reasons"] for each in json.loads(odf(store, "why", "orders", item, "--json").stdout)
    ]
    assert told["code"] == "FOLDED"
    summary = odf(store, "status")
    assert "3 items folded" in summary.stdout
    listed = odf(store, "status", "orders")
    assert f"3 items of 'orders' from {ids[0]} to {ids[-1]}" in listed.stderr
    refused = odf(store, "resubmit", "orders", item)
    assert refused.exit_code == 4
    assert len(refused.stderr.splitlines()) == 1


def test_a_folder_is_read_as_a_whole_with_what_was_folded(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "sold"
    add_dataset(store, "sold", hostname=str(root), format="csv")
    ids = send(store, 3)
    for dataid in ids:
        (root / f"dataid={dataid}").mkdir(parents=True)
        (root / f"dataid={dataid}" / "part-0.csv").write_text(f"n\n{dataid}\n")
    (root / f"dataid={int(ids[-1]) + 50}").mkdir()  # another's, of which the tables know nothing
    work(store)
    [late] = send(store, 1)
    before = FolderSource(store, Folder("sold", str(root), "csv"))
    assert list(map(str, before.pandas()["n"])) == ids
    age(store)
    assert fold_items(store) == 3
    assert list(map(str, before.pandas()["n"])) == ids
    assert late not in ids


def test_a_number_that_no_fold_holds_is_unknown_as_before(store: Store) -> None:
    ids = send(store, 2)
    work(store)
    age(store)
    fold_items(store)
    for dataid in (str(int(ids[-1]) + 7), "2026-01-01", "9" * 30, "-1", "¹"):
        with pytest.raises(Refused, match="has no chunk"):
            resubmit(store, "orders", [dataid])


def test_an_item_that_changes_while_it_is_folded_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.db.dialect == "sqlite":
        pytest.skip("one writer at a time")
    ids = send(store, 2)
    work(store)
    age(store)
    change, raced = store.db.change, []

    def beaten(name: str, /, **params: Any) -> int:
        if name == "folding.remove_outputs" and not raced:
            raced.append(name)
            sql(store, "update datastatus set status = 'RESUBMIT' where dataid = :d", d=ids[0])
        return change(name, **params)

    monkeypatch.setattr(store.db, "change", beaten)
    assert fold_items(store) == 1
    assert raced
    assert [claim.dataid for claim in take(store, "orders", k=9)] == [ids[0]]
    check(store)


def empty_large_table(store: Store) -> None:
    sql(
        store,
        "insert into streamitem (jobid, dataid, payload) "
        "select 'orders', cast(n as text), '{}' from generate_series(1, 20000) as n",
    )
    sql(store, "delete from streamitem where dataid <> '20000'")  # the end of the table is in use


def size(store: Store) -> int:
    return sql(store, "select pg_total_relation_size('streamitem')")[0][0]


def test_tables_of_postgres_shrink(store: Store) -> None:
    if store.db.dialect == "sqlite":
        pytest.skip("its file shrinks")
    empty_large_table(store)
    full = size(store)
    with connect(store) as reader, reader.transaction():
        reader.execute("select 1 from streamitem limit 1")
        assert not item_folding.reclaim_room(
            store
        )  # it doesn't wait, and who comes doesn't wait for it
    assert size(store) > full / 2
    assert item_folding.reclaim_room(store)
    assert size(store) < full / 10
    assert sql(store, "select dataid from streamitem") == [("20000",)]


def test_the_worker_gives_back_what_a_reader_still_saw(store: Store) -> None:
    if store.db.dialect == "sqlite":
        pytest.skip("its file shrinks")
    current = SimpleNamespace(taking={"orders": None})
    consumer: Any = SimpleNamespace(store=store, current=current)
    worker = ItemWorker(consumer, Bell(), say=print)
    empty_large_table(store)
    full = size(store)
    with connect(store) as reader, reader.transaction():
        reader.execute("select 1 from streamitem limit 1")
        worker._fold()
    worker._fold()  # although it folds nothing
    assert size(store) < full / 10


def test_the_file_of_sqlite_shrinks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if store.db.dialect == "postgres":
        pytest.skip("its tables shrink")
    monkeypatch.setattr(item_folding, "SHRINK_BYTES", 100_000)
    accept(store, [Post("orders", ('"' + "x" * 500_000 + '"',))])
    work(store)
    age(store)
    [(used, _)] = store.db.run("folding.free")
    fold_items(store)
    item_folding.reclaim_room(store)
    [(less, nothing)] = store.db.run("folding.free")
    assert less < used - 400_000
    assert nothing == 0
    add_dataset(store, "sold", hostname="/x.csv")
