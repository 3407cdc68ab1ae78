"""Partitions that the project defines itself: days, hours, weeks, a list, keys of its own."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
import pandas as pd
import pytest

from opendataflow_dagster import (
    DataflowIOManager,
    DataflowResource,
    DataflowTranslator,
    Dataset,
    Flow,
    Job,
    build_definitions,
)
from opendataflow_dagster.dagster.assets import dataflow_assets
from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.grid import Mirror
from opendataflow_dagster.dagster.launch import catch_up_sensor
from opendataflow_dagster.dagster.reconcile import Reconciled, reconcile
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.model import FAILED, READY, RUNNING, new_owner
from opendataflow_dagster.store import open_store, operations, registry
from opendataflow_dagster.store.catalog import read_catalog
from tests.support.dagster_instances import Grid, tick_of_reconcile
from tests.support.dagster_servers import Ticker
from tests.support.store_fixtures import sql, status

DAILY = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-03-01")


class Own(DataflowTranslator):
    """A domain has the partitions that it is given, or else the standard ones."""

    def __init__(self, **definitions: dg.PartitionsDefinition) -> None:
        self.definitions = definitions

    def partitions_def(self, domain: str) -> dg.PartitionsDefinition:
        return self.definitions.get(domain) or super().partitions_def(domain)


def tick(grid: Grid, names: DataflowTranslator) -> Reconciled:
    done = reconcile(grid.store, grid.mirror, names, grid.cursor)
    while done.more:
        again = reconcile(grid.store, grid.mirror, names, done.cursor)
        done = again._replace(notes=[*done.notes, *again.notes])
    grid.cursor = done.cursor
    return done


def squares(grid: Grid, names: DataflowTranslator, datasetid: str) -> Mapping[str, str]:
    definition = names.partitions_def(read_catalog(grid.store).domains[datasetid])
    return grid.mirror.grid(names.asset_key(datasetid), definition)


def agrees(grid: Grid, names: DataflowTranslator, without: list[str] | None = None) -> None:
    left = drift(grid.store, grid.mirror, names)
    assert [row.dataid for row in left if row.datasetid == "orders"] == (without or [])
    assert {row.run for row in left} <= {""}, "nothing that a repair could do"
    done = tick(grid, names)
    assert (done.writes, done.notes) == (0, [])


KINDS = {
    "days": (DAILY, ["2026-01-01", "2026-01-02", "2026-02-28"], "2026-03-01"),
    "hours": (
        dg.HourlyPartitionsDefinition(
            "2025-10-25-22:00", end_date="2025-10-26-06:00", timezone="Europe/Berlin"
        ),
        ["2025-10-26-01:00", "2025-10-26-02:00", "2025-10-26-02:00+0100"],
        "2025-10-26-02:30",
    ),
    "weeks": (
        dg.WeeklyPartitionsDefinition("2026-01-04", end_date="2026-03-01"),
        ["2026-01-04", "2026-01-11", "2026-01-18"],
        "2026-01-12",
    ),
    "months": (
        dg.MonthlyPartitionsDefinition("2026-01-01", end_date="2026-06-01"),
        ["2026-01-01", "2026-02-01", "2026-05-01"],
        "9999-12-31",
    ),
    "list": (
        dg.StaticPartitionsDefinition(["north", "south", "east"]),
        ["north", "south", "east"],
        "west",
    ),
    "keys": (dg.DynamicPartitionsDefinition(name="regions"), ["north", "south", "east"], "west"),
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def kind() -> str:
    """The kind of storage: that statements do the same on both, the tests of the grid tell."""
    return "sqlite"


@pytest.fixture
def instance(
    kind: str, storage: dg.DagsterInstance, request: pytest.FixtureRequest
) -> Iterator[dg.DagsterInstance]:
    """One that the tests share: making a new one takes longer than most of them."""
    if kind == "postgres":
        yield request.getfixturevalue("postgres_instance")
        request.getfixturevalue("postgres_instance").wipe()
        return
    yield storage
    storage.wipe()
    mirror = Mirror(storage)
    for name in ("dataflow/orders", "dataflow/other", "dataflow/aaa", "d", "regions"):
        mirror.replace_keys(name, mirror.keys(name), [])


@pytest.fixture(params=list(KINDS))
def own(request: pytest.FixtureRequest, grid: Grid) -> tuple[Own, list[str], str]:
    definition, keys, stranger = KINDS[request.param]
    if isinstance(definition, dg.DynamicPartitionsDefinition):
        grid.instance.add_dynamic_partitions("regions", ["spare", *keys])
    return Own(orders=definition), keys, stranger


def test_the_grid_tells_what_the_tables_say(grid: Grid, own: tuple[Own, list[str], str]) -> None:
    names, [first, second, third], stranger = own
    operations.ready(grid.store, "orders", [first, second, third])
    tick(grid, names)
    assert squares(grid, names, "orders") == dict.fromkeys([first, second, third], READY)
    assert squares(grid, names, "copies") == {}
    [done, failed, running] = grid.store.claim("copy", owner=new_owner(), k=3)
    grid.store.finish(done)
    grid.store.fail(failed, "no")
    tick(grid, names)
    assert squares(grid, names, "copies") == {
        done.dataid: READY,
        failed.dataid: FAILED,
        running.dataid: RUNNING,
    }
    agrees(grid, names)

    operations.ready(grid.store, "orders", [stranger, "x,y"])
    told = tick(grid, names)
    [line] = told.notes
    assert line.startswith("2 chunks of domain orders without a partition in ")
    assert stranger in line
    assert "x,y" in line
    assert stranger not in squares(grid, names, "orders")
    operations.hold(grid.store, "external", [stranger])
    assert tick(grid, names).notes == [], "it is told once"
    operations.delete_run(grid.store, "copy", failed.dataid)
    tick(grid, names)
    assert failed.dataid not in squares(grid, names, "copies")
    agrees(grid, names, sorted([stranger, "x,y"]))
    assert grid.keys() == []
    assert set(grid.instance.get_dynamic_partitions("regions")) <= {"spare", first, second, third}


def test_the_catch_up_sensor_launches_runs_for_them(
    grid: Grid, own: tuple[Own, list[str], str]
) -> None:
    """Also when the first chunk in the queue, or all of them, have no partition."""
    names, [first, second, _], stranger = own
    url = f"sqlite:///{grid.store.db.path}"  # type: ignore[attr-defined]
    catalog, dataflow = read_catalog(grid.store), DataflowResource(url=url)
    made: list[str] = []
    copy = dataflow_assets(job="copy", dataflow=catalog, translator=names)(
        lambda chunk: made.append(chunk.dataid)
    )
    sensor = catch_up_sensor(dataflow, {"copy": copy}, translator=names)
    defs = dg.Definitions([copy], sensors=[sensor], resources={"dataflow": dataflow})
    ticker = Ticker(sensor, grid.instance, defs)
    job = defs.resolve_implicit_global_asset_job_def()

    def caught_up() -> None:
        [request] = ticker.tick().run_requests
        done = job.execute_in_process(
            instance=grid.instance, asset_selection=list(request.asset_selection), tags=request.tags
        )
        assert done.success

    for offered in ([first, second], ["0", stranger]):
        operations.ready(grid.store, "orders", offered)
        tick(grid, names)  # the input has events, by which Dagster looks up the run's partition
        grid.store._plans.clear()
        made.clear()
        caught_up()
        assert sorted(made) == sorted(offered)
    assert dict(squares(grid, names, "copies")) == dict.fromkeys([first, second], READY)
    agrees(grid, names, sorted(["0", stranger]))
    assert ticker.tick().run_requests in (None, [])


def test_partitions_are_materialized_one_by_one_and_in_ranges(
    grid: Grid, own: tuple[Own, list[str], str]
) -> None:
    names, keys, _ = own
    dataflow = DataflowResource(url=f"sqlite:///{grid.store.db.path}")  # type: ignore[attr-defined]
    catalog = read_catalog(grid.store)
    copy = dataflow_assets(job="copy", dataflow=catalog, translator=names)(lambda chunk: None)
    operations.ready(grid.store, "orders", keys)
    tick(grid, names)
    job = dg.Definitions([copy], resources={"dataflow": dataflow})
    runnable = job.resolve_implicit_global_asset_job_def()
    assert runnable.execute_in_process(instance=grid.instance, partition_key=keys[2]).success
    assert squares(grid, names, "copies") == {keys[2]: READY}
    tags = {
        "dagster/asset_partition_range_start": keys[0],
        "dagster/asset_partition_range_end": keys[1],
    }
    assert runnable.execute_in_process(
        instance=grid.instance, tags=tags, asset_selection=[dg.AssetKey("copies")]
    ).success
    assert {status(grid.store, "copies", key, "copy") for key in keys[:2]} == {READY}
    agrees(grid, names)


def test_a_chunk_is_shown_as_soon_as_there_is_its_partition(grid: Grid) -> None:
    """A list that is edited, a day that is over, keys that the project adds."""
    operations.ready(grid.store, "orders", ["north", "west"])
    before = Own(orders=dg.StaticPartitionsDefinition(["north", "south"]))
    after = Own(orders=dg.StaticPartitionsDefinition(["west", "south"]))
    assert len(tick(grid, before).notes) == 1
    assert squares(grid, before, "orders") == {"north": READY}
    [line] = tick(grid, after).notes
    assert "north" in line
    assert squares(grid, after, "orders") == {"west": READY}
    agrees(grid, after, ["north"])

    names = Own(orders=dg.DynamicPartitionsDefinition(name="regions"))
    tick(grid, names)
    agrees(grid, names, ["north", "west"])
    grid.instance.add_dynamic_partitions("regions", ["west", "south"])
    tick(grid, names)
    assert squares(grid, names, "orders") == {"west": READY}
    agrees(grid, names, ["north"])


def test_standard_partitions_become_days_and_days_become_standard_ones(grid: Grid) -> None:
    days = ["2026-01-01", "2026-01-02", "x"]
    operations.ready(grid.store, "orders", days)
    standard, own = Own(), Own(orders=DAILY)
    tick(grid, standard)
    assert list(squares(grid, standard, "orders")) == days
    tick(grid, own)
    assert squares(grid, own, "orders") == dict.fromkeys(days[:2], READY)
    agrees(grid, own, ["x"])
    operations.hold(grid.store, "external", days)
    operations.ready(grid.store, "orders", ["2026-02-01"])
    tick(grid, own)
    assert grid.keys() == days, "they are left alone"
    tick(grid, standard)
    expected = {**dict.fromkeys(days, FAILED), "2026-02-01": READY}
    assert squares(grid, standard, "orders") == expected
    agrees(grid, standard)


def test_what_was_shown_of_other_keys_counts_for_no_time_window(grid: Grid) -> None:
    """Dagster would count an event of Tuesday to its week."""
    operations.ready(grid.store, "orders", ["2026-01-04", "2026-01-06", "2026-01-13"])
    tick(grid, Own())
    weeks = Own(orders=dg.WeeklyPartitionsDefinition("2026-01-04", end_date="2026-03-01"))
    tick(grid, weeks)
    assert squares(grid, weeks, "orders") == {"2026-01-04": READY}
    agrees(grid, weeks, ["2026-01-06", "2026-01-13"])
    tick(grid, Own())
    assert len(squares(grid, Own(), "orders")) == 3
    agrees(grid, Own())


def test_one_domain_has_its_own_and_another_the_standard_ones(grid: Grid) -> None:
    class Names(Own):
        window = 2

    names = Names(orders=dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-02-01"))
    registry.add_dataset(grid.store, "other")
    days = [f"2026-01-0{day}" for day in range(1, 6)]
    operations.ready(grid.store, "orders", days)
    operations.ready(grid.store, "other", days)
    tick(grid, names)
    assert list(squares(grid, names, "orders")) == days, "no window leaves any of them out"
    assert list(squares(grid, names, "other")) == days[-2:]
    agrees(grid, names)
    catalog = read_catalog(grid.store)
    entries = [names.spec(catalog, each, None).metadata for each in ("orders", "other")]
    assert ["opendataflow/window" in each for each in entries] == [False, True]


def test_domains_with_one_partitions_name_share_partitions(grid: Grid) -> None:
    class Names(DataflowTranslator):
        def partitions_name(self, domain: str) -> str:
            return "d"

    names = Names()
    registry.add_dataset(grid.store, "other")
    operations.ready(grid.store, "orders", ["1", "2"])
    operations.ready(grid.store, "other", ["2", "3"])
    tick(grid, names)
    assert grid.instance.get_dynamic_partitions("d") == ["1", "2", "3"]
    agrees(grid, names)
    operations.ready(grid.store, "other", ["4"])
    tick(grid, names)
    assert grid.instance.get_dynamic_partitions("d") == ["1", "2", "3", "4"]
    agrees(grid, names)


def test_keys_may_be_called_otherwise_than_chunks(grid: Grid) -> None:
    class Names(DataflowTranslator):
        def partitions_def(self, domain: str) -> dg.PartitionsDefinition:
            return DAILY

        def partition_key(self, dataid: str) -> str:
            return f"{dataid[:4]}-{dataid[4:6]}-{dataid[6:]}"

        def dataid(self, partition_key: str) -> str:
            year, month, day = partition_key.split("-")
            return f"{year}{month}{day}"

    operations.ready(grid.store, "orders", ["20260101"])
    tick(grid, DataflowTranslator())
    names = Names()
    operations.ready(grid.store, "orders", ["20260102", "x"])
    tick(grid, names)
    assert squares(grid, names, "orders") == dict.fromkeys(["2026-01-01", "2026-01-02"], READY)
    agrees(grid, names, ["x"])


def test_many_chunks_without_a_partition_are_reported_once(grid: Grid) -> None:
    names = Own(orders=DAILY)
    operations.ready(grid.store, "orders", [str(number) for number in range(1500)])
    [line] = tick(grid, names).notes
    assert line.startswith("1500 chunks of domain orders")
    assert line.count(",") < 15
    operations.ready(grid.store, "orders", ["2026-01-01", "5000"])
    assert tick(grid, names).notes == []
    assert squares(grid, names, "orders") == {"2026-01-01": READY}
    assert len(drift(grid.store, grid.mirror, names)) == 1501


def test_several_dimensions_are_refused_in_one_line() -> None:
    both = dg.MultiPartitionsDefinition(
        {"day": DAILY, "region": dg.StaticPartitionsDefinition(["a"])}
    )
    flow = Flow(
        "shop",
        datasets=[Dataset("sales", hostname="/data")],
        jobs=[Job("check", inputs=["sales"], outputs=["checked"], run="true")],
    )
    with pytest.raises(WrongUse, match=r"partitions_def\('sales'\) is a MultiPart.*one dimension"):
        build_definitions(flow=flow, translator=Own(sales=both))


@pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated")  # Dagster's own
def test_plain_assets_read_and_write_days(grid: Grid, tmp_path: Path) -> None:
    names = Own(orders=DAILY)
    for each in ("orders", "copies"):
        (tmp_path / each).mkdir()
        registry.add_dataset(grid.store, each, hostname=str(tmp_path / each), format="csv")
    days = ["2026-01-01", "2026-01-02"]
    for day in days:
        (tmp_path / "orders" / f"{day}.csv").write_text(f"day\n{day}\n")
    operations.ready(grid.store, "orders", days)
    tick(grid, names)
    dataflow = DataflowResource(url=f"sqlite:///{grid.store.db.path}")  # type: ignore[attr-defined]
    manager = DataflowIOManager(dataflow=dataflow, translator=names)

    @dg.asset(
        partitions_def=DAILY,
        ins={"orders": dg.AssetIn(input_manager_key="chunks")},
        io_manager_key="chunks",
    )
    def copies(orders: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        return orders

    orders = names.spec(read_catalog(grid.store), "orders", None)
    defs = dg.Definitions([orders, copies], resources={"chunks": manager})
    done = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=grid.instance,
        asset_selection=[copies.key],
        tags={
            "dagster/asset_partition_range_start": days[0],
            "dagster/asset_partition_range_end": days[1],
        },
    )
    assert done.success
    tick(grid, names)
    assert squares(grid, names, "copies") == dict.fromkeys(days, READY)
    agrees(grid, names)


def test_a_domain_keeps_its_partitions_whatever_job_comes(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1"])
    grid.tick()
    sql(grid.store, "insert into job (jobid, itemtype, datasetid) values ('more', 'IN', 'aaa')")
    sql(grid.store, "insert into job (jobid, itemtype, datasetid) values ('more', 'OUT', 'copies')")
    operations.ready(grid.store, "orders", ["2"])
    done = grid.tick()
    assert (grid.keys(), grid.keys("aaa"), done.standing) == (["1", "2"], [], [])
    assert grid.squares("copies") == {}
    grid.agrees()


def test_assets_whose_partitions_get_no_new_keys_are_reported(grid: Grid) -> None:
    """Those of the code location that was loaded before, and plain ones, also after the merge."""
    dataflow = DataflowResource(url=f"sqlite:///{grid.store.db.path}")  # type: ignore[attr-defined]
    old = DataflowTranslator().partitions_def("other")

    @dg.asset(partitions_def=old)
    def plain() -> None: ...

    operations.ready(grid.store, "other", ["1"])
    operations.ready(grid.store, "orders", ["1"])
    operations.ready(grid.store, "copies", ["1"])
    defs = build_definitions(dataflow, assets=[plain], scripts={"copy": "true"})
    assert "no more keys" not in tick_of_reconcile(defs, grid.instance)
    registry.add_job(grid.store, "mix", ["other", "orders"], ["mixed"])
    said = tick_of_reconcile(defs, grid.instance)
    assert "Jobs have joined domain 'orders' with 'other'" in said
    assert "other, plain: the partitions 'dataflow/other' get no more keys" in said
    assert "are now DynamicPartitionsDefinition 'dataflow/orders': reload" in said
    registry.add_dataset(grid.store, "orders", domain="orders")
    again = build_definitions(dataflow, assets=[plain], scripts={"copy": "true"})
    said = tick_of_reconcile(again, grid.instance)
    assert "Jobs have joined" not in said
    assert "plain: the partitions 'dataflow/other' get no more keys" in said
    assert "other, plain" not in said


@pytest.mark.parametrize("kind", ["postgres"])
def test_who_may_only_read_takes_the_names_as_they_are(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1"])
    sql(grid.store, "create role looker login")
    sql(grid.store, "grant usage on schema dataflow to looker")
    sql(grid.store, "grant select on all tables in schema dataflow to looker")
    reader = open_store(grid.store.db.url.replace("//postgres@", "//looker@"))  # type: ignore[attr-defined]
    assert reconcile(reader, grid.mirror, DataflowTranslator()).made == 1
    assert sql(grid.store, "select * from domainname") == []
    assert grid.keys() == ["1"]
    reader.close()
    sql(grid.store, "drop owned by looker")
    sql(grid.store, "drop role looker")
