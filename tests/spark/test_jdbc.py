"""Chunks of tables by Java's drivers: here PostgreSQL's own, if the machine has it."""

import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.pooler import Pooler, needs_pgbouncer

JAR = Path(os.environ.get("JDBC_JAR", "/usr/share/java/postgresql.jar"))
ROOT = Path(__file__).parents[2]
SECRET = "tr0ub4dor&3 'quoted"

pytestmark = pytest.mark.skipif(not JAR.exists(), reason="the machine has no JDBC driver")

# A process of its own: Java finds the jar only if it is told before it starts.
TALE = """
import logging, os, sys
from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim
from opendataflow_dagster.location import Table
from opendataflow_dagster.spark.jdbc import StagedJdbcRows, drop, leftovers, read_rows
from opendataflow_dagster.spark.session import spark_session
folder, url, jar = sys.argv[1:4]
secret = sys.stdin.read()
password = lambda: secret
level = os.environ.get("LEVEL", "ERROR")
if level != "ERROR":
    logging.basicConfig(level=1)
spark = spark_session({"spark.master": "local[2]", "spark.jars": jar, "spark.log.level": level,
    "spark.eventLog.enabled": "true", "spark.eventLog.dir": "file://" + folder,
    "spark.eventLog.compress": "false"}, short=True)

def table(name, column, schema="public"):
    return Table("orders", "db/" + name, "jdbc", "", url, schema, name, column, "postgres")

def ids(frame):
    return sorted(row.id for row in frame.select("id").collect())

def write(frame, target, dataid, bounds=None, generation=7):
    return StagedJdbcRows.write(frame, target, dataid, bounds, password, generation)

def ours():
    pass

def refused(work, kind=DataflowError):
    try:
        work()
    except kind as error:
        assert secret not in str(error) and "\\n" not in str(error), error
        return str(error)
    raise AssertionError("nothing was raised")
"""


