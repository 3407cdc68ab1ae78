"""The catalog: what is registered, which datasets share their chunks, and the saved copy."""

import logging
from pathlib import Path

import pytest

from opendataflow_dagster.config.credentials import encrypt, for_dataset
from opendataflow_dagster.errors import NoDatabase
from opendataflow_dagster.store.catalog import Catalog, read_catalog
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import close, policy, put, register, sql


def test_the_catalog_has_everything_that_is_named(store: Store) -> None:
    add_dataset(store, "bobin", hostname="here", tablename="orders", format="csv")
    register(store, "loadbob", ["bobin"], ["bobout"], COLOR="red")
    register(store, "other", ["today"], ["bobout"])
    put(store, "byhand", "1")
    put(store, "only_read", "1", locktype="IN", jobid="x")
    policy(store, "loadbob", concurrency=3)

    catalog = read_catalog(store)

    assert list(catalog.datasets) == ["bobin", "bobout", "byhand"]
    assert catalog.datasets["bobin"].columns["tablename"] == "orders"
    assert set(catalog.datasets["byhand"].columns) == set(catalog.datasets["bobin"].columns)
    assert not any(catalog.datasets["byhand"].columns.values())
    assert catalog.jobs == {each: store.read_plan(each) for each in ("loadbob", "other")}
    assert catalog.policies["loadbob"]["concurrency"] == 3
    assert catalog.producers("bobout") == ("loadbob", "other")
    assert catalog.producers("bobin") == ()


def test_a_json_text_holds_all_of_it_and_no_password(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSKEY", "key")
    secret = encrypt("geheim", "key", purpose=for_dataset("bobin"))
    add_dataset(store, "bobin", encryptedpass=secret)
    register(store, "loadbob", ["bobin"], ["bobout"], COLOR="red")
    policy(store, "loadbob", concurrency=3)
    sql(store, "update jobpolicy set paused_until = '2031-01-02 03:04:05'")

    text = (catalog := read_catalog(store)).to_json()

    assert Catalog.from_json(text) == catalog
    assert secret not in text
    assert catalog.policies["loadbob"]["paused_until"].startswith("2031-01-0")


@pytest.mark.parametrize(
    ("jobs", "told", "domains"),
    [
        ({"j": (["a"], ["b"]), "k": (["b", "c"], ["d"])}, {}, {each: "a" for each in "abcd"}),
        ({"j": (["z"], ["b"])}, {}, {"z": "z", "b": "z"}),
        (
            {"j": (["today", "a"], ["b"]), "k": (["today"], ["c"])},
            {},
            {"a": "a", "b": "a", "c": "c"},
        ),
        ({"j": (["a"], ["b"]), "k": (["b"], ["a"])}, {}, {"a": "a", "b": "a"}),
        ({"j": (["a"], ["b"])}, {"b": "sales", "a": "later"}, {"a": "later", "b": "later"}),
        (
            {"j": (["a"], ["b"]), "k": (["c"], ["d"])},
            {"b": "s", "d": "s"},
            dict.fromkeys("abcd", "s"),
        ),
    ],
)
def test_datasets_that_jobs_link_are_one_domain(
    store: Store, jobs: dict, told: dict, domains: dict
) -> None:
    for datasetid, domain in told.items():
        add_dataset(store, datasetid, domain=domain)
    for jobid, (ins, outs) in jobs.items():
        register(store, jobid, ins, outs)

    assert read_catalog(store).domains == domains


def test_a_cycle_of_jobs_is_recognized(store: Store) -> None:
    register(store, "there", ["a"], ["b"])
    register(store, "back", ["b", "c"], ["a"])

    catalog = read_catalog(store)

    assert catalog.in_circle("there", "a")
    assert catalog.in_circle("back", "b")
    assert not catalog.in_circle("back", "c")


def test_depth_counts_the_jobs_above(store: Store) -> None:
    register(store, "first", ["today"], ["a"])
    register(store, "second", ["a"], ["b"])
    register(store, "third", ["a", "b"], ["c"])
    register(store, "there", ["c", "y"], ["x"])
    register(store, "back", ["x"], ["y"])

    catalog = read_catalog(store)

    assert [catalog.depth(each) for each in ("first", "second", "third")] == [0, 1, 2]
    assert catalog.depth("there") == 3
    assert catalog.depth("back") == 4


def test_produced_datasets_are_found_by_steps_not_by_reading_all_chunks(store: Store) -> None:
    sql(
        store,
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000) "
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "select 'd' || (i % 3), 'j', cast(i as varchar), 'OUT', 'READY' from n",
    )

    assert list(read_catalog(store).datasets) == ["d0", "d1", "d2"]


def test_a_kept_copy_is_used_during_a_database_outage(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from opendataflow_dagster import DataflowResource

    dataflow = DataflowResource(url=sqlite_url)
    with pytest.raises(NoDatabase):
        dataflow.catalog()
    dataflow.store.init()
    register(dataflow.store, "loadbob", ["bobin"], ["bobout"])
    seen = dataflow.catalog()
    assert not caplog.records

    dataflow.store.close()
    (tmp_path / "dataflow.db").rename(tmp_path / "away.db")
    with caplog.at_level(logging.WARNING):
        assert dataflow.catalog() == seen
    assert len(caplog.records) == 1
    assert "can't be read" in caplog.text
    (tmp_path / "away.db").rename(tmp_path / "dataflow.db")
    register(dataflow.store, "more", ["bobout"], ["sums"])
    assert "more" in dataflow.catalog().jobs
    close(dataflow.store)


def test_a_lost_connection_is_reopened(postgres_url: str) -> None:
    from opendataflow_dagster import DataflowResource

    dataflow = DataflowResource(url=postgres_url)
    dataflow.store.init()
    assert dataflow.catalog().jobs == {}
    sql(
        dataflow.store,
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and application_name = 'odf'",
    )
    register(dataflow.store, "loadbob", ["bobin"], ["bobout"])

    assert list(dataflow.catalog().jobs) == ["loadbob"]
    close(dataflow.store)
