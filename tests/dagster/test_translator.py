"""Names in Dagster: ordinary ids stay unchanged, odd ones stay distinct and reversible."""

import os
import subprocess
import sys

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opendataflow_dagster.dagster.resources import DataflowResource
from opendataflow_dagster.dagster.translator import (
    DataflowTranslator,
    escaped_key,
    escaped_word,
    unescaped_word,
)
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import register

TRANSLATE = DataflowTranslator()
ODD = st.text(st.sampled_from('%._x25FEa9AC2 \n,"[]*|/\\é…') | st.characters(codec="utf-8"))


@pytest.mark.parametrize(
    "dataid", ["2026-03-01", "17", "a word", "50%", "é中", "a.b", "x..y", "a/b", "100%c", "a:b_c"]
)
def test_an_ordinary_dataid_is_its_own_partition_key(dataid: str) -> None:
    assert TRANSLATE.partition_key(dataid) == dataid
    assert TRANSLATE.dataid(dataid) == dataid


@pytest.mark.parametrize(
    ("dataid", "key"),
    [
        ("a...b", "a%2E%2E%2Eb"),
        ("a,b", "a%2Cb"),
        ("line\n", "line%0A"),
        (" a ", "%20a%20"),
        ("", "%"),
        ("%", "%25"),
        ("%2C", "%252C"),
        ('say "hi"', "say %22hi%22"),
        ("[1]*", "%5B1%5D%2A"),
        ("\u200b", "%E2%80%8B"),
    ],
)
def test_what_dagster_cannot_take_is_escaped(dataid: str, key: str) -> None:
    assert TRANSLATE.partition_key(dataid) == key
    assert TRANSLATE.dataid(key) == dataid


@given(ODD)
@example("%" * 3 + "2C")
@example("," * 500)
@example("%2,%")
def test_a_partition_key_can_be_undone(dataid: str) -> None:
    key = TRANSLATE.partition_key(dataid)
    assert TRANSLATE.dataid(key) == dataid
    assert key
    assert key == key.strip()
    assert key.isprintable()
    assert "..." not in key
    assert not set(key) & set(',"[]*|\\')


@given(ODD)
@example("_x41/")
@example("_x_x")
@example("/x41_")
def test_an_asset_key_and_an_op_name_can_be_undone(name: str) -> None:
    assert unescaped_word(escaped_key(name)) == name
    assert unescaped_word(escaped_word(name)) == name
    assert "/" not in TRANSLATE.asset_key(name).path[0]


@pytest.mark.parametrize("name", ["bobin", "raw-orders.v2", "größe 1", "input", "a_x_b"])
def test_an_ordinary_dataset_is_its_own_asset(name: str) -> None:
    assert TRANSLATE.asset_key(name) == dg.AssetKey(name)


@pytest.mark.parametrize("jobid", ["loadbob", "input", "class", "load-bob", "größe", "1 2", "a/b"])
def test_an_op_name_is_what_dagster_allows(jobid: str) -> None:
    op = dg.OpDefinition(lambda _: None, TRANSLATE.op_name(jobid))
    assert unescaped_word(op.name) == jobid


def test_a_spec_has_the_datasets_place_and_its_inputs(store: Store) -> None:
    add_dataset(store, "bobin", domain="sales/eu")
    add_dataset(store, "bobout", hostname="here", tablename="orders", format="parquet")
    register(store, "loadbob", ["bobin", "today"], ["bobout"])
    catalog = read_catalog(store)

    spec = TRANSLATE.spec(catalog, "bobout", "loadbob")

    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("bobin")]
    assert spec.skippable
    assert spec.kinds == {"parquet"}
    assert spec.group_name == "sales_eu"
    assert spec.metadata["opendataflow/location"] == "here/orders"
    assert spec.partitions_def == dg.DynamicPartitionsDefinition(name="dataflow/sales/eu")
    external = TRANSLATE.spec(catalog, "bobout", None)
    assert not external.skippable
    assert external.deps == spec.deps


def test_jobs_in_a_circle_give_definitions_all_the_same(store: Store) -> None:
    register(store, "there", ["a", "x"], ["b"])
    register(store, "back", ["b"], ["a"])
    register(store, "self", ["s"], ["s"])
    catalog = read_catalog(store)

    defs = dg.Definitions([TRANSLATE.spec(catalog, each, None) for each in catalog.datasets])
    dg.Definitions.validate_loadable(defs)


def test_a_resource_is_what_the_environment_says(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DataflowResource().settings.url.endswith("/.dataflow/dataflow.db")
    monkeypatch.setenv("DATAFLOW_URL", sqlite_url)
    assert DataflowResource().settings.url == sqlite_url
    assert DataflowResource().store is DataflowResource(url=sqlite_url).store
    monkeypatch.setenv("ELSEWHERE", "postgresql://there/db")
    told = DataflowResource(url=dg.EnvVar("ELSEWHERE"), schema_="sales", user="bob").settings
    assert (told.url, told.schema, told.user) == ("postgresql://there/db", "sales", "bob")


def test_every_public_name_is_there() -> None:
    import opendataflow_dagster

    for name in opendataflow_dagster.__all__:
        assert getattr(opendataflow_dagster, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        opendataflow_dagster.nothing  # noqa: B018


def test_importing_the_package_imports_no_dagster() -> None:
    script = "import sys, opendataflow_dagster; print('dagster' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "False"
