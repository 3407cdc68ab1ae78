"""Plain assets on chunks: what they read, what they publish, and what is refused."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pytest

from opendataflow_dagster import DataflowIOManager, DataflowResource, DataflowTranslator
from opendataflow_dagster.storage import folder
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, expire, policy, put, register, sql, status, take

# Dagster's own, of any resource in another: it replaces its config by what it deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated")

DOMAIN = dg.DynamicPartitionsDefinition(name="dataflow/bobin")
RANGE = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
FRAME = pd.DataFrame({"name": ["a", "b"], "amount": [1.5, None]})


BOTH = pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """SQLite, unless a test runs on both: this module doesn't depend on the dialect."""
    return request.getfixturevalue(f"{getattr(request, 'param', 'sqlite')}_url")


@pytest.fixture
def dataflow(url: str, tmp_path: Path) -> Iterator[DataflowResource]:
    """The tables, with a job `loadbob`: bobin → bobout; two chunks are READY."""
    made = DataflowResource(url=url)
    made.store.init()
    register(made.store, "loadbob", ["bobin"], ["bobout"])
    for each in ("bobin", "bobout"):
        add_dataset(made.store, each, hostname=str(tmp_path / each))
    (tmp_path / "bobin").mkdir()
    for dataid in ("1", "2"):
        (tmp_path / "bobin" / f"{dataid}.csv").write_text(f"name,amount\nx,{dataid}\n")
        put(made.store, "bobin", dataid)
    yield made
    made.patient_store(0.0).close()
    made.store.close()
    vars(made.store).pop("person").close()


@pytest.fixture
def store(dataflow: DataflowResource) -> Store:
    return dataflow.store


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


class Ran:
    """The result of a run."""

    def __init__(self, result: dg.ExecuteInProcessResult) -> None:
        self.result, self.success = result, result.success
        self.made = {
            (event.asset_key.to_user_string(), event.partition): event
            for event in (
                each.step_materialization_data.materialization
                for each in result.get_asset_materialization_events()
            )
        }

    @property
    def reason(self) -> str:
        [event] = self.result.get_step_failure_events()
        assert event.step_failure_data.user_failure_data, event.step_failure_data.error
        return event.step_failure_data.user_failure_data.description or ""

    def metadata(self, asset: str = "bobout", key: str = "1") -> dict[str, Any]:
        told = self.made[asset, key].metadata
        return {name.removeprefix("opendataflow/"): each.value for name, each in told.items()}

    def loaded(self) -> dict[str, Any]:
        [event] = [e for e in self.result.all_events if e.event_type_value == "LOADED_INPUT"]
        told = event.event_specific_data.metadata  # type: ignore[union-attr]
        return {name.removeprefix("opendataflow/"): each.value for name, each in told.items()}


@pytest.fixture
def run(dataflow: DataflowResource, instance: dg.DagsterInstance) -> Callable[..., Ran]:
    """Run assets for a partition, or a range of partitions."""

    def ran(assets: Any, *keys: str, manager: Any = None, **tags: str) -> Ran:
        instance.add_dynamic_partitions("dataflow/bobin", list(keys))
        told = {f"opendataflow/{name}": each for name, each in tags.items()}
        if len(keys) > 1:
            told |= dict(zip(RANGE, (keys[0], keys[-1]), strict=True))
        manager = manager or DataflowIOManager(dataflow=dataflow)
        given = assets if isinstance(assets, list) else [assets]
        return Ran(
            dg.materialize(
                [*given, *elsewhere(given)],
                instance=instance,
                resources={"dataflow": dataflow, "io_manager": manager},
                tags=told,
                partition_key=keys[0] if len(keys) == 1 else None,
                raise_on_error=False,
            )
        )

    return ran


def asset(fn: Callable[..., Any], **more: Any) -> dg.AssetsDefinition:
    return dg.asset(fn, partitions_def=DOMAIN, **more)


def elsewhere(given: list[dg.AssetsDefinition]) -> list[dg.AssetSpec]:
    """The datasets that are only read."""
    made = {key for each in given for key in each.keys}
    keys = [dg.AssetKey([name]) for name in ("bobin", "bobout")]
    return [dg.AssetSpec(key, partitions_def=DOMAIN) for key in keys if key not in made]


def maker(made: Any = FRAME) -> dg.AssetsDefinition:
    """An asset that makes `bobout` of a chunk of `bobin`."""

    def bobout(bobin) -> Any:
        return made(bobin) if callable(made) else made

    return asset(bobout)


