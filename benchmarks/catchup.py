"""What catching up costs in Dagster: `python benchmarks/catchup.py [--quick]`.

A real code server, webserver and daemon on PostgreSQL, with the daemon's own intervals. 2,000
chunks of a job that does nothing: by a backfill, and by the catch-up sensor; each from the request
until the last chunk is READY in the tables and green in the grid. In the same run, a plain Dagster
asset that does nothing, by a backfill of one run for each partition. Exit code 0 if every target is
met.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure import Report, concluded, end_in_order, progress  # noqa: E402

from opendataflow_dagster.dataflow import moves, registry  # noqa: E402
from opendataflow_dagster.dataflow.model import READY  # noqa: E402
from opendataflow_dagster.dataflow.store import Store, open_store  # noqa: E402
from opendataflow_dagster.dataflow.truth import truths  # noqa: E402
from tests.dagster_servers import Dagster  # noqa: E402
from tests.graphql_client import wait_for  # noqa: E402
from tests.postgres import Server  # noqa: E402

LOCATION = Path(__file__).with_name("catchup_location.py")
RIVALS = 30
LONG = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    options = parser.parse_args()
    end_in_order()
    scale = 10 if options.quick else 1
    with Server() as server:
        for name in ("flow", "dagster"):
            server.create_database(name)
        store = open_store(server.url("flow"))
        store.init()
        registry.add_dataset(store, "orders")
        registry.add_dataset(store, "copies")
        registry.add_job(store, "copy", ["orders"], ["copies"])
        with Dagster(
            LOCATION, database=server.url("dagster"), hurry=False,
            env={"DATAFLOW_URL": server.url("flow"), "DAGSTER_EVENT_BATCH_SIZE": "500"},
        ) as dagster:  # fmt: skip
            return measure(store, dagster, 2000 // scale, RIVALS // min(scale, 3))


def measure(store: Store, dagster: Dagster, chunks: int, rivals: int) -> int:
    report, client = Report(), dagster.client
    first = [f"a{number:05d}" for number in range(chunks)]
    second = [f"b{number:05d}" for number in range(chunks)]

    progress(f"{chunks} chunks by a backfill")
    moves.ready(store, "orders", first)
    green(dagster, "orders", chunks)
    start = time.perf_counter()
    backfill = client.backfill(["copies"], first)
    ready(store, chunks)
    in_tables = time.perf_counter() - start
    green(dagster, "copies", chunks)
    by_backfill = time.perf_counter() - start
    client.backfill_finished(backfill, timeout=LONG)

    progress(f"{chunks} chunks by the catch-up sensor")
    start = time.perf_counter()
    moves.ready(store, "orders", second)
    client.start_sensor("opendataflow_catch_up")
    ready(store, 2 * chunks)
    sensor_tables = time.perf_counter() - start
    green(dagster, "copies", 2 * chunks)
    by_sensor = time.perf_counter() - start
    client.stop_sensor("opendataflow_catch_up")

    progress(f"{rivals} partitions, a run for each")
    partitions = [f"{number:03d}" for number in range(rivals)]
    dagster.instance.add_dynamic_partitions("rival", partitions)
    start = time.perf_counter()
    backfill = client.backfill(["rival"], partitions)
    green(dagster, "rival", rivals)
    alone = time.perf_counter() - start
    client.backfill_finished(backfill, timeout=LONG)

    rows = [
        ["ours, by a backfill", f"{chunks:,}", f"{in_tables:.1f}", f"{by_backfill:.1f}",
         f"{by_backfill / chunks * 1000:.1f}"],
        ["ours, by the catch-up sensor", f"{chunks:,}", f"{sensor_tables:.1f}", f"{by_sensor:.1f}",
         f"{by_sensor / chunks * 1000:.1f}"],
        ["plain Dagster, a run for each", str(rivals), "", f"{alone:.1f}",
         f"{alone / rivals * 1000:.1f}"],
    ]  # fmt: skip
    report.table("Catching up", ["chunks", "s until READY", "s until green", "ms each"], rows)
    most = 60.0
    for name, seconds in (("a backfill", by_backfill), ("the catch-up sensor", by_sensor)):
        report.require(f"{chunks:,} chunks by {name}", [seconds], most=most, unit=" s")
        ratio = (alone / rivals) / (seconds / chunks)
        report.require(f"by {name}, times faster per chunk than a run for each", [ratio], least=10)
    store.close()
    return report.verdict()


def ready(store: Store, chunks: int) -> None:
    """Wait until so many chunks are READY."""

    def look() -> int:
        return sum(each.status == READY for each in truths(store, "copies").values())

    wait_for(look, lambda found: found >= chunks, LONG, f"{chunks} READY chunks", every=0.5)


def green(dagster: Dagster, asset: str, chunks: int) -> None:
    """Wait until so many squares are green."""

    def look() -> int:
        return len(dagster.client.grid(asset).green)

    wait_for(look, lambda found: found >= chunks, LONG, f"{chunks} green of {asset}", every=0.5)


if __name__ == "__main__":
    sys.exit(concluded(main))
