"""A domain keeps the name that it once had, whatever jobs come and go."""

from pathlib import Path

import pytest
import yaml

from opendataflow_dagster.explain.self_check import examine_database
from opendataflow_dagster.flow.apply import apply_flow, export_flow
from opendataflow_dagster.flow.catalog import catalog_of
from opendataflow_dagster.flow.flow import Dataset, Flow, Job
from opendataflow_dagster.flow.plan import plan_flow
from opendataflow_dagster.store import operations, registry
from opendataflow_dagster.store.catalog import Catalog, read_catalog, record_names
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import register, sql


def names(store: Store) -> dict[str, str]:
    return dict(read_catalog(store).domains)


def called(name: str, *datasets: str) -> dict[str, str]:
    return dict.fromkeys(datasets, name)


@pytest.fixture
def raw(store: Store) -> Store:
    """A job that makes `clean` of `raw`, of which there is a chunk."""
    registry.add_job(store, "wash", ["raw"], ["clean"])
    operations.ready(store, "raw", ["1"])
    return store


def test_it_stays_as_jobs_come_and_go(raw: Store) -> None:
    registry.add_job(raw, "join", ["aaa", "clean"], ["joined"])
    assert names(raw) == called("raw", "aaa", "clean", "joined", "raw")
    registry.remove_job(raw, "wash")
    assert names(raw) == called("raw", "clean", "raw") | called("raw", "aaa", "joined")
    registry.add_job(raw, "wash", ["raw"], ["clean"])
    registry.add_job(raw, "join", ["bbb", "clean"], ["joined"], replace=True)
    assert names(raw) == called("raw", "bbb", "clean", "joined", "raw")
    assert read_catalog(raw).merged() == {}


def test_it_stays_whatever_is_done_by_hand(raw: Store) -> None:
    record_names(raw, read_catalog(raw))
    register(raw, "join", ["aaa", "clean"], ["joined"])
    assert set(names(raw).values()) == {"raw"}
    sql(raw, "delete from job where jobid = 'wash'")
    assert set(names(raw).values()) == {"raw"}


def test_what_has_no_chunk_yet_is_called_by_its_roots(store: Store) -> None:
    registry.add_job(store, "wash", ["raw"], ["clean"])
    registry.add_job(store, "join", ["aaa", "clean"], ["joined"])
    assert set(names(store).values()) == {"aaa"}


def test_tables_of_before_keep_the_names_that_they_have(raw: Store) -> None:
    sql(raw, "delete from domainname")
    raw.init()
    register(raw, "join", ["aaa", "clean"], ["joined"])
    assert set(names(raw).values()) == {"raw"}


def test_an_explicit_name_is_stronger(raw: Store) -> None:
    record_names(raw)
    registry.add_dataset(raw, "clean", domain="shop")
    assert set(names(raw).values()) == {"shop"}
    registry.add_dataset(raw, "clean", domain="")
    assert set(names(raw).values()) == {"raw"}


def test_a_merge_is_reported_until_the_domain_is_named(raw: Store) -> None:
    operations.ready(raw, "aaa", ["1"])
    registry.add_job(raw, "join", ["aaa", "clean"], ["joined"])
    assert set(names(raw).values()) == {"raw"}, "that of the most datasets"
    [line] = read_catalog(raw).merge_lines()
    assert line.startswith("Jobs have joined domain 'raw' with 'aaa'")
    assert "`odf dataset add clean --domain raw`" in line
    [check] = [each for each in examine_database(raw, {}, False) if each.check == "domains"]
    assert (check.result, check.detail) == ("warn", line)
    again = Catalog.from_json(read_catalog(raw).to_json())
    assert again.merge_lines() == [line]
    registry.add_dataset(raw, "clean", domain="raw")
    assert read_catalog(raw).merge_lines() == []
    assert not [each for each in examine_database(raw, {}, False) if each.check == "domains"]
    registry.remove_job(raw, "join")
    assert names(raw) == called("raw", "clean", "raw") | called("aaa", "aaa")


def test_a_dataset_that_is_removed_leaves_no_name(store: Store) -> None:
    registry.add_dataset(store, "raw")
    registry.add_dataset(store, "aaa")
    record_names(store, read_catalog(store))
    registry.remove_dataset(store, "raw")
    assert sql(store, "select * from domainname") == [("aaa", "aaa")]


def test_projects_and_catalogs_go_by_it(raw: Store) -> None:
    record_names(raw)
    registry.add_job(raw, "join", ["aaa", "clean"], ["joined"])
    catalog, plans = read_catalog(raw), read_catalog(raw).jobs
    assert set(catalog.with_jobs(plans).domains.values()) == {"raw"}
    flow = Flow("shop", jobs=[Job("more", inputs=["aa", "joined"], outputs=["end"])])
    assert set(catalog.joined(catalog_of(flow)).domains.values()) == {"raw"}


def test_what_is_exported_says_it_and_changes_nothing(raw: Store, tmp_path: Path) -> None:
    registry.add_dataset(raw, "clean")
    registry.add_job(raw, "join", ["aaa", "clean"], ["joined"])
    registry.remove_job(raw, "wash")
    text = export_flow(raw, "shop").text
    assert yaml.safe_load(text)["datasets"]["clean"] == {"domain": "raw"}
    flow = Flow.parse(text)
    plan = plan_flow(raw, flow)
    assert plan.changes == ()
    assert catalog_of(flow).domains["clean"] == names(raw)["clean"] == "raw"


def test_a_flow_may_rename_what_has_no_chunk(store: Store) -> None:
    checked = Job("check", inputs=["sales"], outputs=["checked"])
    apply_flow(store, Flow("shop", jobs=[checked]))
    record_names(store, read_catalog(store))
    joined = Job("check", inputs=["archive", "sales"], outputs=["checked"])
    later = Flow("shop", datasets=[Dataset("archive", hostname="/a")], jobs=[joined])
    apply_flow(store, later)
    assert set(names(store).values()) == {"archive"}
    operations.ready(store, "sales", ["1"])
    [conflict] = plan_flow(store, Flow("shop", jobs=[checked])).conflicts
    assert "domain: archive" in conflict.conflict
