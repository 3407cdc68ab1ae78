"""Functions of DataFrames as assets: their session, evidence, checks, batches and threads."""

import os
import runpy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    SparkJob,
    SparkResource,
    build_definitions,
    dataflow_assets,
    dataflow_check,
    spark_job,
)
from opendataflow_dagster.dagster.events import recorded_event
from opendataflow_dagster.dagster.translator import DataflowTranslator
from opendataflow_dagster.dagster.versions import STALE_CHECK, stale_check
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.spark import progress
from opendataflow_dagster.spark.schema import columns_of
from opendataflow_dagster.storage.folder import chunk_path
from opendataflow_dagster.store.overview import facts, truths
from tests.dagster.test_assets import RANGE, Ran, metadata
from tests.support.spark_line import Line
from tests.support.store_fixtures import connect, policy, put, sql, status

EXAMPLES = Path(__file__).parents[1] / "projects" / "dagster_page"
Run = Callable[..., Ran]


@pytest.fixture
def dataflow(line: Line, sqlite_url: str) -> Iterator[DataflowResource]:
    """The tables of the line; a job `double` produces `doubled` from six chunks of `numbers`.

    They were written by Spark, so that a batch can read them together; the third has a 0.
    """
    for name, ins, outs in (("copy", "arrived", "numbers"), ("double", "numbers", "doubled")):
        line.job(name, ins, outs)
    for at in range(1, 7):  # by pyarrow: six jobs of Spark would take longer than the test
        folder = Path(chunk_path(str(line.folder / "arrived"), str(at)))
        folder.mkdir(parents=True)
        values = pa.array(range(0 if at == 3 else 1, 4 + at), pa.int64())
        pq.write_table(pa.table({"n": values}), folder / "part-0.parquet")
        put(line.store, "arrived", str(at))
    line.run("copy", spark_job(lambda df: df, batch=6))
    line.said.clear()
    made = DataflowResource(url=sqlite_url)
    yield made
    made.store.close()
    made.patient_store(0.0).close()


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def run(dataflow: DataflowResource, instance: dg.DagsterInstance) -> Run:
    """Run a function for partitions 1 to 6, or those named."""

    def ran(fn: Any, *keys: str, resources: Any = None, **options: Any) -> Ran:
        keys = keys or tuple(map(str, range(1, 7)))
        made = dataflow_assets(job="double", dataflow=dataflow, **options)(fn)
        instance.add_dynamic_partitions("dataflow/arrived", list(keys))
        told = dict(zip(RANGE, (keys[0], keys[-1]), strict=True)) if len(keys) > 1 else {}
        return Ran(
            dg.materialize(
                [made],
                instance=instance,
                tags=told,
                raise_on_error=False,
                resources={"dataflow": dataflow, **(resources or {})},
                partition_key=keys[0] if len(keys) == 1 else None,
            )
        )

    return ran


def double(numbers: DataFrame) -> DataFrame:
    """Every number twice."""
    return numbers.withColumn("twice", F.expr("n * 2"))


def checks(ran: Ran) -> dict[tuple[str, str | None], dg.AssetCheckEvaluation]:
    return {
        (each.check_name, each.partition): each for each in ran.result.get_asset_check_evaluations()
    }


# --- the definition ---


def test_the_asset_is_called_and_described_as_the_function(dataflow: DataflowResource) -> None:
    made = dataflow_assets(job="double", dataflow=dataflow)(spark_job(double, batch=3))
    assert made.op.description == "Every number twice."
    assert made.op.name == DataflowTranslator().op_name("double")
    assert "pyspark" not in made.required_resource_keys
    [spec] = made.specs
    assert "spark" in spec.kinds

    defs = build_definitions(dataflow, functions={"double": spark_job(double)})
    assert defs.resolve_assets_def(dg.AssetKey("doubled")).op.description == "Every number twice."


