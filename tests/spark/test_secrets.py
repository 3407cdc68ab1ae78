"""A database that requires a password: decrypted when needed, and readable nowhere."""

import logging
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.sql import SQL, Literal
from pyspark.sql import DataFrame, SparkSession

from opendataflow_dagster.config.credentials import encrypt, for_dataset
from tests.support.postgres import Server
from tests.support.spark_line import Line
from tests.support.store_fixtures import put, sql

SECRET = "tr0ub4dor&3 'quoted\" \\ =%"


@pytest.fixture
def guarded(postgres_server: Server, postgres_url: str) -> Iterator[psycopg.Connection]:
    """A database with a role that needs a password."""
    rules = postgres_server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"host all asked 127.0.0.1/32 scram-sha-256\n{before}")
    with psycopg.connect(postgres_url, autocommit=True) as person:
        person.execute("select pg_reload_conf()")
        person.execute(SQL("create role asked login password {}").format(Literal(SECRET)))
        person.execute("grant create, usage on schema public to asked")
        yield person
        person.execute("drop owned by asked; drop role asked")
        rules.write_text(before)
        person.execute("select pg_reload_conf()")


@pytest.fixture
def secret(line: Line, guarded: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Two tables of that database, whose dataset rows have the password, encrypted."""
    monkeypatch.setenv("PASSKEY", "the key of the house")
    info = guarded.info
    for name in ("orders", "copies"):
        guarded.execute(f"create table {name} (day text, n bigint)")
        guarded.execute(f"alter table {name} owner to asked")
        line.dataset(
            name,
            hostname=f"127.0.0.1:{info.port}",
            database=info.dbname,
            username="asked",
            tablename=name,
            chunkcolumn="day",
            encryptedpass=encrypt(SECRET, "the key of the house", purpose=for_dataset(name)),
        )
    guarded.execute("insert into orders select 'mon', generate_series(1, 100)")
    line.job("copy", "orders", "copies")
    put(line.store, "orders", "mon")
    return line


def test_the_password_opens_tables_and_is_nowhere_to_be_read(
    secret: Line,
    spark: SparkSession,
    guarded: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    plans: list[str] = []

    def copy(orders: DataFrame) -> DataFrame:
        orders.explain(True)
        plans.append(capfd.readouterr().out)
        return orders

    assert secret.run("copy", copy).done == 1, secret.said

    assert guarded.execute("select count(*), sum(n) from copies").fetchone() == (100, 5050)
    written = capfd.readouterr()
    whole = "\n".join([*plans, *secret.said, written.out, written.err, caplog.text])
    assert "MapInArrow" in plans[0]
    assert "tr0ub4dor" not in whole
    rows = sql(secret.store, "select * from chunkfact") + sql(
        secret.store, "select * from dataevent"
    )
    assert "tr0ub4dor" not in repr(rows)


def test_a_wrong_password_fails_the_chunk_in_one_line(
    secret: Line, guarded: psycopg.Connection
) -> None:
    guarded.execute("alter role asked password 'another'")

    assert secret.run("copy", lambda orders: orders).failed == 1

    assert "password authentication failed" in secret.reason()
    assert "tr0ub4dor" not in "\n".join(secret.said)


def test_without_the_key_the_chunk_fails_and_says_so(
    secret: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PASSKEY")

    assert secret.run("copy", lambda orders: orders).failed == 1

    assert "PASSKEY" in secret.reason()


def test_nothing_on_the_disk_has_the_password(secret: Line, tmp_path: Path) -> None:
    secret.run("copy", lambda orders: orders)

    for each in tmp_path.rglob("*"):
        assert not each.is_file() or b"tr0ub4dor" not in each.read_bytes(), each
