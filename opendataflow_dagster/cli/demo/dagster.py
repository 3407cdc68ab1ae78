"""The Dagster of `odf demo`: a daemon that is started, and ended with all that it has started."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

from .tour import STOP_SECONDS, Tour, undisturbed

WAIT_SECONDS = 240.0
"""Seconds to wait for Dagster, which takes 20 on a small machine that is idle."""


def launch_backfill(tour: Tour) -> str:
    """Ask Dagster for the days that the outage missed, as its pages do; the backfill's id."""
    words = ["-w", "workspace.yaml", "--file", "backfill.graphql"]
    line = tour.typed("dagster-graphql", *words)
    code, output, errors = tour.run(
        [sys.executable, "-c", "from dagster_graphql.cli import main; main()", *words],
        output=subprocess.PIPE,
        errors=subprocess.PIPE,
    )
    found = re.search(r'"backfillId": "(\w+)"', output)
    if found is None:
        log = tour.folder / "dagster" / "backfill.log"
        log.write_text(output + errors)
        raise click.ClickException(f"`{line}` ended with exit code {code}. See {log}.")
    click.echo(next(line for line in output.splitlines() if found[0] in line))  # beside its log
    return found[1]


class Daemon:
    """dagster-daemon and what it starts: a code server, and the processes of runs."""

    def __init__(self, tour: Tour) -> None:
        self._tour, self.log = tour, tour.folder / "dagster" / "daemon.log"

    def __enter__(self) -> Self:
        self._tour.typed("dagster-daemon", "run", "-w", "workspace.yaml", tail=" &")
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dagster._daemon", "run", "-w", "workspace.yaml"],
                cwd=self._tour.folder,
                env=self._tour.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, that is ended as a whole
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with undisturbed():
            # Of an interrupted demo, a run may be at work, which settles its chunk and ends.
            self._signal(signal.SIGTERM, group=error is not None)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            end = time.monotonic() + STOP_SECONDS / 3
            while self._signal(0, group=True) and time.monotonic() < end:
                time.sleep(0.05)
            self._signal(signal.SIGKILL, group=True)
            self._process.wait()

    def until(self, there: Callable[[], Any], what: str) -> Any:
        """Wait for something that comes about while the daemon is alive."""
        end = time.monotonic() + WAIT_SECONDS
        while not (found := there()):
            if self._process.poll() is not None:
                raise click.ClickException(f"Dagster's daemon has ended. See {self.log}.")
            if time.monotonic() > end:
                raise click.ClickException(
                    f"Not within {WAIT_SECONDS:.0f} s: {what}. See {self.log}."
                )
            time.sleep(0.3)
        return found

    def _signal(self, number: int, *, group: bool) -> bool:
        try:
            (os.killpg if group else os.kill)(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def wait_for_run(daemon: Daemon, home: Path, backfill: str) -> str:
    """Wait for the end of the backfill's run; a line about it."""
    import dagster as dg

    ended = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
    wanted = dg.RunsFilter(tags={"dagster/backfill": backfill}, statuses=list(ended))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        [run] = daemon.until(lambda: instance.get_runs(wanted), "the backfill's run ends")
    if run.status != dg.DagsterRunStatus.SUCCESS:
        raise click.ClickException(
            f"Run {run.run_id} of the backfill ended as {run.status.value}. See {daemon.log}."
        )
    return f"Run {run.run_id[:8]} of the backfill: {run.status.value}"


def wait_for_backfill(daemon: Daemon, home: Path, backfill: str) -> None:
    """Wait until the daemon, which looks every half a minute, has seen that all is done."""
    import dagster as dg

    def over() -> bool:
        found = instance.get_backfill(backfill)
        return found is not None and found.status.value.startswith("COMPLETED")

    with dg.DagsterInstance.from_config(str(home)) as instance:
        daemon.until(over, "the backfill is completed")