def test_a_job_that_is_given_twice_is_called_by_its_function(
    dataflow: DataflowResource, caplog: pytest.LogCaptureFixture
) -> None:
    mine = dataflow_assets(job="double", dataflow=dataflow)(double)
    with pytest.raises(WrongUse, match="by the assets of @dataflow_assets and by function double"):
        build_definitions(dataflow, assets=[mine], functions={"double": spark_job(double)})
    build_definitions(dataflow, functions={"nope": spark_job(double)})
    assert "Job 'nope' isn't registered, but function double is for it" in caplog.text


def plain(chunk: Chunk) -> None: ...


def unique_n(chunk: Chunk) -> bool:
    return True


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (lambda first, context: None, {}, None),
        (lambda first, second: None, {}, "has a parameter 'second' that nothing provides"),
        (spark_job(lambda first, second: None), {}, "reads no dataset of that name"),
        (spark_job(double, expect={"uniqe": ["n"]}), {}, "did you mean|Choose from"),
        (plain, {"pyspark": True}, "pyspark=True is for functions of DataFrames, which plain of"),
        (
            spark_job(double, expect={"unique": ["n"]}),
            {"checks": [dataflow_check()(unique_n)]},
            "has two checks named 'unique_n'",
        ),
    ],
)
def test_what_is_wrong_is_said_when_the_location_loads(
    dataflow: DataflowResource, function: Any, options: Any, told: str | None
) -> None:
    make = dataflow_assets(job="double", dataflow=dataflow, **options)
    if told is None:  # no function of DataFrames: a chunk and a context
        make(function)
        return
    with pytest.raises(WrongUse, match=told) as raised:
        make(function)
    assert "\n" not in str(raised.value)


class Sessionless:
    """A resource that has no session."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    @property
    def spark_session(self) -> Any:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (WrongUse("spark.remote is wrong"), "spark.remote is wrong"),
        (RuntimeError("gateway\nexited"), "Spark started no session: RuntimeError: gateway exited"),
    ],
)
@pytest.mark.parametrize("how", [{}, {"batch": 3}, {"threads": 2}])
def test_without_a_session_the_run_fails_and_no_chunk(
    run: Run, line: Line, error: Exception, told: str, how: dict[str, int]
) -> None:
    resource = Sessionless(error)
    ran = run(spark_job(double, **how), pyspark=True, resources={"pyspark": resource})

    assert not ran.success
    [failed] = [
        each.step_failure_data
        for each in ran.result.filter_events(lambda each: each.is_step_failure)
    ]
    assert failed.user_failure_data is not None
    assert failed.user_failure_data.description == told
    assert resource.asked == 1
    made = {
        each
        for (each,) in sql(line.store, "select status from datastatus where datasetid = 'doubled'")
    }
    assert made == {"RESUBMIT"}


def test_the_public_names_are_there() -> None:
    assert SparkJob is type(spark_job(double))
    assert issubclass(SparkResource, dg.ConfigurableResource)


# --- the session ---


class Sessions:
    """A resource that counts how often it is asked for its session."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark, self.asked = spark, 0

    @property
    def spark_session(self) -> SparkSession:
        self.asked += 1
        return self.spark


def test_the_session_is_that_of_the_resource(
    dataflow: DataflowResource, run: Run, spark: SparkSession
) -> None:
    sessions = Sessions(spark)

    assert run(double, "1", pyspark=True, resources={"pyspark": sessions}).success
    assert sessions.asked

    made = dataflow_assets(job="double", dataflow=dataflow, pyspark=True)(double)
    assert "pyspark" in made.required_resource_keys
    resource = SparkResource(spark_config={"spark.sql.shuffle.partitions": "3"})
    defs = build_definitions(dataflow, functions={"double": double}, pyspark=resource)
    made = defs.resolve_assets_def(dg.AssetKey("doubled"))
    assert "pyspark" in made.required_resource_keys
    assert (defs.resources or {})["pyspark"] is resource


def test_our_resource_has_the_session_and_applies_settings(run: Run, spark: SparkSession) -> None:
    seen: list[Any] = []

    def look(numbers: DataFrame, spark: SparkSession) -> DataFrame:
        seen.append((spark, spark.conf.get("spark.sql.shuffle.partitions")))
        return numbers

    resource = SparkResource(spark_config={"spark": {"sql": {"shuffle": {"partitions": "3"}}}})

    assert run(look, "1", pyspark=True, resources={"pyspark": resource}).success
    assert seen == [(spark, "3")]


