"""Spark in a real Dagster: the same rows from every way of running, and terminated runs."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opendataflow_dagster.store import open_store, operations, registry
from opendataflow_dagster.store.store import Store
from tests.support.dagster_project import ODF
from tests.support.dagster_servers import ROOT, Dagster
from tests.support.graphql_client import Client, wait_for
from tests.support.store_fixtures import close, sql, statuses

pytestmark = pytest.mark.timeout(400)  # each run starts Spark

DAYS = [f"2026-03-{day:02}" for day in (1, 2, 3, 4, 5)]
CHUNKS = [*DAYS, "10 % für a=b"]
WAYS = ("run", "materialize", "backfill", "batch", "threads", "value", "stop_batch", "stop_threads")

MOST_TO_SETTLE = 15
"""Seconds after which the chunks of a terminated run must be FAILED in the tables."""


class Lake:
    """Chunks of `sales`, which a job per way of running turns into its own dataset."""

    dagster: Dagster

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder / 'dataflow.db'}"
        self.store: Store = open_store(self.url)
        self.store.init()
        for each in ("raw", "sales", *(f"by_{way}" for way in WAYS)):
            registry.add_dataset(self.store, each, hostname=str(folder / each))
        registry.add_job(self.store, "load", ["raw"], ["sales"])
        for way in WAYS:
            registry.add_job(self.store, way, ["sales"], [f"by_{way}"])
        self.env = {"DATAFLOW_URL": self.url, "FLOW_FOLDER": str(folder)}

    @property
    def client(self) -> Client:
        return self.dagster.client

    def arrive(self) -> None:
        (self.folder / "raw").mkdir()
        for at, dataid in enumerate(CHUNKS):
            rows = [
                {
                    "id": n,
                    "shop": None if n % 7 == 0 else f"Shop {n % 3}",
                    "amount": n * 1.25 + at,
                    "tags": ["a", str(n)],
                }
                for n in range(1, 2 + at * 40)
            ]
            pq.write_table(pa.Table.from_pylist(rows), self.folder / "raw" / f"{dataid}.parquet")
        operations.ready(self.store, "raw", CHUNKS)

    def odf(self, job: str, function: str) -> str:
        """Let `odf run --spark` produce every chunk of a job, as a person would."""
        done = subprocess.run(
            [
                str(ODF),
                "run",
                "--job",
                job,
                "--all",
                "--spark",
                f"tests.support.code_locations.spark_jobs:{function}",
            ],
            env=os.environ | self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    def keys(self) -> list[str]:
        return self.client.partitions("by_batch")

    def status(self, way: str) -> dict[str, str | None]:
        found = statuses(self.store)
        return {each: found.get((f"by_{way}", way, each), (None, None))[1] for each in CHUNKS}

    def fingerprints(self, way: str) -> dict[str, str]:
        rows = sql(
            self.store,
            "select dataid, fingerprint from chunkfact where datasetid = :d",
            d=f"by_{way}",
        )
        return dict(sorted(rows))

    def made(self, way: str) -> None:
        assert self.status(way) == dict.fromkeys(CHUNKS, "READY")
        assert self.left(way) == []

    def left(self, way: str) -> list[str]:
        """Return what is left over that isn't a chunk."""
        return [str(each) for each in (self.folder / f"by_{way}").glob("_*/**")]

    def slow(self, on: bool) -> None:
        (self.folder / "at_work").unlink(missing_ok=True)
        (self.folder / "slow").touch() if on else (self.folder / "slow").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def storage() -> str:
    """Dagster's own storage doesn't matter here."""
    return "sqlite"


