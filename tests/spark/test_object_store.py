"""Places without reliable renames: versions that the tables name, and pointers for others."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.chunk import Chunk, open_chunk
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim
from opendataflow_dagster.location import Folder, ObjectStore, Table, address, chunk_place
from opendataflow_dagster.model import Claim, Fact
from opendataflow_dagster.runner.environment import job_environment
from opendataflow_dagster.spark.object_store import (
    HadoopFiles,
    LocalFiles,
    StagedRemote,
    chunk_version,
    from_json,
    in_remote,
    point,
    read_version,
)
from opendataflow_dagster.storage import cleanup
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.store import open_store, operations
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store, stale_claim
from tests.support.store_fixtures import close, expire, register, sql, take


@pytest.fixture
def line(store: Store, tmp_path: Path) -> Store:
    """A job `load` that produces `out`, in a place without renames, from `src`."""
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", hostname=f"remote+file://{tmp_path}/out")
    operations.ready(store, "src", ["1", "2", "a/b", "x: 100%"])
    return store


def place(format: str = "parquet") -> ObjectStore:
    return ObjectStore("out", f"remote+file://{Path.cwd()}/out", format)


def nobody() -> Any:
    raise AssertionError("no session is needed for files of this machine")


def ours(store: Store, claim: Claim) -> Any:
    def confirm() -> None:
        if store.heartbeat([claim]):
            raise stale_claim([claim])

    return confirm


def written(dataid: str, generation: int, text: str) -> StagedRemote:
    """Write a version without Spark."""
    staged = StagedRemote(None, place("csv"), dataid, generation)
    folder = staged.path.removeprefix("file://")
    os.makedirs(folder)
    for name in ("part-0.csv", "part-1.csv"):
        Path(folder, name).write_text(text)
    staged.tell({"format": "csv", "rows": 2})
    return staged


def made(store: Store, dataid: str, text: str) -> str:
    """Publish a READY chunk; return its location."""
    [claim] = take(store, "load", only=dataid)
    staged = written(dataid, claim.generation, text)
    location = staged.show(ours(store, claim))
    store.finish(claim, [Fact("out", dataid, location, 2)])
    staged.discard()
    return location


def chunk_of(store: Store, claim: Claim) -> Chunk:
    return open_chunk(store, claim, job_environment(store, store.plan(claim.jobid)))


def cleaned(store: Store, grace: float = 0) -> list[str]:
    found = list(in_remote(store, place(), nobody, grace))
    return sorted(row.what for row, remove in found if remove())


def there() -> list[str]:
    return sorted(
        f"{each.parent.name}/{each.name}" for each in Path("out").glob("dataid=*/v=*") if each
    )


def texts(location: str) -> set[str]:
    folder = Path(address(location).removeprefix("file://"))
    found = {each.read_text() for each in folder.glob("part-*")}
    if len(list(folder.glob("part-*"))) != 2:
        raise FileNotFoundError(folder)
    return found


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"hostname": "s3a://b/p/"}, ObjectStore("x", "s3a://b/p", "parquet")),
        (
            {"hostname": "gs://b", "database": "d", "format": "orc"},
            ObjectStore("x", "gs://b/d", "orc"),
        ),
        (
            {"hostname": "abfss://c@a/p", "format": "delta"},
            ObjectStore("x", "abfss://c@a/p", "delta"),
        ),
        (
            {"hostname": "hdfs://n:1/p", "tablename": "t"},
            ObjectStore("x", "hdfs://n:1/p/t", "parquet"),
        ),
        ({"hostname": "remote+file:///p"}, ObjectStore("x", "remote+file:///p", "parquet")),
        ({"hostname": "/p", "format": "iceberg"}, Folder("x", "/p", "iceberg")),
        (
            {"hostname": "jdbc:h2:mem:x", "tablename": "t", "chunkcolumn": "c"},
            Table("x", "jdbc:h2:mem:x/t", "jdbc", "", "jdbc:h2:mem:x", "", "t", "c", ""),
        ),
        (
            {
                "hostname": "jdbc:h2:/p",
                "schemaname": "s",
                "tablename": "t",
                "chunkcolumn": "c",
                "format": "JDBC",
            },
            Table("x", "jdbc:h2:/p/s.t", "jdbc", "", "jdbc:h2:/p", "s", "t", "c", ""),
        ),
    ],
)
def test_the_place_decides_the_kind_of_storage(columns: dict[str, str], kind: Any) -> None:
    assert chunk_place("x", columns) == kind


def test_a_host_of_jdbc_has_to_be_its_url() -> None:
    with pytest.raises(Refused, match=r"no URL of JDBC\. Run: odf dataset add x --hostname jdbc:"):
        chunk_place("x", {"hostname": "h", "format": "jdbc", "tablename": "t", "chunkcolumn": "c"})


def test_a_chunk_is_a_version_that_its_fact_and_its_pointer_name(line: Store) -> None:
    for dataid in ("1", "a/b", "x: 100%"):
        first = made(line, dataid, "old")
        operations.resubmit(line, "load", [dataid])
        second = made(line, dataid, "new")
        chunk = f"{place().root}/{folders.directory(dataid)}"

        assert first.startswith(f"{chunk}/v=")
        assert (texts(first), texts(second)) == ({"old"}, {"new"})
        assert chunk_version(LocalFiles(), place(), dataid, second) == second
        assert chunk_version(LocalFiles(), place(), dataid) == second
        assert chunk_version(LocalFiles(), place(), dataid, place().root) == second
    assert chunk_version(LocalFiles(), place(), "nothing") is None


def test_old_versions_are_removed_after_their_grace_and_the_current_one_stays(line: Store) -> None:
    first = made(line, "1", "old")
    operations.resubmit(line, "load", ["1"])
    second = made(line, "1", "new")

    assert cleaned(line, 3600) == []
    assert cleaned(line) == [cleanup.VERSION]
    assert texts(second) == {"new"}
    assert not Path(address(first).removeprefix("file://")).exists()
    operations.resubmit(line, "load", ["1"])  # it is to be made anew, and is all that there is
    assert cleaned(line) == []
    assert texts(second) == {"new"}


def test_the_grace_of_a_version_begins_when_it_is_replaced(line: Store) -> None:
    first = made(line, "1", "old")
    folder = Path(address(first).removeprefix("file://"))
    for each in (folder, *folder.iterdir()):  # yesterday's, which others read today
        os.utime(each, (time.time() - 86400,) * 2)
    operations.resubmit(line, "load", ["1"])
    second = made(line, "1", "new")

    assert cleaned(line, 3600) == []
    assert texts(first) == {"old"}
    folder = Path(address(second).removeprefix("file://"))
    for each in (folder, *folder.iterdir()):
        os.utime(each, (time.time() - 7200,) * 2)
    assert cleaned(line, 3600) == [cleanup.VERSION]
    assert texts(second) == {"new"}


def test_a_version_that_is_being_written_or_read_stays(line: Store) -> None:
    register(line, "use", ["out"], ["end"])
    made(line, "1", "old")
    [reading] = take(line, "use", only="1")
    operations.resubmit(line, "load", ["1"])
    [claim] = take(line, "load", only="1")
    written("1", claim.generation, "half")
    assert len(there()) == 2

    assert cleaned(line) == []
    line.fail(claim, "it failed")
    assert cleaned(line) == [cleanup.VERSION]
    line.finish(reading)
    assert len(there()) == 1


def test_a_zombie_changes_nothing_that_others_see(line: Store) -> None:
    [claim] = take(line, "load", only="1")
    late = written("1", claim.generation, "late")
    expire(line)
    line.recover()
    newer = made(line, "1", "new")

    with pytest.raises(StaleClaim):
        late.show(ours(line, claim))
    late.discard()
    assert len(there()) == 1
    # Stopped between its question and its pointer: the newer generation stays named.
    zombie = written("1", claim.generation, "late")
    assert zombie.show(lambda: None)
    assert chunk_version(LocalFiles(), place(), "1") == newer
    with pytest.raises(StaleClaim):
        line.finish(claim, [Fact("out", "1", zombie.location, 2)])
    assert cleaned(line) == [cleanup.VERSION]
    assert texts(newer) == {"new"}


def test_clean_corrects_a_pointer_to_another_version(line: Store) -> None:
    first = made(line, "1", "new")
    chunk = first.rpartition("/")[0]
    other = written("1", 10**6, "never accepted")
    point(LocalFiles(), chunk, other.location, 10**6)
    assert chunk_version(LocalFiles(), place(), "1") == other.location

    assert cleaned(line) == [cleanup.POINTER]
    assert chunk_version(LocalFiles(), place(), "1") == first
    assert cleaned(line) == [cleanup.VERSION]
    done = CliRunner().invoke(
        app,
        ["clean", "--older-than", "0s", "--json"],
        prog_name="odf",
        env={
            "DATAFLOW_URL": line.db.url  # type: ignore[attr-defined]
            if line.db.dialect == "postgres"
            else f"sqlite:///{line.db.path}"
        },
    )
    assert (done.exit_code, json.loads(done.stdout)) == (0, [])


def test_what_spark_hasnt_committed_isnt_shown(line: Store) -> None:
    staged = StagedRemote(None, place("csv"), "1", 7)
    os.makedirs(f"{staged.path.removeprefix('file://')}/_temporary/0")
    with pytest.raises(DataflowError, match="is incomplete"):
        staged.tell({})
    staged.discard()
    assert there() == []


KILLED = """
import os, signal, sys
from opendataflow_dagster.model import Fact
from opendataflow_dagster.store import open_store
from opendataflow_dagster.spark import object_store as remote, object_store as stores
from tests.support.store_fixtures import take
from tests.spark.test_object_store import ours, written