def reader(annotation: Any, seen: list[Any]) -> dg.AssetsDefinition:
    """An asset outside of the tables that reads `bobin`."""

    def looked(bobin) -> None:
        seen.append(bobin)

    looked.__annotations__["bobin"] = annotation
    return asset(looked)


# --- reading ---


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (pd.DataFrame, lambda x: x.to_dict("list") == {"name": ["x"], "amount": [1]}),
        (Any, lambda x: list(x.columns) == ["name", "amount"]),
        (pa.Table, lambda x: x.num_rows == 1),
        (bytes, lambda x: x == b"name,amount\nx,1\n"),
        (Path, lambda x: isinstance(x, Path) and x.name == "1.csv"),
        (str, lambda x: x.endswith("/bobin/1.csv")),
        (dict[str, pd.DataFrame], lambda x: list(x) == ["1"] and len(x["1"]) == 1),
    ],
)
def test_a_chunk_is_read_as_its_annotation_says(
    run: Callable[..., Ran], annotation: Any, expected: Callable[[Any], bool]
) -> None:
    seen: list[Any] = []

    ran = run(reader(annotation, seen), "1")

    assert ran.success
    assert expected(seen[0])
    told = ran.loaded()
    assert told["dataset"] == "bobin"
    assert told["dataid"] == "1"
    assert told["ready"].startswith("bobin: READY by loader since ")
    assert {"right", "location", "validated", "safe", "generation"} <= set(told)


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (pd.DataFrame, lambda x: x["amount"].tolist() == [1, 2] and x.index.tolist() == [0, 1]),
        (pa.Table, lambda x: x.num_rows == 2),
        (dict[str, bytes], lambda x: x["2"] == b"name,amount\nx,2\n"),
        (Any, lambda x: list(x) == ["1", "2"]),
    ],
)
@BOTH
def test_several_chunks_are_put_together_or_given_by_partition(
    run: Callable[..., Ran], annotation: Any, expected: Callable[[Any], bool]
) -> None:
    seen: list[Any] = []

    ran = run(reader(annotation, seen), "1", "2")

    assert ran.success
    assert expected(seen[0])


@pytest.mark.parametrize(
    ("annotation", "told"), [(set, "A chunk can't be read as set"), (Path, "dict")]
)
def test_an_unsupported_annotation_names_the_supported_ones(
    run: Callable[..., Ran], annotation: Any, told: str
) -> None:
    ran = run(reader(annotation, []), "1", "2")

    assert told in ran.reason


def test_without_pyspark_the_failure_says_what_to_install(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyspark", None)
    monkeypatch.setitem(__import__("sys").modules, "pyspark.sql", None)
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe"})

    ran = run(reader(frame, []), "1")

    assert "pip install 'opendataflow-dagster[spark]'" in ran.reason


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("update datastatus set status = 'HOLD'", "DATA_NOT_READY: 'bobin' is HOLD by 'loader'"),
        (
            "update datastatus set status = 'RUNNING'",
            "DATA_NOT_READY: 'bobin' is being produced by",
        ),
        ("delete from dataset where datasetid = 'bobin'", "NOT_REGISTERED: dataset 'bobin' isn't"),
        ("update dataset set hostname = '/no'", "INVALID_LOCATION: 'bobin' is registered at /no,"),
    ],
)
def test_a_chunk_that_mustnt_be_read_fails_with_the_command_to_run(
    run: Callable[..., Ran], store: Store, change: str, told: str
) -> None:
    sql(store, change)
    seen: list[Any] = []

    ran = run(reader(pd.DataFrame, seen), "1")

    assert ran.reason.startswith(told)
    assert "Run: odf " in ran.reason
    assert "\n" not in ran.reason
    assert seen == []


@BOTH
def test_a_chunk_that_didnt_pass_its_checks_isnt_read(
    run: Callable[..., Ran], store: Store
) -> None:
    assert run(maker(), "1").success
    sql(store, "update chunkfact set validated = false, checks = 'nulls' where rows = 2")

    def below(bobout) -> None: ...

    ran = run(asset(below), "1")

    assert ran.reason.startswith("NOT_VALIDATED: 'bobout' by 'loadbob' failed its checks")


# --- publishing ---


def test_a_refusal_isnt_retried(run: Callable[..., Ran]) -> None:
    ran = run(asset(_bobout, name="bobout", retry_policy=dg.RetryPolicy(max_retries=3)), "9")

    assert ran.reason.startswith("DATA_NOT_READY: 'bobin' isn't there yet")
    assert "STEP_UP_FOR_RETRY" not in [each.event_type_value for each in ran.result.all_events]