@pytest.fixture(scope="module")
def lake(
    start_dagster: Callable[..., Dagster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    """A lake whose sales were loaded by Spark, in a running Dagster."""
    made = Lake(tmp_path_factory.mktemp("lake"))
    made.arrive()
    made.odf("load", "load")
    made.dagster = start_dagster("tests.support.code_locations.sparks", name="sparks", env=made.env)
    wait_for(made.keys, lambda keys: len(keys) == len(CHUNKS), 60, "the keys of chunks are there")
    yield made
    made.dagster.close()
    close(made.store)


@pytest.fixture(autouse=True)
def quick(lake: Lake) -> Iterator[None]:
    yield
    lake.slow(False)


def test_every_way_to_produce_a_chunk_gives_the_same_rows(lake: Lake) -> None:
    client, keys = lake.client, lake.keys()
    lake.odf("run", "enrich")
    runs = [client.launch(["by_materialize"], keys[0])]
    runs.append(client.launch(["by_materialize"], keys[1], through=keys[-1]))
    assert [client.finished(run, 180) for run in runs] == ["SUCCESS"] * 2
    backfill = client.backfill(["by_backfill"], None, ranges=[(keys[0], keys[-1])])
    assert client.backfill_finished(backfill, 120) == "COMPLETED_SUCCESS"
    for way in ("batch", "threads"):
        run = client.launch([f"by_{way}"], keys[0], through=keys[-1])
        assert client.finished(run, 120) == "SUCCESS", client.messages(run)
        assert not any("one by one" in each for each in client.messages(run))
    run = client.launch(["by_value"], DAYS[-1])
    assert client.finished(run, 120) == "SUCCESS", client.messages(run)

    wanted = lake.fingerprints("run")
    assert [each.partition("-")[0] for each in map(wanted.__getitem__, CHUNKS)] == [
        "1",
        "41",
        "81",
        "121",
        "161",
        "201",
    ]
    for way in ("run", "materialize", "backfill", "batch", "threads"):
        lake.made(way)
        assert lake.fingerprints(way) == wanted, way
    assert lake.fingerprints("value") == {DAYS[-1]: wanted[DAYS[-1]]}
    assert lake.left("value") == []


def told(lake: Lake, asset: str, key: str) -> dict[str, Any]:
    return lake.client.latest(asset)[key].metadata


def test_the_grid_shows_evidence_and_expectations(lake: Lake) -> None:
    client = lake.client
    keys = lake.keys()
    small = min(keys, key=lambda key: told(lake, "by_materialize", key)["opendataflow/rows"])

    shown = told(lake, "by_materialize", small)
    assert shown["opendataflow/rows"] == shown["dagster/row_count"] == 1
    assert shown["opendataflow/fingerprint"] == lake.fingerprints("materialize")[DAYS[0]]
    assert "fingerprint 1-" in shown["opendataflow/right"]
    node = client.ask(
        "query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { __typename "
        "... on AssetNode { latestMaterializationByPartition { partition metadataEntries { label "
        "... on TableSchemaMetadataEntry { schema { columns { name type } } } } } } } }",
        key={"path": ["by_materialize"]},
    )
    for each in node["latestMaterializationByPartition"]:
        schema = {e["label"]: e for e in each["metadataEntries"]}["dagster/column_schema"]["schema"]
        assert [(c["name"], c["type"]) for c in schema["columns"]] == [
            ("id", "bigint"),
            ("shop", "string"),
            ("amount", "double"),
            ("tags", "array<string>"),
            ("total", "decimal(12,2)"),
            ("slug", "string"),
        ]
    rows = {
        each["partition"]: each["evaluation"] for each in client.checks("by_materialize", "rows")
    }
    assert {key: rows[key]["success"] for key in keys} == {key: key != small for key in keys}
    assert rows[small]["severity"] == "WARN"
    assert rows[small]["description"]


@pytest.mark.parametrize(
    ("way", "held"),
    [("stop_batch", 4), pytest.param("stop_threads", 4, marks=pytest.mark.soak)],
)
def test_a_terminated_run_settles_all_its_claims(lake: Lake, way: str, held: int) -> None:
    client, keys = lake.client, lake.keys()
    lake.slow(True)
    run = client.launch([f"by_{way}"], keys[0], through=keys[-1])
    wait_for((lake.folder / "at_work").exists, timeout=60, what="Spark is at work")
    wait_for(
        lambda: [each for each in client.messages(run) if "stage 1 of" in each],
        what="the log tells how far the job is",
    )
    client.reload_location()  # a run goes on

    began = time.monotonic()
    client.terminate(run)
    wait_for(
        lambda: list(lake.status(way).values()).count("HOLD"),
        held.__eq__,
        MOST_TO_SETTLE,
        "all are settled",
    )

    assert time.monotonic() - began < MOST_TO_SETTLE
    assert client.finished(run) == "CANCELED"
    assert sorted(map(str, lake.status(way).values())) == [*["HOLD"] * held, "None", "None"]
    why = sql(
        lake.store,
        "select why from dataevent where datasetid = :d and status_after = 'HOLD'",
        d=f"by_{way}",
    )
    assert {each for (each,) in why} == {f"terminated by a person in Dagster: run {run}"}
    assert not list((lake.folder / f"by_{way}").glob("dataid=*"))
    wait_for(lake.dagster.run_workers, lambda found: not found, what="its process is gone")
    assert lake.left(way) == []
    assert sql(lake.store, "select * from claim where owner is not null") == []

    lake.slow(False)
    operations.resubmit(lake.store, way, [key for key, each in lake.status(way).items() if each])
    again = client.launch([f"by_{way}"], keys[0], through=keys[-1])
    assert client.finished(again, 120) == "SUCCESS"
    lake.made(way)
    assert lake.fingerprints(way) == lake.fingerprints("run")
