"""Sources and destinations in BigQuery, against a small server that speaks its REST calls."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pandas.testing import assert_frame_equal

from opendataflow_dagster.chunk import Result
from opendataflow_dagster.errors import (
    CredentialError,
    DataflowError,
    Refused,
    StaleClaim,
    Unreachable,
)
from opendataflow_dagster.pipelines import bigquery
from opendataflow_dagster.pipelines.project import Project
from opendataflow_dagster.pipelines.sources import source_of
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.pipelines.test_places import chunk_of, claim, frame, nothing, project, row, stale, to
from tests.support.bigquery_server import BigQuery, big_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["project"]


@pytest.fixture
def big() -> Iterator[BigQuery]:
    with big_query() as server:
        yield server


@pytest.fixture
def url(sqlite_url: str) -> str:
    """The database of our own tables doesn't matter here."""
    return sqlite_url


def add(store: Store, big: BigQuery, slug: str = "sums", **columns: Any) -> None:
    told = {"database": "shop", "schemaname": "main", "tablename": slug, "hostname": big.url}
    add_dataset(store, slug, format="bigquery", **told | columns)


def rows(big: BigQuery, table: str = "main.sums") -> list[tuple]:
    return [tuple(each.values()) for each in big.tables[table].to_pylist()]


def test_a_run_appends_or_replaces(store: Store, project: Project, big: BigQuery) -> None:
    add(store, big)
    destination = to(store, project)
    made = frame(
        n=[1, 2],
        x=[1.5, None],
        ok=[True, False],
        day=[date(2026, 1, 2), None],
        at=[datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 3)],
        text=["ü", None],
        price=[Decimal("1.20"), Decimal("3.00")],
        tags=[["a", "b"], []],
    )

    told = destination.publish(made, chunk_of(store, "1"), nothing)
    destination.publish(made, chunk_of(store, "2"), nothing)

    assert told == Result(2, location=f"{big.url}/shop.main.sums")
    assert len(rows(big)) == 4
    assert rows(big)[0] == (
        1,
        1.5,
        True,
        date(2026, 1, 2),
        datetime(2026, 1, 2, 3, 4, 5, 6),
        "ü",
        Decimal("1.20"),
        ["a", "b"],
    )
    assert rows(big)[1][1] is None

    add_dataset(store, "sums", writemode="replace")
    to(store, project).publish(row(7), chunk_of(store, "3"), nothing)
    assert rows(big) == [(7, "x")]


def test_an_answer_that_is_lost_loads_nothing_twice(
    store: Store, project: Project, big: BigQuery
) -> None:
    add(store, big)
    destination, chunk = to(store, project), chunk_of(store, "1")
    big.forget_answers = 1

    destination.publish(row(1), chunk, nothing)
    destination.publish(row(1), chunk, nothing)  # the same generation again

    assert rows(big) == [(1, "x")]
    assert big.forget_answers == 0
    with pytest.raises(StaleClaim):
        destination.publish(row(1), chunk_of(store, "2"), stale)
    assert rows(big) == [(1, "x")]


def test_a_large_frame_goes_in_pieces(store: Store, project: Project, big: BigQuery) -> None:
    add(store, big)
    many = frame(text=[os.urandom(60).hex() for _ in range(200_000)])

    to(store, project).publish(many, chunk_of(store, "1"), nothing)

    assert big.tables["main.sums"].num_rows == len(many)
    assert big.uploads


def test_items_are_one_load_and_a_bad_one_fails_alone(
    store: Store, project: Project, big: BigQuery
) -> None:
    add(store, big)
    big.tables["main.sums"] = pa.table({"n": [0], "text": ["old"]})
    destination = to(store, project)

    good = destination.append([(claim(n, n), row(n)) for n in (1, 2, 3)], nothing)
    loads = len(big.jobs)
    mixed = destination.append(
        [
            (claim(4, 4), row(4)),
            (claim(5, 5), frame(n=["five"])),
            (claim(6, 6), frame(n=[{"a": 1}, 2])),
            (claim(7, 7), frame()),
        ],
        nothing,
    )

    assert loads == 1
    assert [each.rows for each in good if isinstance(each, Result)] == [1, 1, 1]
    assert [n for n, _ in rows(big)] == [0, 1, 2, 3, 4]
    assert [isinstance(each, Result) for each in mixed] == [True, False, False, True]
    assert "Field n has changed type from INTEGER to STRING" in str(mixed[1])
    assert "can't be written" in str(mixed[2])


def test_rows_it_refuses_fail_alone_and_an_outage_is_waited_for(
    store: Store, project: Project, big: BigQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, big)
    bad = [
        frame(n=[1], text=["q\ud800b"]),
        frame(n=[2**70], text=["x"]),
        frame(n=[1], text=[{}]),
        frame(n=[1], text=[{("a", 1): 2}]),
        row(1).set_axis(["n", "n"], axis=1),
    ]
    parts = [(claim(1, 1), row(1)), *((claim(9, 9), each) for each in bad), (claim(3, 3), row(3))]

    verdicts = to(store, project).append(parts, nothing)

    assert [isinstance(each, Result) for each in verdicts] == [True, *[False] * len(bad), True]
    assert rows(big) == [(1, "x"), (3, "x")]
    for verdict, words in zip(
        verdicts[1:],
        (
            "column 'text' has a string that isn't Unicode",
            "column 'n' has an integer of more",
            "column 'text' has an empty dict",
            "column text",
            "two columns are called 'n'",
        ),
        strict=False,
    ):
        assert words in str(verdict)

    monkeypatch.setattr(bigquery, "TIMEOUT_SECONDS", 0.5)
    add_dataset(store, "sums", hostname="http://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9/shop\.main\.sums: "):
        to(store, project).append(parts, nothing)


