"""What `odf work` shows: a line for each job on a terminal, elsewhere a line of JSON per event."""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol, Self, TextIO

from ..model import Say
from ..runner.catch_up import JobState
from ..util.text import printable

REDRAW_SECONDS = 0.25

NARRATION = (
    "Launching ",
    ". Updating status",
    " rows updated to ",
    "Reason: ",
    "The next attempt",
    "The claim can't be renewed",
)
"""What `odf run` says of each chunk: events tell the same."""

FAILURES = ("FAILED", "LOST", "HOLD")

SENTENCES = {
    "left_out": "{job} is left out: {why}",
    "trouble": "{job} can't be run: {why}",
    "away": "The database is away: {why}. What runs goes on; nothing is claimed until it is back",
    "back": "The database is back after {seconds:g} s",
    "draining": "{why}: claiming nothing more, {running} at work; a second signal stops them",
    "stopping": "{why}: stopping {running} at work",
    "left": "{workers} workers don't end: their claims are left to their leases",
    "recovered": "{job} {dataid} is {status}: {why}",
    "reloaded": "The flow has changed, and is read again",
    "finished": "done {done}, failed {failed}",
}
"""What a person is told of an event, on a terminal."""


class Report(Protocol):
    """What is told of the work."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def event(self, name: str, **fields: Any) -> None: ...
    def draw(self, jobs: Sequence[JobState], line: str) -> None: ...
    def say(self, line: str) -> None: ...
    def say_of(self, jobid: str) -> Say: ...


class JsonLines:
    """Prints an object per event to standard output; scripts print to standard error meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._output: TextIO | None = None

    def __enter__(self) -> Self:
        self._output = _moved(1, 2)
        return self

    def __exit__(self, *_: object) -> None:
        if self._output is not None:
            _put_back(self._output, 1)

    def event(self, name: str, **fields: Any) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"at": at, "event": name, **fields})
        # A reader that has gone, or a full disk, stops no work.
        with self._lock, suppress(OSError, ValueError):
            print(line, file=self._output, flush=True)

    def draw(self, jobs: Sequence[JobState], line: str) -> None:
        pass

    def say(self, line: str) -> None:
        self.event("message", text=line)

    def say_of(self, jobid: str) -> Say:
        def say(line: str) -> None:
            if not any(phrase in line for phrase in NARRATION):
                self.event("message", job=jobid, text=line)

        return say


class Board:
    """Draws a line for each job at the bottom of a terminal, and prints all else above.

    What scripts print comes through a pipe, or they would write across the lines.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminal: TextIO = sys.stdout
        self._height = 0
        self._lines: list[str] = []
        self._drawn_at = 0.0
        self._outputs: list[TextIO] = []
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._terminal = os.fdopen(os.dup(1), "w", errors="backslashreplace")
        read, write = os.pipe()
        self._outputs = [_moved(number, write) for number in (1, 2)]
        os.close(write)
        self._reader = threading.Thread(target=self._pass_on, args=(read,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, output in zip((1, 2), self._outputs, strict=True):
            _put_back(output, number)
        if self._reader:  # a program that a script has left behind may keep the pipe open
            self._reader.join(0.5)
        with self._lock:
            self._show([], [])

    def event(self, name: str, **fields: Any) -> None:
        if name == "ended" and fields["status"] in FAILURES:
            self.say(f"{fields['job']} {fields['dataid']} {fields['status']}: {fields.get('why')}")
        elif name in SENTENCES:
            self.say(SENTENCES[name].format(**fields))
        elif name == "message":
            self.say(f"{fields['job']}: {fields['text']}" if "job" in fields else fields["text"])

    def say(self, line: str) -> None:
        with self._lock:
            self._show([f"{time.strftime('%H:%M:%S')} {printable(line)}"], self._lines)

    def say_of(self, jobid: str) -> Say:
        def say(line: str) -> None:
            if not any(phrase in line for phrase in NARRATION):
                self.say(f"{jobid}: {line}")

        return say

    def draw(self, jobs: Sequence[JobState], line: str) -> None:
        now = time.monotonic()
        if now - self._drawn_at < REDRAW_SECONDS:
            return
        self._drawn_at = now
        size = os.get_terminal_size(self._terminal.fileno())
        columns, most = size.columns or 80, max(4, (size.lines or 24) - 2)
        lines = [text[: columns - 1] for text in job_lines(jobs, line)]
        if len(lines) > most:
            more = f"… and {len(lines) - most + 1} more"
            lines = [*lines[: most - 2], more, lines[-1]]
        with self._lock:
            if lines != self._lines:
                self._show([], lines)

    def _show(self, above: Sequence[str], lines: list[str]) -> None:
        up = f"\x1b[{self._height}F" if self._height else ""
        text = f"{up}\x1b[J" + "".join(f"{line}\n" for line in [*above, *lines])
        self._height, self._lines = len(lines), lines
        with suppress(OSError, ValueError):
            self._terminal.write(text)
            self._terminal.flush()

    def _pass_on(self, read: int) -> None:
        """Print what scripts print, line by line."""
        with os.fdopen(read, errors="backslashreplace") as pipe:
            for line in pipe:
                with self._lock:
                    self._show([line.rstrip("\r\n")], self._lines)


def job_lines(jobs: Sequence[JobState], line: str) -> list[str]:
    """A line for each job, and one for all."""
    width = min(40, max([3, *(len(printable(job.job.jobid)) for job in jobs)]))
    rows = [f"{'JOB':<{width}}  {'RUNNING':>7}  {'DONE':>7}  {'FAILED':>6}  {'READY':>6}"]
    for job in jobs:
        ready = job.outlook.claimable if job.outlook else 0
        shown = f"{ready}+" if ready >= 100 else str(ready)
        rows.append(
            f"{printable(job.job.jobid)[:width]:<{width}}  {job.busy:>7}  {job.done:>7}  "
            f"{job.failed:>6}  {shown:>6}  {_state(job)}".rstrip()
        )
    totals = [sum(getattr(job, name) for job in jobs) for name in ("busy", "done", "failed")]
    rows.append(
        f"{totals[0]} running, {totals[1]} done, {totals[2]} failed" + (line and f"; {line}")
    )
    return rows


def _state(job: JobState) -> str:
    """Why a job does nothing, if something keeps it."""
    if job.trouble:
        return printable(job.trouble)
    if job.outlook and job.outlook.held:
        return job.outlook.held
    if job.waits_for_runs:
        return "in Dagster's hands"
    if job.opens_in is not None:
        return f"next in {job.opens_in / 60:.0f} min"
    if job.outlook and job.outlook.retry_in is not None:
        return f"retry in {max(0.0, job.outlook.retry_in):.0f} s"
    return ""


def _moved(number: int, target: int) -> TextIO:
    """Let one of our files be another from now on; return what it was."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    before = os.fdopen(os.dup(number), "w", errors="backslashreplace")
    os.dup2(target, number)
    return before


def _put_back(before: TextIO, number: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError, ValueError):
        os.dup2(before.fileno(), number)
        before.close()
