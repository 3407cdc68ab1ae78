"""Splitting a large table into chunks."""

import time
import tracemalloc

import pytest

from opendataflow_dagster.errors import Refused, WrongUse
from opendataflow_dagster.store import registry
from opendataflow_dagster.store import split as splitting
from opendataflow_dagster.store.split import (
    MAX_CHUNKS,
    Series,
    SplitChunk,
    by_date,
    by_number,
    by_shards,
    by_value,
    split,
)
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, pending, put, sql, statuses, take


@pytest.fixture
def orders(store: Store) -> Store:
    registry.add_dataset(store, "orders", tablename="orders")
    registry.add_job(store, "load", ["orders"], ["loaded"])
    return store


def test_all_days_are_included_even_the_last_and_the_leap_day() -> None:
    days = by_date("2024-01-01", "2024-12-31", "day")
    assert len(days) == 366
    assert days[0] == SplitChunk("2024-01-01", "2024-01-01", "2024-01-02")
    assert days[59] == SplitChunk("2024-02-29", "2024-02-29", "2024-03-01")
    assert days[-1] == SplitChunk("2024-12-31", "2024-12-31", "2025-01-01")


def test_periods_are_whole() -> None:
    assert list(by_date("2026-01-15", "2026-02-01", "month")) == [
        SplitChunk("2026-01", "2026-01-01", "2026-02-01"),
        SplitChunk("2026-02", "2026-02-01", "2026-03-01"),
    ]
    assert list(by_date("2024-05-05", "2026-01-01", "year")) == [
        SplitChunk("2024", "2024-01-01", "2025-01-01"),
        SplitChunk("2025", "2025-01-01", "2026-01-01"),
        SplitChunk("2026", "2026-01-01", "2027-01-01"),
    ]
    assert list(by_date("2026-01-01", "2026-01-05", "week")) == [
        SplitChunk("2025-12-29", "2025-12-29", "2026-01-05"),
        SplitChunk("2026-01-05", "2026-01-05", "2026-01-12"),
    ]
    assert [chunk.dataid for chunk in by_date("2025-11-30", "2026-02-01", "month")] == [
        "2025-11",
        "2025-12",
        "2026-01",
        "2026-02",
    ]


def test_numbers_are_half_open_and_cover_each_number_once() -> None:
    chunks = by_number(0, 1_000_000, size=100_000)
    assert len(chunks) == 10
    assert chunks[0] == SplitChunk("0", "0", "100000")
    assert chunks[-1] == SplitChunk("900000", "900000", "1000000")
    assert list(by_number(-5, 6, size=10)) == [
        SplitChunk("-5", "-5", "5"),
        SplitChunk("5", "5", "6"),
    ]
    for count in (1, 3, 7, 11):
        pieces = by_number(-5, 6, count=count)
        assert len(pieces) == count
        covered = [
            n
            for piece in pieces
            for n in range(int(piece.lower_bound), int(piece.upper_bound or 0))
        ]
        assert covered == list(range(-5, 6))


def test_tables_are_split_into_shards_and_values() -> None:
    assert list(by_shards(2)) == [SplitChunk("0", "0", None, 2), SplitChunk("1", "1", None, 2)]
    assert list(by_value(["at", "de", "at"])) == [SplitChunk("at", "at"), SplitChunk("de", "de")]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: by_date("2026-13-01", "2026-12-31", "day"),
        lambda: by_date("2026-02-01", "2026-01-31", "day"),
        lambda: by_date("2026-02-01", "2026-03-31", "fortnight"),
        lambda: by_date("9999-12-01", "9999-12-31", "month"),
        lambda: by_date("9999-12-31", "9999-12-31", "day"),
        lambda: by_date("0001-01-01", "9999-01-01", "day"),
        lambda: by_number(0, 0, size=1),
        lambda: by_number(5, 1, size=1),
        lambda: by_number(0, 10, size=0),
        lambda: by_number(0, 10, count=0),
        lambda: by_number(0, 10, count=11),
        lambda: by_number(0, 10),
        lambda: by_number(0, 10**15, size=1),
        lambda: by_number(0, 10**15, count=MAX_CHUNKS + 1),
        lambda: by_shards(0),
        lambda: by_shards(MAX_CHUNKS + 1),
        lambda: by_value(["a", ""]),
        lambda: by_value(["a\0b"]),
    ],
)
def test_an_impossible_split_is_refused(wrong) -> None:
    with pytest.raises(WrongUse):
        wrong()