def test_a_table_a_view_and_a_select_are_read(
    store: Store, project: Project, big: BigQuery, spark: "SparkSession"
) -> None:
    big.tables["main.sums"] = pa.table(
        {
            "n": pa.array([1, 2, None, 4, 5]),
            "text": ["a", "b", None, "", "ü"],
            "price": pa.array([Decimal("1.20")] * 5),
            "day": [date(2026, 1, 2)] * 5,
            "at": pa.array([datetime(2026, 1, 2, 3, tzinfo=UTC)] * 5, pa.timestamp("us", "UTC")),
            "ok": [True, None, False, True, True],
        }
    )
    big.views["main.few"] = "select n from `shop.main.sums` where n > 3"
    add(store, big)
    add(store, big, "few")
    add(
        store,
        big,
        "chosen",
        tablename="with a as (select n from `shop.main.sums`)\nselect n + 1 "
        "as m from a where n is not null",
        schemaname=None,
    )

    found = source_of(store, project, "sums")
    got = found.pandas()

    assert found.version() is None
    assert list(got.n.dropna()) == [1, 2, 4, 5]
    assert list(got.price) == [1.2] * 5
    assert list(got.day) == [date(2026, 1, 2)] * 5
    assert str(got["at"].dtype) == "datetime64[us, UTC]"
    assert_frame_equal(source_of(store, project, "few").pandas(), frame(n=[4, 5]))
    chosen = source_of(store, project, "chosen")
    assert chosen.location == f"{big.url}/shop.(SELECT)"
    assert_frame_equal(chosen.pandas(), frame(m=[2, 3, 5, 6]))
    by_spark = found.spark(spark)
    assert by_spark.dtypes[:4] == [
        ("n", "bigint"),
        ("text", "string"),
        ("price", "decimal(38,9)"),
        ("day", "date"),
    ]
    assert by_spark.count() == 5


@pytest.mark.parametrize("text", ["select 1; drop table x", "with a as (select 1) select 1; x"])
def test_a_source_is_read_only(store: Store, project: Project, big: BigQuery, text: str) -> None:
    add(store, big, tablename=text)

    with pytest.raises(Refused, match="registered with a SCRIPT, but a source is only read"):
        source_of(store, project, "sums").pandas()
    with pytest.raises(Refused, match="is a SELECT, which can't be written to"):
        to(store, project)
    assert "POST /bigquery/v2/projects/shop/queries" not in big.requests


def test_a_missing_table_is_reported_in_one_line(
    store: Store, project: Project, big: BigQuery
) -> None:
    add(store, big)
    with pytest.raises(DataflowError) as error:
        source_of(store, project, "sums").pandas()
    assert str(error.value).startswith(f"{big.url}/shop.main.sums: ")
    assert "Not found: Table shop:main.sums" in str(error.value)
    assert "\n" not in str(error.value)

    add_dataset(store, "sums", schemaname="")
    with pytest.raises(Refused, match="registered without its dataset"):
        source_of(store, project, "sums")
    add_dataset(store, "sums", schemaname="main", hostname="http://example.org")
    with pytest.raises(Refused, match="would be sent unencrypted"):
        source_of(store, project, "sums").pandas()
    add_dataset(store, "sums", hostname="example.org")
    with pytest.raises(Refused, match="isn't an endpoint's URL"):
        source_of(store, project, "sums").pandas()


def test_an_unreachable_server_is_reported_soon(
    store: Store, project: Project, big: BigQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bigquery, "TIMEOUT_SECONDS", 0.5)
    add(store, big, hostname="http://127.0.0.1:9")

    with pytest.raises(DataflowError, match=r"127\.0\.0\.1:9/shop\.main\.sums: "):
        source_of(store, project, "sums").pandas()


def test_the_password_is_a_service_accounts_key(
    store: Store, project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    monkeypatch.setenv("PASSKEY", "a passkey")
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with big_query(token="secret-token") as big:
        account = {
            "type": "service_account",
            "client_email": "odf@shop.iam",
            "private_key": pem,
            "token_uri": f"{big.url}/token",
        }
        add(store, big, password=json.dumps(account))
        to(store, project).publish(row(1), chunk_of(store, "1"), nothing)
        assert rows(big) == [(1, "x")]
        assert big.requests[0] == "POST /token"

        add(store, big, password="not JSON: hunter2")
        with pytest.raises(CredentialError, match="isn't the JSON of a service account") as error:
            source_of(store, project, "sums").pandas()
        assert "hunter2" not in str(error.value)
        add_dataset(store, "sums", encryptedpass="")
        with pytest.raises(DataflowError, match=r"Invalid Credentials|Anonymous"):
            source_of(store, project, "sums").pandas()