@BOTH
def test_a_plain_asset_publishes_and_commits_its_chunk(
    run: Callable[..., Ran], store: Store, tmp_path: Path
) -> None:
    ran = run(maker(lambda bobin: bobin.assign(more=1)), "1")

    assert ran.success
    assert status(store, "bobout", "1", "loadbob") == "READY"
    path = tmp_path / "bobout" / "dataid=1"
    assert folders.read_frame(str(path), "parquet").to_dict("list") == {
        "name": ["x"],
        "amount": [1],
        "more": [1],
    }
    [fact] = sql(store, "select generation, location, rows, bytes from chunkfact where rows = 1")
    told = ran.metadata()
    assert fact == (told["generation"], str(path), 1, told["bytes"])
    assert told["rows"] == 1
    assert told["dagster/row_count"] == 1
    assert told["inputs"] == {"bobin": 1}
    assert {"ready", "right", "location", "validated", "safe", "seconds", "log"} <= set(told)
    tags = ran.made["bobout", "1"].tags
    assert tags["dagster/data_version"] == str(told["generation"])
    assert sql(store, "select * from claim") == sql(store, "select * from worker") == []
    check(store)


def test_two_plain_assets_in_a_run_pass_on_the_generation(
    run: Callable[..., Ran], store: Store, tmp_path: Path
) -> None:
    register(store, "sum", ["bobout"], ["total"])
    add_dataset(store, "total", hostname=str(tmp_path / "total"), format="json")

    def total(bobout: pd.DataFrame) -> pd.DataFrame:
        return bobout[["amount"]].sum().to_frame("sum")

    ran = run([maker(), asset(total)], "1")

    assert ran.success
    [path] = folders.data_files(str(tmp_path / "total" / "dataid=1"))
    assert Path(path).read_text() == '{"sum": 1.5}\n'
    made, seen = ran.metadata("bobout"), ran.metadata("total")
    assert seen["inputs"] == {"bobout": made["generation"]}


@BOTH
def test_a_ready_chunk_isnt_written_again_unless_forced(
    run: Callable[..., Ran], store: Store, tmp_path: Path
) -> None:
    first = run(maker(), "1").metadata()["generation"]
    note = folder.read_note(str(tmp_path / "bobout" / "dataid=1"))

    again = run(maker(FRAME.head(0)), "1")

    assert again.reason.startswith("ALREADY_DONE: 'bobout' is READY")
    assert "Run: odf resubmit loadbob 1" in again.reason
    assert 'opendataflow/resubmit: "true"' in again.reason
    assert folder.read_note(str(tmp_path / "bobout" / "dataid=1")) == note

    forced = run(maker(FRAME.head(0)), "1", resubmit="true")
    assert forced.success
    assert forced.metadata()["generation"] > first
    assert forced.metadata()["rows"] == 0
    assert len(folders.read_frame(str(tmp_path / "bobout" / "dataid=1"), "parquet")) == 0
    check(store)


@BOTH
def test_a_chunk_claimed_by_another_worker_is_refused(
    run: Callable[..., Ran], store: Store
) -> None:
    take(store, "loadbob", "other", only="1")

    ran = run(maker(), "1", resubmit="true")

    assert ran.reason.startswith("LOCKED: 'bobout' is being produced by 'loadbob'")
    assert "by other" in ran.reason
    assert status(store, "bobout", "1", "loadbob") == "RUNNING"


@BOTH
def test_of_two_writers_of_a_chunk_one_wins(
    run: Callable[..., Ran], store: Store, dataflow: DataflowResource
) -> None:
    start = threading.Barrier(2)
    ran: list[Ran] = []

    def write(number: int) -> None:
        with dg.DagsterInstance.ephemeral() as instance:
            instance.add_dynamic_partitions("dataflow/bobin", ["1"])

            def made(bobin: Any) -> pd.DataFrame:
                start.wait()
                return pd.DataFrame({"by": [number]})

            mine = [maker(made)]
            given = [*mine, *elsewhere(mine)]
            result = dg.materialize(
                given,
                instance=instance,
                partition_key="1",
                raise_on_error=False,
                resources={"io_manager": DataflowIOManager(dataflow=dataflow)},
            )
            ran.append(Ran(result))
        store.db.drop()

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    [lost] = [each for each in ran if not each.success]
    assert lost.reason.startswith(("ALREADY_DONE: ", "LOCKED: "))
    assert sql(store, "select count(*) from chunkfact where jobid <> 'loader'") == [(1,)]
    check(store)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (pd.DataFrame({"a": [1, "x"]}), "FAILED: The frame can't be written: "),
        ([1], "FAILED: A list can't be published"),
        (None, "FAILED: A NoneType can't be published"),
    ],
)
def test_what_cant_be_published_fails_the_chunk(
    run: Callable[..., Ran], store: Store, tmp_path: Path, made: Any, told: str
) -> None:
    ran = run(maker(made), "1")

    assert ran.reason.startswith(told)
    assert "Run: odf resubmit loadbob 1" in ran.reason
    assert status(store, "bobout", "1", "loadbob") == "FAILED"
    assert not (tmp_path / "bobout" / "dataid=1").exists()
    assert not (tmp_path / "bobout" / "_staging").exists()
    check(store)


