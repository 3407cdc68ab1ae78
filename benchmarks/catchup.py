"""The cost of catching up in Dagster: `python benchmarks/catchup.py [--quick]`.

A real code server, webserver and daemon on PostgreSQL, with the daemon's own intervals. 2,000
chunks of a job that does nothing, by a backfill and by the catch-up sensor: each from the request
until the last chunk is READY in the tables and green in the grid. In the same run, a plain Dagster
asset that does nothing, by a backfill with one run per partition. Exit code 0 if every target is
met.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure import concluded, progress  # noqa: E402
from product import READY, Store, add_dataset, add_job, open_store, truths  # noqa: E402
from product import ready as make_ready  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options  # noqa: E402

from tests.support.dagster_servers import Dagster  # noqa: E402
from tests.support.graphql_client import wait_for  # noqa: E402
from tests.support.postgres import Server  # noqa: E402

LOCATION = Path(__file__).with_name("catchup_location.py")
CHUNKS = {FULL: (2000, 30), QUICK: (200, 10), SLICE: (200, 10), TINY: (4, 1)}
"""The number of our chunks, and of plain Dagster's."""

LONG = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments)
    report = Report("catchup", given, ("PostgreSQL", "dagster"))
    chunks, rivals = CHUNKS[given.scale]
    with Server() as server:
        for name in ("flow", "dagster"):
            server.create_database(name)
        store = open_store(server.url("flow"))
        store.init()
        add_dataset(store, "orders")
        add_dataset(store, "copies")
        add_job(store, "copy", ["orders"], ["copies"])
        with Dagster(
            LOCATION,
            database=server.url("dagster"),
            hurry=given.scale == TINY,
            env={"DATAFLOW_URL": server.url("flow"), "DAGSTER_EVENT_BATCH_SIZE": "500"},
        ) as dagster:
            measure(store, dagster, chunks, rivals, report)
        store.close()
    return report.verdict()


def measure(store: Store, dagster: Dagster, chunks: int, rivals: int, report: Report) -> None:
    client = dagster.client
    first = [f"a{number:05d}" for number in range(chunks)]
    second = [f"b{number:05d}" for number in range(chunks)]

    progress(f"{chunks} chunks by a backfill")
    make_ready(store, "orders", first)
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
    make_ready(store, "orders", second)
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
        [
            "ours, by a backfill",
            f"{chunks:,}",
            f"{in_tables:.1f}",
            f"{by_backfill:.1f}",
            f"{by_backfill / chunks * 1000:.1f}",
        ],
        [
            "ours, by the catch-up sensor",
            f"{chunks:,}",
            f"{sensor_tables:.1f}",
            f"{by_sensor:.1f}",
            f"{by_sensor / chunks * 1000:.1f}",
        ],
        [
            "plain Dagster, a run for each",
            str(rivals),
            "",
            f"{alone:.1f}",
            f"{alone / rivals * 1000:.1f}",
        ],
    ]
    report.table("Catching up", ["chunks", "s until READY", "s until green", "ms each"], rows)
    most = 60.0
    for name, seconds in (("a backfill", by_backfill), ("the catch-up sensor", by_sensor)):
        report.require(f"{chunks:,} chunks by {name}", [seconds], most=most, unit=" s")
        ratio = (alone / rivals) / (seconds / chunks)
        report.require(f"by {name}, times faster per chunk than a run for each", [ratio], least=10)
        report.compare(f"by {name}: times faster than a run for each", [ratio], better="more")


def ready(store: Store, chunks: int) -> None:
    """Wait until so many chunks are READY."""

    def look() -> int:
        return sum(truth.status == READY for truth in truths(store, "copies").values())

    wait_for(look, lambda found: found >= chunks, LONG, f"{chunks} READY chunks", every=0.5)


def green(dagster: Dagster, asset: str, chunks: int) -> None:
    """Wait until so many squares are green."""

    def look() -> int:
        return len(dagster.client.grid(asset).green)

    wait_for(look, lambda found: found >= chunks, LONG, f"{chunks} green of {asset}", every=0.5)


if __name__ == "__main__":
    sys.exit(concluded(main))
