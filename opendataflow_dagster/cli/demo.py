"""`odf demo`: a month of chunks through a failure and an outage, with the real commands."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..dataflow.config import DEFAULT_URL
from ..dataflow.errors import WrongUse

FILES = Path(__file__).with_name("demo_files")
MARK = ".odf-demo"
MADE = (".dataflow", "sales", "checked", "report")
"""The folders that the demo makes and fills; the scripts are written over."""

BROKEN, FIXED = "2026-10-07", "12.50"
DAYS = [f"2026-10-{day:02d}" for day in range(1, 32)]


@click.command()
@click.argument("folder", default="odf-demo")
def demo(folder: str) -> None:
    """Take the tour: a month of sales, a bad file, an outage, and the way back.

    Everything happens in FOLDER, on SQLite, by the commands that you see. It stays there for you to
    play with: try `cd odf-demo && odf status`.
    """
    tour = Tour(_fresh(Path(folder)))
    tour.say("A month of sales will arrive, a file a day. Two scripts turn each day into a report.")
    tour.odf("init")
    for name, kind in (
        ("sales", "as it arrives"),
        ("checked", "no bad rows"),
        ("report", "per shop"),
    ):
        (tour.folder / name).mkdir()
        tour.odf("dataset", "add", name, "--hostname", f"{tour.folder}/{name}", note=kind)
    tour.odf("job", "add", "check", "--in", "sales", "--out", "checked")
    tour.odf("job", "add", "report", "--in", "checked", "--out", "report")

    tour.say("The first ten days arrive. One of them is broken, and nobody knows yet.")
    tour.receive(DAYS[:10])
    tour.odf("run", "--all", "./check.sh", may_fail=True)
    tour.odf("run", "--all", "./report.sh", quiet=True)
    tour.odf("status", "--grid")

    tour.say("One day failed alone; its report waits. Why?")
    tour.odf("why", "report", BROKEN, may_fail=True)

    tour.say("Then the scheduler was down for three weeks. The files kept coming.")
    tour.receive(DAYS[10:])
    tour.odf("status", "--grid")

    tour.say("Catching up is the same two commands, run again. Four workers make it quick.")
    tour.odf("run", "--all", "--workers", "4", "./check.sh", quiet=True)
    tour.odf("run", "--all", "--workers", "4", "./report.sh", quiet=True)
    tour.odf("status", "--grid")

    tour.say("The broken file is mended. RESUBMIT it, and run the same commands.")
    tour.mend()
    tour.odf("resubmit", "check", BROKEN)
    tour.odf("run", "--all", "./check.sh", quiet=True)
    tour.odf("run", "--all", "./report.sh", quiet=True)
    tour.odf("status", "--grid")

    tour.say("Long after, it's all on record.")
    tour.odf("history", "check", BROKEN)
    tour.say(f"That was it. Look around: cd {shlex.quote(folder)} && odf status")


class Tour:
    """A folder with the demo in it, and the commands that are typed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("DATAFLOW_") and name not in ("PASSKEY", "PASSKEY_FILE")
        } | {"DATAFLOW_URL": DEFAULT_URL}  # whatever a properties file in the folder says

    def say(self, text: str) -> None:
        click.secho(f"\n# {text}", fg="cyan", bold=True)

    def odf(self, *words: str, note: str = "", may_fail: bool = False, quiet: bool = False) -> None:
        """Type an `odf` command; `quiet` keeps what it tells of each chunk to itself."""
        typed = shlex.join(word.replace(f"{self.folder}/", "$PWD/") for word in words).replace(
            "'", ""
        )
        click.secho(f"$ odf {typed}" + (f"  # {note}" if note else ""), bold=True)
        sys.stdout.flush()
        done = subprocess.run(
            [sys.executable, "-m", "opendataflow_dagster.cli", *words],
            cwd=self.folder,
            env=self.environ,
            check=False,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
        )
        if quiet and done.stderr:
            click.echo(done.stderr.rstrip().splitlines()[-1])
        if done.returncode and not may_fail:
            raise click.ClickException(f"`odf {typed}` ended with exit code {done.returncode}.")

    def receive(self, days: list[str]) -> None:
        """Files arrive from outside, and whoever brings them says so."""
        for day in days:
            rows = list(_sales(day))
            if day == BROKEN:
                rows[2] = rows[2].replace(FIXED, "12.5O")
            (self.folder / "sales" / f"{day}.csv").write_text("".join(rows))
        click.secho(f"$ odf ready sales {days[0]} ... {days[-1]}", bold=True)
        subprocess.run(
            [sys.executable, "-m", "opendataflow_dagster.cli", "ready", "sales", *days],
            cwd=self.folder, env=self.environ, check=True, capture_output=True,
        )  # fmt: skip

    def mend(self) -> None:
        (self.folder / "sales" / f"{BROKEN}.csv").write_text("".join(_sales(BROKEN)))


def _sales(day: str) -> Iterator[str]:
    for number in range(200):
        shop = ("north", "south", "harbour")[number % 3]
        amount = FIXED if number == 2 else f"{(number * 37 + int(day[-2:]) * 11) % 9000 / 100:.2f}"
        yield f"{day},{shop},{amount}\n"


def _fresh(folder: Path) -> Path:
    """The demo's folder, without what an earlier demo has made there; a person's files stay."""
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise WrongUse(
                f"{folder} has files in it that aren't a demo's. Name another: `odf demo FOLDER`."
            )
        for made in (folder / name for name in MADE):
            if made.exists():
                shutil.rmtree(made)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    for script in FILES.glob("*.sh"):
        shutil.copy(script, folder)
    return folder