def test_chunks_are_ready_and_jobs_can_run_at_once(orders: Store) -> None:
    done = split(
        orders, "orders", by_date("2026-01-01", "2026-12-31", "month"), column="day", who="bob"
    )

    assert (len(done.chunks), len(done.new)) == (12, 12)
    assert statuses(orders, "2026-03") == {("orders", "split", "2026-03"): ("OUT", "READY")}
    assert sql(orders, "select chunkcolumn from dataset") == [("day",)]
    assert sql(
        orders, "select lower_bound, upper_bound, modulus from chunkrange where dataid = '2026-03'"
    ) == [("2026-03-01", "2026-04-01", None)]
    assert [claim.dataid for claim in take(orders, "load", k=2)] == ["2026-01", "2026-02"]
    assert sql(orders, "select distinct who, why from dataevent where jobid = 'split'") == [
        ("bob", "odf split")
    ]
    generations = [
        n for (n,) in sql(orders, "select generation from datastatus where jobid = 'split'")
    ]
    assert len(set(generations)) == 12
    assert sql(orders, "select count(*) from chunkfact where jobid = 'split'") == [(12,)]
    check(orders)


def test_again_adds_only_what_is_missing_and_touches_nothing(orders: Store) -> None:
    split(orders, "orders", by_number(0, 30, size=10), column="id")
    sql(orders, "update datastatus set status = 'RESUBMIT' where dataid = '10'")
    put(orders, "orders", "30", jobid="hand")
    before = sql(orders, "select * from datastatus order by dataid")

    done = split(orders, "orders", by_number(0, 50, size=10))
    assert [chunk.dataid for chunk in done.new] == ["30", "40"]
    after = sql(orders, "select * from datastatus order by dataid")
    assert [row for row in after if row[2] != "40"] == before
    assert sql(orders, "select count(*) from chunkrange") == [(5,)]
    assert not split(orders, "orders", by_number(0, 50, size=10)).new
    check(orders)


def test_pending_chunks_wait_for_their_producer(orders: Store) -> None:
    split(orders, "orders", by_shards(3), column="id", pending=True)
    assert pending(orders) == {}
    assert statuses(orders)["orders", "split", "0"] == ("OUT", "PENDING")
    assert sql(orders, "select count(*) from chunkfact") == [(0,)]

    registry.add_job(orders, "extract", [], ["raw"])
    registry.add_dataset(orders, "raw")
    split(orders, "raw", by_shards(3), column="id", pending=True, jobid="extract")
    assert len(take(orders, "extract", k=9)) == 3
    with pytest.raises(Refused, match="odf job add load --out raw"):
        split(orders, "raw", by_shards(3), pending=True, jobid="load")
    with pytest.raises(WrongUse, match="--pending"):
        split(orders, "raw", by_shards(3), jobid="extract")
    check(orders)


def test_a_plan_writes_nothing(orders: Store) -> None:
    done = split(orders, "orders", by_shards(64), column="id", plan=True)
    assert len(done.new) == 64
    assert statuses(orders) == {}
    assert sql(orders, "select chunkcolumn from dataset") == [(None,)]
    assert sql(orders, "select * from chunkrange") == []


@pytest.mark.parametrize(
    "other",
    [
        by_number(0, 100, size=20),  # the same lower bounds, other upper ones
        by_number(95, 105, size=10),  # over the end
        by_number(5, 6, size=1),  # inside
        by_number(-100, 1000, size=2000),  # around
        by_shards(4),
        by_value(["0"]),
        by_date("2026-01-01", "2026-01-02", "day"),
    ],
)
def test_chunks_that_would_share_rows_are_refused(orders: Store, other: Series) -> None:
    split(orders, "orders", by_number(0, 100, size=10), column="id")
    before = sql(orders, "select * from chunkrange order by dataid"), statuses(orders)
    with pytest.raises(Refused, match="Nothing more was registered") as caught:
        split(orders, "orders", other)
    assert caught.value.code == "OVERLAP"
    assert (sql(orders, "select * from chunkrange order by dataid"), statuses(orders)) == before


def test_another_number_of_shards_or_another_column_is_refused(orders: Store) -> None:
    split(orders, "orders", by_shards(4), column="id")
    with pytest.raises(Refused, match="remainder 0 of 4"):
        split(orders, "orders", by_shards(8))
    with pytest.raises(Refused, match="split by 'id'"):
        split(orders, "orders", by_shards(4), column="customer")