def die(*more): os.kill(os.getpid(), signal.SIGKILL)

point = sys.argv[2]
store = open_store(sys.argv[1])
[claim] = take(store, "load", only="1")
if point == "half written":
    os.fsync = die
staged = written("1", claim.generation, "new")
if point == "written": die()
if point == "confirmed": remote.point = die
if point == "pointer": os.replace = die
location = staged.show(ours(store, claim))
if point == "shown": die()
store.finish(claim, [Fact("out", "1", location, 2)])
die()
"""


@pytest.mark.parametrize("point_", ["half written", "written", "confirmed", "pointer", "shown", ""])
def test_killed_anywhere_readers_see_old_or_new_and_a_rerun_converges(
    line: Store, point_: str
) -> None:
    url = line.db.url if line.db.dialect == "postgres" else f"sqlite:///{line.db.path}"  # type: ignore[attr-defined]
    made(line, "1", "old")
    operations.resubmit(line, "load", ["1"])
    root = Path(__file__).parents[2]
    reader, seen, over = open_store(url), [], threading.Event()

    def read() -> None:
        while not over.is_set():
            rows = reader.db.run("cleaning.located", datasetid="out")
            location = max(rows, key=lambda row: row[1])[2]
            seen.append(texts(location))
        reader.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, url, point_],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        time.sleep(0.05)
    finally:
        over.set()
        thread.join()

    assert {each for some in seen for each in some} <= {"old", "new"}
    assert seen[-1] == ({"old"} if point_ else {"new"})
    if point_:
        expire(line)
        line.recover()
        location = made(line, "1", "again")
        assert texts(location) == {"again"}
    cleaned(line)
    cleaned(line)
    assert len(there()) == 1
    files = [each for each in Path("out").rglob("*") if each.is_file()]
    assert sorted(each.name.split("-")[0] for each in files if each.name != "_odf.json") == [
        "part",
        "part",
    ]


# --- with Spark ---


def test_a_frame_is_published_and_read_by_versions(line: Store, spark: Any) -> None:
    for dataid, count in (("a/b", 10), ("x: 100%", 0)):
        [claim] = take(line, "load", only=dataid)
        df = spark.range(count).selectExpr("id", "cast(id as string) as `a.b`")
        staged = StagedRemote.write(spark, chunk_of(line, claim), place(), df)
        location = staged.show(ours(line, claim))
        line.finish(claim, [Fact("out", dataid, location, staged.evidence.rows)])
        staged.discard()

        assert staged.evidence.rows == count
        for known in (location, None):
            found = read_version(spark, place(), dataid, known)
            assert found.dtypes == df.dtypes
            assert found.count() == count
    assert cleaned(line) == []
    with pytest.raises(Refused, match="has no data of chunk '2'"):
        read_version(spark, place(), "2", None)


def test_hadoops_files_behave_like_pythons(spark: Any, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/a%2Fb x"
    hadoop, local = HadoopFiles(spark, place()), LocalFiles()
    assert hadoop.read(f"{root}/c/_odf.json") is None
    assert hadoop.below(root) == []
    for text in ("one", "two"):
        hadoop.write(f"{root}/c/_odf.json", json.dumps({"is": text}).encode())
        assert from_json(hadoop.read(f"{root}/c/_odf.json")) == {"is": text}
        assert local.read(f"{root}/c/_odf.json") == hadoop.read(f"{root}/c/_odf.json")
    local.write(f"{root}/c/d/x", b"\x00\xff" * 1000)
    assert hadoop.read(f"{root}/c/d/x") == b"\x00\xff" * 1000
    visible = [each for each in local.below(root) if not each.path.endswith(("/", ".crc"))]
    by_hadoop = sorted(hadoop.below(root))
    assert [each[:2] for each in by_hadoop] == [each[:2] for each in sorted(visible)]
    pairs = zip(by_hadoop, sorted(visible), strict=True)
    assert max(abs(one.changed - other.changed) for one, other in pairs) < 1
    assert hadoop.remove(f"{root}/c")
    assert not hadoop.remove(f"{root}/c")
    assert local.below(root) == []


def test_a_place_without_java_classes_is_refused_in_one_line(spark: Any) -> None:
    with pytest.raises(Refused, match=r"no jars that read s3a URLs.*spark.jars.packages"):
        HadoopFiles(spark, ObjectStore("out", "s3a://bucket/out", "parquet"))
    with pytest.raises(Refused, match="no jars that read oss URLs"):
        HadoopFiles(spark, ObjectStore("out", "oss://bucket/out", "parquet"))


def test_spark_connect_is_refused_where_hadoop_is_needed() -> None:
    class Connect:
        """Like a Spark Connect session: without its own Java."""

    with pytest.raises(Refused, match="a Spark Connect session can't manage"):
        HadoopFiles(Connect(), ObjectStore("x", "s3a://b/p", "parquet"))  # type: ignore[arg-type]


ZOO = """id, cast(id as string) s, cast(id as decimal(5,2)) d1, cast(id as decimal(38,10)) d3,
    {times}, date'2026-01-01' da, cast('x' as binary) b, array(id, null) a, map('k', id) m,
    named_struct('x', id, 'y', cast('NaN' as double)) st, cast('NaN' as float) f,
    cast(-0.0 as double) z,
    make_dt_interval(0,0,0,id) dti, make_ym_interval(1,2) ymi, cast(id as tinyint) ti, id%2=0 bo,
    cast('ab' as char(5)) ch, array(named_struct('q', map('z', cast(1.5 as decimal(10,3))))) nest,
    cast(null as int) nul, cast(id as long) `a.b c`,
    if(id%3=0, null, struct(id as i, array(id) as l)) sn"""
TIMES = {
    "zoned": "timestamp'1500-01-01 00:00:00' + make_dt_interval(0,0,0,id) ts",
    "local": "timestamp_ntz'2026-01-01 00:00:00' tn",
}


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("as_", ["INT96", "TIMESTAMP_MICROS"])
def test_spark_reads_the_same_after_compaction(
    sqlite_url: str, spark: Any, kind: str, as_: str
) -> None:
    from opendataflow_dagster.spark.chunk_files import read_files
    from opendataflow_dagster.spark.evidence import observed
    from opendataflow_dagster.storage.compact import compact

    spark.conf.set("spark.sql.parquet.outputTimestampType", as_)
    store = open_store(sqlite_url)
    store.init()
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", hostname=str(Path.cwd() / "out"))
    operations.ready(store, "src", ["1", "a/b"])
    before = {}

    def evidence(df: Any) -> Any:
        frame, taken = observed(df)
        frame.write.format("noop").mode("overwrite").save()
        return taken()

    for number, dataid in enumerate(("1", "a/b")):
        [claim] = take(store, "load", only=dataid)
        df = spark.range(0, 20 + number, 1, 4).selectExpr(*_split(ZOO.format(times=TIMES[kind])))
        staged = folders.Staged(str(Path.cwd() / "out"), dataid, claim.generation)
        df.write.mode("append").parquet(staged.path)
        for each in Path(staged.path).glob("*.crc"):
            each.unlink()
        for each in Path(staged.path).glob(".*.crc"):
            each.unlink()
        staged.tell({"format": "parquet", "rows": 20 + number, "schema": df.schema.jsonValue()})
        path = staged.show(lambda: None)
        store.finish(claim, [Fact("out", dataid, path, 20 + number)])
        staged.discard()
        before[dataid] = evidence(read_files(spark, path, folders.read_note(path), "parquet"))
        assert spark.read.parquet(path).dtypes == df.dtypes

    done = list(compact(store, "out"))

    assert {row.left for row in done} == {""}
    assert len(done) == 2
    for dataid, told in before.items():
        [(location,)] = sql(
            store,
            "select location from chunkfact where dataid = :d and datasetid = 'out'",
            d=dataid,
        )
        found = read_files(spark, location, folders.read_note(location), "parquet")
        assert evidence(found) == told
        plain = spark.read.parquet(location)  # by what its footer tells, without a note
        assert plain.dtypes == df.dtypes
    close(store)


def _split(text: str) -> list[str]:
    """The expressions of a select list: commas within brackets don't part them."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [each.strip() for each in parts]