@pytest.fixture
def tell(postgres_url: str, tmp_path: Path) -> Any:
    """Run some lines in such a process; with a person's connection to the same database."""
    info = conninfo_to_dict(postgres_url)
    direct = f"jdbc:postgresql://{info['host']}:{info['port']}/{info['dbname']}"
    events = tmp_path / "events"
    events.mkdir()
    base = psycopg.connect(postgres_url, autocommit=True)

    def told(lines: str, url: str = direct, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", TALE + lines, str(events), url, str(JAR)],
            input=SECRET,
            text=True,
            capture_output=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | more,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        written = b"".join(each.read_bytes() for each in events.rglob("*") if each.is_file())
        assert b"JDBCRelation" in written
        shown = [line for line in (done.stdout + done.stderr).splitlines() if "tr0ub4dor" in line]
        assert shown == []
        assert b"tr0ub4dor" not in written
        return done.stdout + done.stderr

    yield told, base
    base.close()


def test_chunks_are_read_by_their_bounds_and_replaced_whole(tell: Any) -> None:
    told, base = tell
    base.execute('create table n (id int, "c\'"" col" text, day date)')
    base.execute(
        "insert into n select i, case when i % 2 = 0 then 'it''s' else '\"' end, "
        "date '2026-01-01' + i / 10 from generate_series(0, 99) i"
    )
    base.execute("create table below as select generate_series(-9, 5) id")
    told("""
by_value, by_id, by_day = table("n", "c'\\" col"), table("n", "id"), table("n", "day")
assert len(ids(read_rows(spark, by_value, password=password))) == 100
assert ids(read_rows(spark, by_value, "it's", None, password)) == list(range(0, 100, 2))
read_rows(spark, by_value, "it's", None, password).explain(True)
frame = read_rows(spark, by_id, "10", ("10", "31", None), password, parts=3)
assert frame.rdd.getNumPartitions() == 3 and ids(frame) == list(range(10, 31))
for one, where, bounds, count in [
    (by_id, "10", ("10", "31", None), 2), (by_id, "7", ("7", "8", None), 1),
    (by_day, "d", ("2026-01-02", "2026-01-04", None), 2), (by_id, "1", ("1", None, 4), 1)]:
    by_itself = read_rows(spark, one, where, bounds, password)
    assert by_itself.rdd.getNumPartitions() == count, (where, by_itself.rdd.getNumPartitions())
    assert ids(by_itself) == ids(read_rows(spark, one, where, bounds, password, parts=1))
assert ids(read_rows(spark, by_id, "1", ("1", None, 4), password)) == list(range(1, 100, 4))
below = read_rows(spark, table("below", "id"), "1", ("1", None, 4), password)
assert ids(below) == [-7, -3, 1, 5]
assert write(below, table("below", "id"), "1", ("1", None, 4)).show(ours) == 4
days = read_rows(spark, by_day, "d", ("2026-01-02", "2026-01-04", None), password, parts=2)
assert ids(days) == list(range(10, 30))

some = spark.range(3).selectExpr("cast(id as int) id")
staged = write(some, by_value, "it's")
assert (staged.rows, staged.frame().count()) == (3, 3)
assert leftovers(by_value, password, spark) == [(staged.name, 7)]
def lost(): raise StaleClaim("taken over")
refused(lambda: staged.show(lost), StaleClaim)
assert len(ids(read_rows(spark, by_value, "it's", None, password))) == 50
assert staged.show(ours) == 3
assert leftovers(by_value, password, spark) == []
assert ids(read_rows(spark, by_value, "it's", None, password)) == [0, 1, 2]
assert len(ids(read_rows(spark, by_value, '"', None, password))) == 50

kept = frame.where("id < 13")
assert write(kept, by_id, "10", ("10", "31", None)).show(ours) == 1
assert ids(read_rows(spark, by_id, "10", ("10", "31", None), password)) == [11]
ones = read_rows(spark, by_id, "1", ("1", None, 4), password).limit(2)
assert write(ones, by_id, "1", ("1", None, 4)).show(ours) == 2

print(refused(lambda: write(spark.sql("select 500 id"), by_id, "10", ("10", "31", None)), Refused))
assert leftovers(by_id, password, spark) == []
gone = write(kept, by_id, "10", ("10", "31", None)); gone.discard(); gone.discard()
print(refused(lambda: write(spark.sql("select 1 other"), by_value, "x")))
print(refused(lambda: write(spark.sql("select 'x' day"), by_id, "1", ("1", "5", None)), Refused))
dead = write(some, by_value, "it's")
drop(by_value, password, [dead.name], spark)
assert leftovers(by_value, password, spark) == []
print(refused(lambda: drop(by_value, password, ["n"], spark)))
print(refused(lambda: read_rows(spark, table("nothing", "id"), "1", None, password)))

for where, dataid, rows in (
    (by_day, "2026-01", "select 1 id"), (by_id, "shop 7", "select date '2026-01-01' day")):
    for work in (lambda: read_rows(spark, where, dataid, None, password),
                 lambda: write(spark.sql(rows), where, dataid)):
        said = refused(work, Refused)
        assert said.startswith(f"db/n isn't split, so chunk {dataid!r} has the rows whose "), said
        command = "orders --pending --by month --from 2026-01-01 --to 2026-01-01"
        assert said.endswith(f"Run: odf split {command if where is by_day else '--help'}"), said
assert leftovers(by_day, password, spark) == []
spark.stop()
""")
    assert base.execute("select relname from pg_class where relname like 'odf%'").fetchall() == []


@pytest.mark.parametrize("level", ["DEBUG", "TRACE"])
def test_no_log_of_java_or_python_has_the_password(tell: Any, level: str) -> None:
    told, base = tell
    base.execute("create table n (id int, day text)")
    base.execute("insert into n select i, 'a' from generate_series(0, 9) i")
    said = told(
        """
where = table("n", "day")
frame = read_rows(spark, where, "a", None, password)
assert write(frame.where("id < 5"), where, "a").show(ours) == 5
assert read_rows(spark, where, "a", None, password).count() == 5
assert leftovers(where, password, spark) == []
refused(lambda: read_rows(spark, table("nothing", "id"), "1", None, password))
spark.stop()
""",
        LEVEL=level,
    )
    assert f" {level} " in said, "it was as loud as that"
    assert "Command to send" in said


def test_values_that_a_column_would_round_are_refused_with_their_number(tell: Any) -> None:
    told, base = tell
    base.execute(
        "create table n (day text, id int, a numeric(10,2), b real, c real, d float8, "
        "e timestamp(0), f timestamptz(3), g date, h int, i numeric(38,17))"
    )
    base.execute("insert into n (day, id) values ('A', 7)")
    told("""
where = table("n", "day")
def frame(**told):
    texts = [f"select {at} id, " + ", ".join(f"{each[at]} {name}" for name, each in told.items())
             for at in range(2)]
    return spark.sql(" union all ".join(texts))

kept = frame(
    a=["1.23D", "null"], b=["-2147483648", "null"], c=["0.5D", "double('NaN')"],
    d=["9223372036854774784", "-3"], e=["timestamp'2020-01-01 00:00:01'", "null"],
    f=["timestamp'2020-01-01 00:00:01.123'", "null"], g=["timestamp'2020-01-01'", "null"],
    h=["2D", "null"], i=["0.30000000000000004D", "-1e-7D"])
assert write(kept, where, "A").show(ours) == 2
back = read_rows(spark, where, "A", None, password)
same = [f"cast({name} as {kind}) {name}" for name, kind in kept.dtypes]
assert sorted(map(repr, back.selectExpr(*same).collect())) == sorted(map(repr, kept.collect()))

lost = dict(
    a=["1.23456D", "double('NaN')"], b=["16777217", "2147483647"], c=["1.23456789BD", "1BD"],
    d=["9007199254740993", "9223372036854775807"], e=["timestamp'2020-01-01 00:00:00.6'", "null"],
    f=["timestamp_ntz'2020-01-01 00:00:00.1234'", "null"],
    g=["timestamp'2020-01-01 10:00:00'", "null"],
    h=["1.5D", "1e300D"], i=["1e-20D", "1D"])
said = refused(lambda: write(frame(**lost), where, "A"), Refused)
print(said)
for name, count in dict(a=2, b=2, c=1, d=2, e=1, f=1, g=1, h=2, i=1).items():
    found = said.partition(f"'{name}' is ")[2].partition(";")[0]
    assert f"can't store {count} of 2 values unchanged" in found, (name, said)
assert leftovers(where, password, spark) == []
assert read_rows(spark, where, "A", None, password).count() == 2
spark.stop()
""")
    assert base.execute("select id, a from n order by id").fetchall() == [
        (0, Decimal("1.23")),
        (1, None),
    ]


def test_leftovers_of_a_crash_are_removed_by_the_next_publish_or_clean(tell: Any) -> None:
    told, base = tell
    base.execute("create schema s")
    base.execute("create schema other")
    for name in ("public.n", "public.m", "s.n", "other.n"):
        base.execute(f"create table {name} (id int, c text)")
    told("""
import os
from opendataflow_dagster.store.registry import add_dataset, add_job
from opendataflow_dagster.store import open_store
from opendataflow_dagster.spark.object_store import in_table
where, rows = table("n", "c"), spark.range(2).selectExpr("cast(id as int) id")

def names(*targets):
    return {each.name for each in targets}

def there(target=where):
    return {name for name, _ in leftovers(target, password, spark)}

dead, twin = write(rows, where, "A"), write(rows, where, "A")
beside, newer = write(rows, where, "B"), write(rows, where, "A", generation=9)
kin = [write(rows, each, "A") for each in (table("m", "c"), table("n", "c", "s"),
                                           table("n", "c", "other"))]
assert there() == names(beside, newer), there()
assert write(rows, where, "A", generation=8).show(ours) == 2
assert ids(read_rows(spark, where, "A", None, password)) == [0, 1]
assert there() == names(beside, newer)
assert [there(each) for each in (table("m", "c"), table("n", "c", "s"))] == [
    {kin[0].name}, {kin[1].name}]

store = open_store("sqlite:///" + os.path.join(folder, "odf.db"))
store.init()
add_dataset(store, "orders", format="jdbc", hostname=url, tablename="n", chunkcolumn="c")
assert list(in_table(store, where, password, lambda: spark)) == []  # no job writes it
add_job(store, "load", [], ["orders"])
found = list(in_table(store, where, password, lambda: spark))
assert [(row.datasetid, row.what, row.generation) for row, _ in found] == [
    ("orders", "staging table", 7), ("orders", "staging table", 9)]
assert all(remove() for _, remove in found)
assert there() == set() and there(table("n", "c", "other")) == {kin[2].name}
for each in kin:
    each.discard()
spark.stop()
""")
    assert base.execute("select relname from pg_class where relname like 'odf%'").fetchall() == []


@needs_pgbouncer
@pytest.mark.parametrize("size", [1, 3])
def test_a_transaction_pooler_may_be_in_between(
    tell: Any, pool: Callable[..., Pooler], size: int
) -> None:
    told, base = tell
    base.execute("create table n (id int, at int)")
    base.execute("insert into n select i % 2, i from generate_series(0, 99) i")
    lines = """
place = table("n", "id")
frame = spark.range(50).selectExpr("1 as id", "cast(id as int) as at")
for _ in range(4):
    assert write(frame.repartition(1), place, "1").show(ours) == 50
    assert read_rows(spark, place, "1", None, password).count() == 50
    assert read_rows(spark, place, "0", ("0", "2", None), password, parts=2).count() == 100
assert leftovers(place, password, spark) == []
"""
    pooler = pool(size)
    told(lines, f"jdbc:postgresql://127.0.0.1:{pooler.port}/{base.info.dbname}")