def test_a_table_that_grew_gets_more_chunks(orders: Store) -> None:
    split(orders, "orders", by_number(0, 25, size=10), column="id")
    split(orders, "orders", by_number(25, 40, size=10))
    assert sorted(sql(orders, "select dataid, upper_bound from chunkrange")) == [
        ("0", "10"),
        ("10", "20"),
        ("20", "25"),
        ("25", "35"),
        ("35", "40"),
    ]


def test_a_dataset_that_is_not_registered_or_has_no_column(store: Store) -> None:
    with pytest.raises(Refused, match="odf dataset add orders") as caught:
        split(store, "orders", by_shards(2), column="id")
    assert caught.value.code == "NOT_REGISTERED"
    registry.add_dataset(store, "orders")
    with pytest.raises(WrongUse, match="--column"):
        split(store, "orders", by_shards(2))
    with pytest.raises(WrongUse, match="Name some values"):
        split(store, "orders", by_value([]), column="id")


def test_odd_values_are_kept_exactly(orders: Store) -> None:
    odd = [
        "a,b",
        "it's",
        "new\nline",
        "../x",
        "$(x)",
        "😀",
        "e\u0301",
        "\u00e9",
        "A",
        "a",
        "007",
        "7",
        "null",
        "1.0",
    ]
    split(orders, "orders", by_value(odd), column="name")
    assert sorted(dataid for (dataid,) in sql(orders, "select dataid from chunkrange")) == sorted(
        odd
    )
    assert sorted(claim.dataid for claim in take(orders, "load", k=99)) == sorted(odd)


def test_the_plan_of_a_million_chunks_is_computed_when_it_is_shown(orders: Store) -> None:
    tracemalloc.start()
    try:
        done = split(orders, "orders", by_number(0, MAX_CHUNKS, size=1), column="id", plan=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(done.new), done.new[-1].dataid) == (MAX_CHUNKS, "999999")
    assert most < 5_000_000, f"{most:,} bytes for a plan that shows six rows"


def test_many_chunks_are_registered_in_short_transactions_and_continue_after_a_kill(
    orders: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "CHUNKS_PER_TRANSACTION", 10)
    seen = []

    def pause(_: int) -> None:
        seen.append((sql(orders, "select count(*) from datastatus"), len(take(orders, "load"))))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(orders, "give_way", pause)
    with pytest.raises(KeyboardInterrupt):
        split(orders, "orders", by_shards(25), column="id")
    assert seen == [([(10,)], 1), ([(22,)], 1)], "others see and claim what is there already"

    monkeypatch.undo()
    done = split(orders, "orders", by_shards(25))
    assert [chunk.dataid for chunk in done.new] == ["20", "21", "22", "23", "24"]
    assert sql(orders, "select count(*) from chunkrange") == [(25,)]
    check(orders)


@pytest.mark.parametrize("same", [True, False])
def test_of_two_splits_at_once_none_adds_rows_twice(
    orders: Store, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    monkeypatch.setattr(splitting, "CHUNKS_PER_TRANSACTION", 10)
    other = by_shards(25) if same else by_number(0, 100, size=10)
    register = splitting._register

    def later(*given):
        monkeypatch.setattr(splitting, "_register", register)
        split(orders, "orders", other, column="id")
        return register(*given)

    monkeypatch.setattr(splitting, "_register", later)
    if same:
        split(orders, "orders", by_shards(25), column="id")
    else:
        with pytest.raises(Refused, match="Nothing more was registered"):
            split(orders, "orders", by_shards(25), column="id")
    assert sql(orders, "select count(*) from chunkrange") == [(len(other),)]
    assert sql(orders, "select count(*) from datastatus") == [(len(other),)]
    check(orders)


def test_ten_thousand_chunks_take_seconds(orders: Store) -> None:
    chunks = by_number(0, 1_000_000, count=10_000)
    began = time.monotonic()
    split(orders, "orders", chunks, column="id")
    took = time.monotonic() - began
    assert len(pending(orders)) == 10_000
    began = time.monotonic()
    assert not split(orders, "orders", chunks).new
    again = time.monotonic() - began
    print(f"{took:.2f} s, again {again:.2f} s")
    assert took < 60  # 1 to 2 s on an idle machine
    assert again < 20
