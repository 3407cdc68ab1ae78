"""A user's flow in a running Dagster: its tables, its files, its grid."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dagster as dg

from opendataflow_dagster.dagster.drift import Drift, drift
from opendataflow_dagster.dagster.grid import Mirror
from opendataflow_dagster.dagster.translator import DataflowTranslator
from opendataflow_dagster.store import open_store, operations, registry
from opendataflow_dagster.store.store import Store
from tests.support.dagster_servers import Dagster
from tests.support.graphql_client import Client, wait_for
from tests.support.store_fixtures import close, statuses

SCRIPT = Path(__file__).with_name("code_locations") / "cleaning.sh"
ODF = Path(sys.executable).with_name("odf")
DATASETS = ("orders", "cleaned", "report")
VISITS = ("visits", "counted")
RECONCILE, CATCH_UP = "opendataflow_reconcile", "opendataflow_catch_up"


class Names(DataflowTranslator):
    """Visits have days of Dagster's own."""

    def partitions_def(self, domain: str) -> dg.PartitionsDefinition:
        if domain == "visits":
            return dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-11-01")
        return super().partitions_def(domain)


class Background(subprocess.Popen[str]):
    """A process that doesn't outlive its block: it may wait for something that never happens."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


class Flow:
    """`orders` come from outside, the Python job `clean` produces `cleaned`, a script `report`.

    So do `visits`, of which the job `count` produces `counted`.
    """

    dagster: Dagster

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.store: Store = open_store(url)
        self.store.init()
        for each in (*DATASETS, *VISITS):
            (folder / each).mkdir()
            registry.add_dataset(self.store, each, hostname=str(folder / each))
        registry.add_job(self.store, "clean", ["orders"], ["cleaned"])
        registry.add_job(self.store, "report", ["cleaned"], ["report"])
        registry.add_job(self.store, "count", ["visits"], ["counted"])
        self.env = {"DATAFLOW_URL": url, "FLOW_FOLDER": str(folder)}

    def close(self) -> None:
        close(self.store)

    @property
    def client(self) -> Client:
        return self.dagster.client

    # what happens outside

    def arrive(self, *days: str, status: str = "READY") -> None:
        """Write orders of some days, and wait for their squares."""
        for day in days:
            (self.folder / "orders" / f"{day}.csv").write_text("north,1250\n\nsouth,990\n")
        if status == "READY":
            operations.ready(self.store, "orders", days)
        self.known(*days)

    def known(self, *days: str) -> None:
        wait_for(
            lambda: set(days) - set(self.client.partitions("cleaned")),
            lambda left: not left,
            60,
            "the keys of chunks are there",
        )

    def steer(self, name: str, *chunks: str) -> None:
        """Add chunks (`clean 2026-01-01`) to one of the files that steer the jobs."""
        path = self.folder / f"{name}.new"
        path.write_text("".join(f"{each}\n" for each in chunks))
        path.replace(self.folder / name)

    def odf(self, *words: object, wait: bool = True) -> Background:
        """Start `odf` as a person would, without any of Dagster's environment."""
        process = Background(
            [str(each) for each in (ODF, *words)],
            env=os.environ | self.env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if wait:
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 0, said
        return process

    # what there is

    def produced(self, *chunks: str) -> Counter[str]:
        """Return how often chunks were really produced (without names: all of them)."""
        path = self.folder / "produced"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line for line in lines if not chunks or line in chunks)

    def status(self, job: str, day: str) -> str | None:
        made = {"clean": "cleaned", "report": "report", "count": "counted"}
        dataset = made.get(job, "orders")
        return statuses(self.store, day).get((dataset, job, day), (None, None))[1]

    def squares(self, dataset: str, days: Iterable[str]) -> dict[str, str]:
        """The colour of chunks by GraphQL, as the UI gets it."""
        grid = self.client.grid(dataset)._asdict()
        return {day: colour for day in days for colour, keys in grid.items() if day in keys}

    def turns(self, dataset: str, colour: str, *days: str, timeout: float = 60) -> None:
        """Wait until chunks have a colour."""
        wanted = dict.fromkeys(days, colour)
        wait_for(
            lambda: self.squares(dataset, days),
            wanted.__eq__,
            timeout,
            f"{dataset} is {colour}",
        )

    def drift(self) -> list[Drift]:
        return drift(self.store, Mirror(self.dagster.instance), Names())

    def agrees(self) -> None:
        """Tables, grid and data agree after some ticks."""
        wait_for(self.drift, lambda found: found == [], 60, "tables and grid agree", 0.3)


def days(month: int, first: int, last: int) -> list[str]:
    """Days of a month of 2026."""
    return [f"2026-{month:02}-{day:02}" for day in range(first, last + 1)]