def test_variants_are_left_as_they_are(sqlite_url: str, spark: Any) -> None:
    from opendataflow_dagster.storage.compact import compact

    store = open_store(sqlite_url)
    store.init()
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", hostname=str(Path.cwd() / "out"))
    operations.ready(store, "src", ["1"])
    [claim] = take(store, "load", only="1")
    staged = folders.Staged(str(Path.cwd() / "out"), "1", claim.generation)
    df = spark.range(0, 20, 1, 4).selectExpr("parse_json(cast(id as string)) v")
    df.write.mode("append").parquet(staged.path)
    staged.tell({"format": "parquet"})
    path = staged.show(lambda: None)
    store.finish(claim, [Fact("out", "1", path, 20)])
    staged.discard()

    [row] = compact(store, "out")

    assert "variants" in row.left
    assert spark.read.parquet(path).selectExpr("sum(cast(v as int))").first()[0] == 190
    close(store)


def test_pandas_reads_what_spark_wrote_the_same_after_compaction(
    sqlite_url: str, spark: Any
) -> None:
    from opendataflow_dagster.storage import folder as folders
    from opendataflow_dagster.storage.compact import compact

    store = open_store(sqlite_url)
    store.init()
    register(store, "load", ["src"], ["out"])
    add_dataset(store, "out", hostname=str(Path.cwd() / "out"))
    operations.ready(store, "src", ["1"])
    [claim] = take(store, "load", only="1")
    staged = folders.Staged(str(Path.cwd() / "out"), "1", claim.generation)
    df = spark.range(0, 20, 1, 4).selectExpr(
        "id", "timestamp'2026-01-01 00:00:00' ts", "cast(id as decimal(9,2)) d"
    )
    df.write.mode("append").parquet(staged.path)
    staged.tell({"format": "parquet"})
    path = staged.show(lambda: None)
    store.finish(claim, [Fact("out", "1", path, 20)])
    staged.discard()
    before = folders.read_frame(path, "parquet")

    assert [row.left for row in compact(store, "out")] == [""]
    pd.testing.assert_frame_equal(folders.read_frame(path, "parquet"), before)
    close(store)