def test_the_example_of_the_page(
    line: Line, instance: dg.DagsterInstance, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.job("enrich", "sales", "enriched")
    line.arrive("sales", _1=line.spark.createDataFrame([(1, 100.0)], "id int, amount double"))
    monkeypatch.setenv("DATAFLOW_URL", sqlite_url)
    defs = runpy.run_path(str(EXAMPLES / "enriched.py"))["defs"]
    instance.add_dynamic_partitions("dataflow/sales", ["1"])

    job = defs.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        instance=instance, asset_selection=[dg.AssetKey("enriched")], partition_key="1"
    )

    assert done.success
    assert line.rows("enriched", "1") == [(1, 100.0, 119.0)]
    assert [event.passed for event in done.get_asset_check_evaluations()] == [True] * 3


def test_without_a_resource_the_properties_say_how_the_session_is(
    run: Run, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "dataflow.properties").write_text("spark.sql.shuffle.partitions=5\n")
    seen: list[str] = []

    def look(numbers: DataFrame, spark: SparkSession) -> DataFrame:
        seen.append(str(spark.conf.get("spark.sql.shuffle.partitions")))
        return numbers

    assert run(look, "1").success
    assert seen == ["5"]


def test_dagster_pysparks_own_resource_works(run: Run, spark: SparkSession) -> None:
    dagster_pyspark = pytest.importorskip("dagster_pyspark")
    resource = dagster_pyspark.LazyPySparkResource(spark_config={})

    assert run(double, "1", pyspark=True, resources={"pyspark": resource}).success


# --- evidence ---


def test_the_evidence_is_in_the_metadata(line: Line, run: Run) -> None:
    ran = run(double, "1")

    assert ran.success
    fact, given = line.facts("doubled")["1"], line.facts("numbers")["1"]
    told = metadata(ran.made["doubled", "1"])
    for name in ("rows", "bytes", "fingerprint", "generation"):
        assert told[name] == fact[name]
    schema = told["dagster/column_schema"]
    assert [(each.name, each.type) for each in schema.columns] == [
        ("n", "bigint"),
        ("twice", "bigint"),
    ]
    assert told["inputs"] == {"numbers": given["generation"]}
    assert f"generation {given['generation']}" in told["right"]
    assert f"fingerprint {given['fingerprint']}" in told["right"]

    shown = metadata(run(double, "1").made["doubled", "1"])
    assert shown["skipped"] is True
    assert shown["dagster/column_schema"] == schema


def test_a_chunk_produced_outside_shows_its_schema(line: Line, dataflow: DataflowResource) -> None:
    line.run("double", double)
    known = truths(line.store, "doubled", ["1"])
    fact = facts(line.store, "doubled", known)["1"]

    event = recorded_event("doubled", "1", known["1"], fact, DataflowTranslator())

    schema = event.metadata["dagster/column_schema"].value
    assert [each.name for each in schema.columns] == ["n", "twice"]  # type: ignore[union-attr]
    fact["schema"] = "as the loader says"
    event = recorded_event("doubled", "1", known["1"], fact, DataflowTranslator())
    assert "dagster/column_schema" not in event.metadata


def test_a_schema_is_read_without_spark() -> None:
    text = "id:bigint,`a,b``:c`:struct<x:int,`y,>`:decimal(10,2)>,m:map<string,array<int>>"
    assert columns_of(text) == [
        ("id", "bigint"),
        ("a,b`:c", "struct<x:int,`y,>`:decimal(10,2)>"),
        ("m", "map<string,array<int>>"),
    ]
    assert columns_of("") == []


