"""Random flows: applying, exporting and editing gives the same as a fresh apply."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendataflow_dagster import Dataset, Flow, Job
from opendataflow_dagster.flow.apply import apply_flow, export_flow
from opendataflow_dagster.flow.catalog import catalog_of
from opendataflow_dagster.flow.flow import escape
from opendataflow_dagster.flow.plan import plan_flow
from opendataflow_dagster.model import Plan
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.catalog import Catalog, read_catalog
from opendataflow_dagster.store.store import Store
from tests.flow.test_plan import registrations, told
from tests.support.store_fixtures import check, close, sql

LETTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="=")
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
IDS = st.sampled_from(["a", "b", "c", "d", "true", "2", "~", "é", "$${x}"])
PLACES = TEXTS.map(escape) | st.sampled_from(["/data/x", "db1", "no", "0123", "- x", "a: b"])
OPTIONS = st.sampled_from([{}, {"delimiter": ";"}, {"strings": True}, {"null": "NA", "quote": '"'}])
DIALS = st.fixed_dictionaries(
    {},
    optional={
        "concurrency": st.integers(0, 9),
        "retry_delay": st.sampled_from([0, "10m", "none"]),
        "paused_until": st.sampled_from(["forever", "2030-01-01T00:00Z", "none"]),
        "fold_after": st.just("7d"),
        "on_stale": st.sampled_from(["skip", "remake", "none"]),
    },
)
VARIABLES = st.dictionaries(
    st.text(LETTERS, min_size=1, max_size=5).map(lambda name: f"v{name}"), TEXTS, max_size=2
)
DATASETS = st.dictionaries(
    IDS,
    st.fixed_dictionaries(
        {},
        optional={
            "hostname": PLACES,
            "tablename": PLACES,
            "format": st.sampled_from(["csv", "parquet"]),
            "writemode": st.sampled_from(["append", "replace"]),
            "options": OPTIONS,
            "description": TEXTS,
        },
    ),
    max_size=4,
)
JOBS = st.dictionaries(
    IDS,
    st.fixed_dictionaries(
        {"outputs": st.sets(IDS, min_size=1, max_size=2)},
        optional={
            "inputs": st.sets(IDS | st.just("today"), max_size=2),
            "policy": DIALS,
            "environment": VARIABLES,
        },
    ),
    max_size=3,
)


@st.composite
def flows(draw: Callable[..., Any], name: str = "shop") -> Flow:
    """A flow whose jobs read only earlier datasets, so that there is no cycle."""
    jobs = []
    for jobid, values in draw(JOBS).items():
        first = min(values["outputs"])
        inputs = {each for each in values.get("inputs", ()) if each < first or each == "today"}
        jobs.append(Job(jobid, **{**values, "inputs": sorted(inputs - values["outputs"])}))
    datasets = [Dataset(datasetid, **values) for datasetid, values in draw(DATASETS).items()]
    return Flow(name, datasets=datasets, jobs=jobs)


@pytest.fixture
def fresh(url: str, store: Store) -> Callable[[], Store]:
    """Empties the tables, and returns them."""

    def emptied() -> Store:
        for table in ("job", "dataset", "jobpolicy", "origin", "fill", "pending"):
            sql(store, f"delete from {table}")
        store._plans.clear()
        return store

    return emptied


RANDOM = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@RANDOM
@given(flow=flows())
def test_the_plan_of_an_export_is_empty(fresh: Callable[[], Store], flow: Flow) -> None:
    store = fresh()
    apply_flow(store, flow)
    assert told(plan_flow(store, flow)) == []
    exported = export_flow(store)
    assert exported.left_out == ()
    read = Flow.parse(exported.text)
    plan = plan_flow(store, read)
    assert told(plan) == [], [change.differences for change in plan.changes]
    assert {each.datasetid for each in read.datasets} == {each.datasetid for each in flow.datasets}
    # Typed by hand, it is the same.
    sql(store, "delete from origin")
    again = export_flow(store, "other")
    assert told(plan_flow(store, Flow.parse(again.text))) == []
    before = registrations(store)
    apply_flow(store, Flow.parse(again.text))
    assert registrations(store) | {"origin": []} == before


@RANDOM
@given(edits=st.lists(flows(), min_size=2, max_size=4), theirs=flows("bank"))
def test_applying_edits_equals_a_fresh_apply(
    fresh: Callable[[], Store], edits: list[Flow], theirs: Flow
) -> None:
    store = fresh()
    for flow in edits:
        apply_flow(store, flow)
        assert told(plan_flow(store, flow)) == []
    edited = registrations(store)
    assert registrations_of(fresh(), edits[-1]) == edited
    # Beside another flow's rows, what isn't in conflict with them comes out the same.
    store = fresh()
    apply_flow(store, Flow("bank", datasets=theirs.datasets))
    bank = registrations(store)
    for flow in edits:
        apply_flow(store, Flow("shop", jobs=flow.jobs))
    apply_flow(store, Flow("shop"))
    assert registrations(store) == bank


@RANDOM
@given(flow=flows())
def test_without_a_database_the_catalog_is_the_one_that_the_tables_get(
    fresh: Callable[[], Store], flow: Flow
) -> None:
    store = fresh()
    apply_flow(store, flow)
    declared, registered = catalog_of(flow), read_catalog(store)
    assert declared.domains == registered.domains
    assert plans(declared) == plans(registered)
    for datasetid, found in registered.datasets.items():
        own = declared.datasets[datasetid].columns
        assert {name: own.get(name) for name in found.columns if name != "datasetid"} == {
            name: value or None for name, value in found.columns.items() if name != "datasetid"
        }
    for jobid, dials in declared.policies.items():
        assert dials.items() <= registered.policies[jobid].items()


def plans(catalog: Catalog) -> dict[str, Plan]:
    """The jobs, with their variables in order: databases sort texts by different rules."""
    return {
        jobid: plan._replace(environment=tuple(sorted(plan.environment)))
        for jobid, plan in catalog.jobs.items()
    }


def registrations_of(store: Store, flow: Flow) -> dict[str, Any]:
    apply_flow(store, flow)
    return registrations(store)


_numbers = count(1)


@RANDOM
@given(before=flows(), after=flows())
def test_an_apply_that_ends_anywhere_leaves_a_plan_that_completes_it(
    tmp_path_factory: pytest.TempPathFactory, before: Flow, after: Flow
) -> None:
    """Each statement is the last one once: what is left is all or nothing."""
    url = f"sqlite:///{tmp_path_factory.getbasetemp()}/ends{next(_numbers)}.db"
    store = open_store(url)
    store.init()
    apply_flow(store, before)
    wanted = told(plan_flow(store, after))
    plain = store.db.execute
    for last in range(2, 12):
        left = last

        def execute(text: str, params: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return plain(text, params)

        store.db.execute = execute  # type: ignore[method-assign]
        try:
            apply_flow(store, after)
        except KeyboardInterrupt:
            pass
        finally:
            store.db.execute = plain  # type: ignore[method-assign]
        assert told(plan_flow(store, after)) in (wanted, [])
    apply_flow(store, after)
    assert told(plan_flow(store, after)) == []
    store.fill()
    check(store)
    close(store)
    Path(url.removeprefix("sqlite:///")).unlink()