def test_attempts_without_delay_run_at_once(
    run: Callable[..., Ran], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(store, "loadbob", max_attempts=3)
    calls = []

    def flaky(path: str) -> None:
        calls.append(path)
        if len(calls) < 3:
            raise OSError("no space left")

    monkeypatch.setattr(folder, "sync", flaky)

    assert run(maker(), "1").success
    assert len(calls) == 3


@BOTH
def test_a_zombie_publishes_nothing(
    run: Callable[..., Ran], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = folder.sync

    def slow(path: str) -> None:
        """Somebody resubmits the chunk while it is written, and another worker produces it."""
        plain(path)
        monkeypatch.setattr(folder, "sync", plain)
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
        assert run(maker(FRAME.head(1)), "1").success

    monkeypatch.setattr(folder, "sync", slow)

    ran = run(maker(), "1")

    assert ran.reason.startswith("LOST: Chunk '1' of 'loadbob' was claimed by another worker")
    assert len(folders.read_frame(str(tmp_path / "bobout" / "dataid=1"), "parquet")) == 1
    assert status(store, "bobout", "1", "loadbob") == "READY"
    assert list((tmp_path / "bobout").iterdir()) == [tmp_path / "bobout" / "dataid=1"]


def test_a_lease_shorter_than_the_publish_is_renewed(
    run: Callable[..., Ran], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(store, "loadbob", lease_seconds=3)
    plain = folder.sync

    def slow(path: str) -> None:
        time.sleep(4)
        assert store.recover() == []
        plain(path)

    monkeypatch.setattr(folder, "sync", slow)

    assert run(maker(), "1").success
    check(store)


@BOTH
def test_a_value_computed_from_replaced_data_isnt_published(
    run: Callable[..., Ran], store: Store, tmp_path: Path
) -> None:
    assert run(maker(), "1").success
    register(store, "sum", ["bobout"], ["total"])
    add_dataset(store, "total", hostname=str(tmp_path / "total"))

    def total(bobout: pd.DataFrame) -> pd.DataFrame:
        assert run(maker(FRAME.head(1)), "1", resubmit="true").success
        return bobout

    ran = run(asset(total), "1")

    assert ran.reason.startswith("DATA_NOT_READY: 'bobout' was replaced while this chunk was")
    assert status(store, "total", "1", "sum") is None
    check(store)


def test_a_range_publishes_chunk_by_chunk_and_a_bad_one_fails_alone(
    run: Callable[..., Ran], store: Store, tmp_path: Path
) -> None:
    good = run(maker(lambda bobin: bobin), "1", "2")
    assert good.success
    assert good.metadata(key="1")["generation"] < good.metadata(key="2")["generation"]

    sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
    bad = run(maker({"1": [1], "2": FRAME}), "1", "2")
    assert bad.reason.startswith("1 of 2 chunks of 'bobout' weren't published:\n1: FAILED: A list")
    assert status(store, "bobout", "1", "loadbob") == "FAILED"
    assert status(store, "bobout", "2", "loadbob") == "READY"
    assert "isn't a dict with these partition keys" in run(maker(), "1", "2").reason


# --- names ---


@pytest.mark.parametrize(
    "dataid", ["a/b", "..", "a:b", "%", "a b", "日本", "a,b", "[x]", "x" * 240]
)
def test_any_dataid_survives_the_way_from_partition_to_folder_and_back(
    run: Callable[..., Ran], store: Store, dataid: str
) -> None:
    put(store, "bobin", dataid)
    key = DataflowTranslator().partition_key(dataid)

    def bobout() -> pd.DataFrame:
        return FRAME

    def below(bobout: pd.DataFrame) -> None:
        assert bobout.equals(FRAME)

    assert run([asset(bobout), asset(below)], key).success
    assert status(store, "bobout", dataid, "loadbob") == "READY"


def test_a_dataid_too_long_for_a_directory_is_refused_in_one_line(
    run: Callable[..., Ran], store: Store
) -> None:
    put(store, "bobin", "x" * 300)

    ran = run(asset(_bobout, name="bobout"), "x" * 300)

    assert ran.reason.startswith("FAILED: INVALID_LOCATION: Dataid 'xxx")
    assert "255. Use a shorter dataid" in ran.reason


def test_a_translator_and_metadata_name_the_dataset_and_the_job(
    run: Callable[..., Ran], store: Store, dataflow: DataflowResource
) -> None:
    class Named(DataflowTranslator):
        def asset_key(self, datasetid: str) -> dg.AssetKey:
            return dg.AssetKey(["lake", datasetid])

    register(store, "rival", ["bobin"], ["bobout"])
    job = {"opendataflow/job": "loadbob"}
    lake = asset(_bobout, key=["lake", "bobout"], metadata=job)
    own = asset(_bobout, key="mine", metadata={**job, "opendataflow/dataset": "bobout"})
    manager = DataflowIOManager(dataflow=dataflow, translator=Named(), format="csv")

    assert run(lake, "1", manager=manager).metadata("lake/bobout")["rows"] == 2
    assert run(own, "2").success
    assert status(store, "bobout", "2", "loadbob") == "READY"
    assert (
        "Jobs 'loadbob', 'rival' write 'bobout'" in run(asset(_bobout, name="bobout"), "1").reason
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", "NOT_REGISTERED: no job is registered to write 'nowhere'"),
        ("bobin", "NOT_REGISTERED: no job is registered to write 'bobin'"),
        ("left", "Job 'both' writes left, right, which become READY together"),
    ],
)
def test_an_asset_that_isnt_the_only_output_of_a_job_is_refused(
    run: Callable[..., Ran], store: Store, name: str, told: str
) -> None:
    register(store, "both", ["bobin"], ["left", "right"])

    assert run(asset(_bobout, name=name), "1").reason.startswith(told)


def test_an_asset_without_partitions_is_refused(
    dataflow: DataflowResource, run: Callable[..., Ran]
) -> None:
    whole = dg.asset(_bobout, name="bobout")

    assert "isn't partitioned" in run([whole]).reason


def test_a_database_that_is_away_fails_in_one_line(
    run: Callable[..., Ran], store: Store, dataflow: DataflowResource, monkeypatch: Any
) -> None:
    away = DataflowResource(url="postgresql://nobody@127.0.0.1:1/none")

    ran = run(reader(pd.DataFrame, []), "1", manager=DataflowIOManager(dataflow=away))

    assert "Cannot connect to postgresql://nobody@127.0.0.1:1/none" in ran.reason
    assert "\n" not in ran.reason
    away.store.close()


def _bobout() -> pd.DataFrame:
    return FRAME


DOOMED = """
import os, signal, sys
import dagster as dg, pandas as pd
from opendataflow_dagster import DataflowIOManager, DataflowResource
from opendataflow_dagster.storage import folder as folders

plain = folders._show
def show(*args):
    plain(*args)
    os.kill(os.getpid(), signal.SIGKILL)
folders._show = show

@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="dataflow/bobin"))
def bobout() -> pd.DataFrame:
    return pd.DataFrame({"a": [1]})

instance = dg.DagsterInstance.ephemeral()
instance.add_dynamic_partitions("dataflow/bobin", ["1"])
manager = DataflowIOManager(dataflow=DataflowResource(url=sys.argv[1]))
dg.materialize([bobout], instance=instance, resources={"io_manager": manager}, partition_key="1")
"""


def test_after_a_kill_between_publish_and_ready_nothing_is_read_until_a_rerun(
    run: Callable[..., Ran], store: Store, url: str
) -> None:
    doomed = subprocess.run([sys.executable, "-c", DOOMED, url], capture_output=True)
    assert doomed.returncode == -signal.SIGKILL
    seen: list[pd.DataFrame] = []

    def below(bobout: pd.DataFrame) -> None:
        seen.append(bobout)

    assert run(asset(below), "1").reason.startswith("DATA_NOT_READY: 'bobout' is being produced by")
    expire(store)
    assert run(maker(), "1").success
    assert run(asset(below), "1").success
    assert seen[0].equals(FRAME)
    check(store)