def test_expectations_are_checks_of_the_asset(line: Line, run: Run) -> None:
    job = spark_job(double, expect={"range": {"n": (1, None)}, "warn": {"rows": {"max": 5}}})

    ran = run(job)

    assert not ran.success
    assert ran.counts == {"made": 5, "skipped": 0, "refused": 0, "failed": 1, "lost": 0}
    assert [line.status("doubled", each, "double") for each in "123456"] == [
        "READY",
        "READY",
        "FAILED",
        "READY",
        "READY",
        "READY",
    ]
    found = checks(ran)
    assert len(found) == 12 + 1, "and whether any chunk is stale"
    assert {key for (name, key), each in found.items() if not each.passed and name == "rows"} == {
        "3",
        "4",
        "5",
        "6",
    }
    bad, warned = found["range_n", "3"], found["rows", "6"]
    assert (bad.severity, warned.severity) == (
        dg.AssetCheckSeverity.ERROR,
        dg.AssetCheckSeverity.WARN,
    )
    assert (bad.description or "").startswith("1 of 7 rows are outside 1≤n, such as (n=0")
    assert "n=0" in str(bad.metadata["sample"].value)
    assert bad.metadata["violations"].value == 1
    assert warned.description
    assert found["range_n", "1"].passed
    assert found["range_n", "1"].metadata["rows"].value == 4
    assert "NOT_VALIDATED: range_n: " in ran.reason
    assert line.left() == []


def test_the_checks_page_says_what_is_expected(dataflow: DataflowResource) -> None:
    def tidy(df: DataFrame) -> bool:
        """The rows are tidy."""
        return True

    expect = {"range": {"n": (0, 9)}, "warn": {"unique": ["n"], "function": [tidy]}}
    made = dataflow_assets(job="double", dataflow=dataflow)(spark_job(double, expect=expect))

    told = {each.name: (each.blocking, each.description) for each in made.check_specs}
    assert told == {
        "range_n": (True, "Rows that are outside 0≤n≤9 fail it."),
        "unique_n": (False, "n: no two rows have the same values."),
        "tidy": (False, "The rows are tidy."),
        STALE_CHECK: (False, stale_check("doubled").description),
    }


# --- many chunks ---


@pytest.mark.parametrize("how", [{}, {"batch": 6}, {"batch": 4}, {"threads": 2}])
def test_a_bad_chunk_fails_alone(line: Line, run: Run, how: dict[str, int]) -> None:
    def inverse(numbers: DataFrame) -> DataFrame:
        return numbers.withColumn("n", F.expr("6 / n"))

    ran = run(spark_job(inverse, **how))

    assert ran.counts == {"made": 5, "skipped": 0, "refused": 0, "failed": 1, "lost": 0}
    assert {key for _, key in ran.made} == set("12456")
    assert ran.reason.startswith(
        "1 of 6 chunks of job 'double' wasn't produced:\n3: [DIVIDE_BY_ZERO]"
    )
    assert line.status("doubled", "3", "double") == "FAILED"
    assert line.left() == []
    assert sql(line.store, "select * from claim where owner is not null") == []


@pytest.mark.parametrize("how", [{"batch": 6}, {"threads": 3}])
def test_a_chunk_recovered_by_another_worker_is_lost_alone(
    line: Line, run: Run, how: dict[str, int]
) -> None:
    policy(line.store, "double", lease_seconds=1)
    begun = threading.Event()

    def taken_over(numbers: DataFrame) -> DataFrame:
        if not begun.is_set():
            begun.set()
            with closing(connect(line.store)) as person:  # in this thread
                person.execute("update claim set owner = 'other' where dataid = '2'")
            time.sleep(1.5)  # a heartbeat tells of it
        return double(numbers)

    ran = run(spark_job(taken_over, **how))

    assert ran.counts == {"made": 5, "skipped": 0, "refused": 0, "failed": 0, "lost": 1}
    assert "2: Chunk '2' of 'double' was claimed by another worker" in ran.reason
    assert line.status("doubled", "2", "double") == "RUNNING"
    assert not (line.folder / "doubled" / "dataid=2").exists()
    assert line.left() == []


@F.udf(LongType(), useArrow=False)
def slowly(n: int, folder: str) -> int:
    Path(folder, "at_work").touch()
    time.sleep(20)
    return n


