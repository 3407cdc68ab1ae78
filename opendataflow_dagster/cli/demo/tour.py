"""What both tours of `odf demo` share: commands that are typed, and files that arrive."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

BROKEN, FIXED = "2026-10-07", "12.50"
DAYS = [f"2026-10-{day:02d}" for day in range(1, 32)]
ODF = [sys.executable, "-m", "opendataflow_dagster.cli"]
FOREIGN_SETTINGS = ("DATAFLOW_", "DAGSTER_", "SPARK_", "PYSPARK_", "PASSKEY")
STOP_SECONDS = 15.0
"""Seconds that a command has to end when the demo is interrupted."""


class Tour:
    """A folder with the demo in it, and the commands that are typed there."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder, self._began = folder, time.monotonic()
        # Without the settings of this machine for other tables, other Dagsters, other Sparks.
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(FOREIGN_SETTINGS) and name != "MASTER"
        } | dict(settings or {})

    def say(self, text: str) -> None:
        click.secho(f"\n# {text}", fg="cyan", bold=True)

    def odf(self, *words: str, note: str = "", may_fail: bool = False, quiet: bool = False) -> None:
        """Type an `odf` command; with `quiet`, only its last message is shown."""
        typed = self.typed("odf", *words, note=note)
        code, _, errors = self.run([*ODF, *words], errors=subprocess.PIPE if quiet else None)
        if quiet and errors:
            click.echo(errors.rstrip().splitlines()[-1])
        if code and not may_fail:
            raise click.ClickException(f"`{typed}` ended with exit code {code}.{_last(errors)}")

    def typed(self, *words: str, note: str = "", tail: str = "") -> str:
        """Show a command as a person types it in the folder."""
        line = shlex.join(word.replace(f"{self.folder}/", "$PWD/") for word in words)
        line = line.replace("'", "") + tail
        click.secho(f"$ {line}" + (f"  # {note}" if note else ""), bold=True)
        sys.stdout.flush()
        return line

    def run(
        self, argv: list[str], *, output: Any = None, errors: Any = None
    ) -> tuple[int, str, str]:
        """Run a command to its end: exit code, output, errors; it doesn't outlive the demo."""
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.environ,
            stdout=output,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        try:
            printed, failures = process.communicate()
        except BaseException:
            with undisturbed():
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=STOP_SECONDS)
                process.kill()
                process.wait()
            raise
        return process.returncode, printed or "", failures or ""

    def register(self, **sales: str) -> None:
        """Make the tables, the three datasets and the two jobs."""
        self.odf("init")
        for name, kind in (
            ("sales", "as it arrives"),
            ("checked", "no bad rows"),
            ("report", "per shop"),
        ):
            (self.folder / name).mkdir()
            more = [word for key, value in sales.items() for word in (f"--{key}", value)]
            place = ["--hostname", f"{self.folder}/{name}", *(more if name == "sales" else [])]
            self.odf("dataset", "add", name, *place, note=kind)
        self.odf("job", "add", "check", "--in", "sales", "--out", "checked")
        self.odf("job", "add", "report", "--in", "checked", "--out", "report")

    def receive(self, days: list[str]) -> None:
        """Files arrive from outside, and the one who brings them runs `odf ready`."""
        for day in days:
            rows = list(_sales(day))
            if day == BROKEN:
                rows[3] = rows[3].replace(FIXED, "12.5O")
            (self.folder / "sales" / f"{day}.csv").write_text("".join(rows))
        click.secho(f"$ odf ready sales {days[0]} ... {days[-1]}", bold=True)
        code, _, errors = self.run([*ODF, "ready", "sales", *days], errors=subprocess.PIPE)
        if code:
            raise click.ClickException(f"`odf ready sales` ended with exit code {code}.{errors}")

    def mend(self) -> None:
        (self.folder / "sales" / f"{BROKEN}.csv").write_text("".join(_sales(BROKEN)))

    def end(self, then: str) -> None:
        seconds = time.monotonic() - self._began
        self.say(f"That was it, in {seconds:.0f} seconds. {then}")


@contextmanager
def interruptible() -> Iterator[None]:
    """End all that was started when the terminal, or what started the demo, ends."""
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, _interrupted)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Clear up to the end, however often Ctrl-C is pressed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f" {lines[-1]}" if lines else ""


def _sales(day: str) -> Iterator[str]:
    yield "day,shop,amount\n"
    for number in range(200):
        shop = ("north", "south", "harbour")[number % 3]
        amount = FIXED if number == 2 else f"{(number * 37 + int(day[-2:]) * 11) % 9000 / 100:.2f}"
        yield f"{day},{shop},{amount}\n"
