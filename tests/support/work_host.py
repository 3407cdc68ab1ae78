"""An `odf work` in a process of its own, and what it has printed so far."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self


class WorkHost:
    """A host that works on the flow of a folder, from `with` on; it is killed at the end.

    Args:
        url: The tables.
        words: The options of `odf work`.
        folder: Where the flow.yml is.
        before: Words before the command, as of `unshare`.
    """

    def __init__(
        self, url: str, *words: str, folder: Path | None = None, before: Sequence[str] = ()
    ) -> None:
        self.folder = folder or Path.cwd()
        number = len(list(self.folder.glob("events-*")))
        self._events = self.folder / f"events-{number}"
        self._errors = self.folder / f"errors-{number}"
        self._line = [*before, sys.executable, "-m", "opendataflow_dagster.cli", "work", *words]
        self._env = {**os.environ, "DATAFLOW_URL": url}

    def __enter__(self) -> Self:
        with self._events.open("w") as events, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                self._line, stdout=events, stderr=errors, env=self._env, cwd=self.folder
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def events(self, name: str = "", **fields: Any) -> list[dict[str, Any]]:
        """Return the events so far, or those of a name that have some fields."""
        lines = self._events.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        wanted = fields | ({"event": name} if name else {})
        return [event for event in found if wanted.items() <= event.items()]

    @property
    def errors(self) -> str:
        """Return what it and its scripts have written to standard error."""
        return self._errors.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 30) -> int:
        """Return its exit code, when it has ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"It goes on: {self.events()[-5:]}\n{self.errors}") from None

    def wait_for(self, name: str, count: int = 1, seconds: float = 20, **fields: Any) -> None:
        """Wait until so many events have come."""
        wait_until(
            lambda: len(self.events(name, **fields)) >= count,
            seconds,
            lambda: f"no {count} {name} {fields} in {self.events()[-8:]}\n{self.errors[-2000:]}",
        )


def wait_until(
    is_so: Callable[[], object], seconds: float = 20, what: Callable[[], str] = str
) -> None:
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, what()
        time.sleep(0.02)