@pytest.mark.parametrize("how", [{}, {"batch": 3}, {"threads": 2}])
def test_an_interrupted_run_settles_all_its_claims(
    line: Line, run: Run, how: dict[str, int], tmp_path: Path, spark: SparkSession
) -> None:
    def slow(numbers: DataFrame) -> DataFrame:
        df = numbers.repartition(2)
        return df.withColumn("n", slowly("n", F.lit(str(tmp_path))))

    def interrupt() -> None:
        while not (tmp_path / "at_work").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    began: list[float] = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    ran = run(spark_job(slow, **how))
    thread.join()

    assert time.monotonic() - began[0] < 18  # a task sleeps for 20
    assert "DagsterExecutionInterruptedError" in str(ran.failure.error)
    held = {"batch": 3, "threads": 4}.get(next(iter(how), ""), 1)
    assert [line.status("doubled", each, "double") for each in "123456"] == [
        *["RESUBMIT"] * held,
        *[None] * (6 - held),
    ]
    why = sql(line.store, "select why from dataevent where status_after = 'RESUBMIT'")
    assert all("was interrupted" in each for (each,) in why)
    assert {attempts for (attempts,) in sql(line.store, "select attempts from claim")} == {0}
    assert sql(line.store, "select * from claim where owner is not null") == []
    jobs = spark.sparkContext.statusTracker().getActiveJobsIds()
    assert jobs == []
    time.sleep(0.5)
    assert line.left() == []
    assert not list((line.folder / "doubled").glob("dataid=*"))


def test_an_attempt_granted_without_delay_runs_in_the_same_run(line: Line, run: Run) -> None:
    policy(line.store, "double", max_attempts=2)
    calls: list[int] = []

    def flaky(numbers: DataFrame) -> DataFrame:
        calls.append(1)
        if len(calls) <= 2:  # the batch, and the first that is made alone
            raise OSError("no network")
        return double(numbers)

    assert run(spark_job(flaky, batch=6)).success
    assert {line.status("doubled", each, "double") for each in "123456"} == {"READY"}


def test_long_jobs_log_their_progress(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.3)

    @F.udf("long", useArrow=False)
    def slow(n: int) -> int:
        time.sleep(0.5)
        return n

    def slower(numbers: DataFrame) -> DataFrame:
        return numbers.coalesce(1).withColumn("n", slow("n"))

    assert run(spark_job(slower, batch=3), "4", "5", "6").success
    told = [each for each in capsys.readouterr().err.splitlines() if "stage " in each]
    assert 1 <= len(told) <= 4
    assert all(" - 4 and 2 more: stage 1 of " in each for each in told)


@pytest.mark.parametrize("how", [{}, {"batch": 2}])
def test_a_chunk_past_its_time_limit_is_ended(line: Line, run: Run, how: dict[str, int]) -> None:
    policy(line.store, "double", time_limit=6)

    @F.udf("long", useArrow=False)
    def slow(n: int) -> int:
        time.sleep(60 if n == 0 else 0)
        return n

    def slower(numbers: DataFrame) -> DataFrame:
        return numbers.withColumn("n", slow("n"))

    start = time.monotonic()
    ran = run(spark_job(slower, **how), "3", "4")

    assert time.monotonic() - start < 59  # a task sleeps for 60
    assert ran.counts["made"] == ran.counts["failed"] == 1
    assert "3: stopped by its time limit of 6 s" in ran.reason
    assert line.status("doubled", "3", "double") == "FAILED"
    assert line.status("doubled", "4", "double") == "READY"
    assert line.left() == []


def test_offered_chunks_are_produced_in_batches(line: Line, run: Run) -> None:
    put(line.store, "numbers", "4", "HOLD", jobid="copy")
    sizes: list[int] = []

    def look(numbers: DataFrame) -> DataFrame:
        sizes.append(numbers.select("dataid").distinct().count())
        return numbers

    ran = run(spark_job(look, batch=3))

    assert sizes == [3, 2]
    assert ran.counts["made"] == 5
    assert ran.counts["refused"] == 1
    assert status(line.store, "doubled", "4", "double") is None