def test_staging_tables_of_ended_claims_are_removed(
    postgres_url: str, spark: Any, postgres_server: Any
) -> None:
    import psycopg

    from opendataflow_dagster.spark.postgres_write import StagedRows, leftovers

    store = open_store(postgres_url)
    store.init()
    told = conninfo_to_dict(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("create table public.sales (day text, n bigint)")
    register(store, "load", ["src"], ["out"])
    add_dataset(
        store,
        "out",
        hostname=f"{told['host']}:{told['port']}",
        database=str(told["dbname"]),
        schemaname="public",
        tablename="sales",
        chunkcolumn="day",
        username=str(told["user"]),
    )
    operations.ready(store, "src", ["1"])
    [claim] = take(store, "load", only="1")
    [columns] = [each for name, each, _ in cleanup.registered(store) if name == "out"]
    table = chunk_place("out", columns)
    assert isinstance(table, Table)
    df = spark.range(10).selectExpr("id as n")
    staged = StagedRows.write(df, table, "1", None, lambda: None, claim.generation)

    def odf() -> list[dict[str, Any]]:
        done = CliRunner().invoke(
            app, ["clean", "--json"], prog_name="odf", env={"DATAFLOW_URL": postgres_url}
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert odf() == []
    store.fail(claim, "killed")
    [row] = odf()
    assert (row["what"], row["generation"]) == (cleanup.TABLE, claim.generation)
    assert leftovers(table, lambda: None) == []
    assert odf() == []
    staged.discard()
    close(store)
