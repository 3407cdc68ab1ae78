"""`odf demo`: a month of chunks through a failure and an outage, with the real commands."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

from ..config.settings import DEFAULT_URL
from ..errors import WrongUse

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
        """Create the tables, the three datasets and the two jobs."""
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
        """Put files into the folder, as another system would, and run `odf ready` for them."""
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
def _handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle some signals otherwise for a while."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def interruptible() -> AbstractContextManager[None]:
    """End all that was started when the terminal, or what started the demo, ends."""

    def interrupt(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    return _handling(interrupt, signal.SIGTERM, signal.SIGHUP)


def undisturbed() -> AbstractContextManager[None]:
    """Clear up to the end, however often Ctrl-C is pressed."""
    return _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _last(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f" {lines[-1]}" if lines else ""


def _sales(day: str) -> Iterator[str]:
    yield "day,shop,amount\n"
    for number in range(200):
        shop = ("north", "south", "harbour")[number % 3]
        amount = FIXED if number == 2 else f"{(number * 37 + int(day[-2:]) * 11) % 9000 / 100:.2f}"
        yield f"{day},{shop},{amount}\n"


FILES = Path(__file__).parent / "demo_files"
MARK = ".odf-demo"
DEMO_FOLDERS = (".dataflow", "sales", "checked", "report", "dagster")
"""The folders that the demo creates and fills."""

INSTALL = "pip install 'opendataflow-dagster[dagster-spark,java]'"


@click.command()
@click.argument("folder", default="odf-demo")
@click.option("--scripts", is_flag=True, help="Use shell scripts, without Spark and Dagster.")
def demo(folder: str, scripts: bool) -> None:
    """Take a tour: a month of sales, a bad file and an outage.

    Everything happens in FOLDER, on SQLite, with the commands that you see. PySpark jobs are run by
    `odf`, and by a Dagster instance that the tour starts and stops. The folder stays for you to
    explore: try `cd odf-demo && odf status`.

    \b
    Example: odf demo --scripts
    """
    missing = "" if scripts else _missing()
    here = _fresh(Path(folder), "scripts" if scripts or missing else "spark")
    with interruptible():
        if missing:
            click.secho(
                f"{missing}, so this is the tour with shell scripts. For the one with Spark "
                f"and Dagster: {INSTALL}",
                fg="yellow",
                err=True,
            )
        take = take_scripts_tour if scripts or missing else take_spark_tour
        take(Tour(here), folder)


def _missing() -> str:
    """What the tour with Spark and Dagster would need and isn't here."""
    from ..spark.settings import find_java

    for package in ("pyspark", "pyarrow", "dagster", "dagster_graphql"):
        if find_spec(package) is None:
            return f"{package} isn't installed"
    return "" if find_java() else "There is no Java for Spark"


def _fresh(folder: Path, files: str) -> Path:
    """The demo's folder, without the files of an earlier demo; a person's files stay."""
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise WrongUse(
                f"{folder} has files that `odf demo` didn't create. Name another: odf demo FOLDER"
            )
        for created in (folder / name for name in DEMO_FOLDERS):
            if created.exists():
                shutil.rmtree(created)
        for file in _files():
            _put_aside(folder / file.name, file)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    shutil.copytree(FILES / files, folder, dirs_exist_ok=True, ignore=_compiled)
    return folder


def _files() -> Iterator[Path]:
    return (file for kind in FILES.iterdir() for file in kind.iterdir() if file.is_file())


def _put_aside(present: Path, original: Path) -> None:
    """Make room for a generated file; a file that a person has changed is renamed and kept."""
    if present.is_file() and present.read_bytes() != original.read_bytes():
        present.replace(present.with_name(present.name + "~"))
    present.unlink(missing_ok=True)


_compiled = shutil.ignore_patterns("__pycache__")


SCRIPTS = (("run", "--all", "./check.sh"), ("run", "--all", "./report.sh"))
"""The commands of the two jobs, as scripts."""

FUNCTIONS = (
    ("run", "--spark", "jobs.py:check", "--all"),
    ("run", "--spark", "jobs.py:report", "--all"),
)
"""The same two jobs, as functions of PySpark."""


def _begin_month(tour: Tour, check: Sequence[str], report: Sequence[str]) -> None:
    tour.say("The first ten days arrive. One of them is broken, and nobody knows yet.")
    tour.receive(DAYS[:10])
    tour.odf(*check, may_fail=True)
    tour.odf(*report, quiet=True)
    tour.odf("status", "--grid")


def _resubmit_broken(tour: Tour, check: Sequence[str], report: Sequence[str]) -> None:
    tour.mend()
    tour.odf("resubmit", "check", BROKEN)
    tour.odf(*check, quiet=True)
    tour.odf(*report, quiet=True)
    tour.odf("status", "--grid")


def _show_history(tour: Tour, folder: str) -> None:
    tour.say("Long after, it's all on record.")
    tour.odf("history", "check", BROKEN)
    tour.end(f"Look around: cd {shlex.quote(folder)} && odf status")


def take_scripts_tour(tour: Tour, folder: str) -> None:
    """Tour a month of sales, by two scripts."""
    tour.environ["DATAFLOW_URL"] = DEFAULT_URL  # whatever a properties file in the folder says
    tour.say("A month of sales will arrive, a file a day. Two scripts turn each day into a report.")
    tour.register()

    _begin_month(tour, *SCRIPTS)

    tour.say("One day failed alone; its report waits. Why?")
    tour.odf("why", "report", BROKEN, may_fail=True)

    tour.say("Then the scheduler was down for three weeks. The files kept coming.")
    tour.receive(DAYS[10:])
    tour.odf("status", "--grid")

    tour.say("To catch up, run the same two commands again. Four workers make it fast.")
    tour.odf("run", "--all", "--workers", "4", "./check.sh", quiet=True)
    tour.odf("run", "--all", "--workers", "4", "./report.sh", quiet=True)
    tour.odf("status", "--grid")

    tour.say("The broken file is repaired. Resubmit its chunk, and run the same commands.")
    _resubmit_broken(tour, *SCRIPTS)
    _show_history(tour, folder)


def take_spark_tour(tour: Tour, folder: str) -> None:
    """Tour a month of sales, by two functions of DataFrames, which Dagster runs too."""
    home = tour.folder / "dagster"
    tour.environ["DAGSTER_HOME"] = str(home)
    tour.say(
        "A month of sales will arrive, a file a day. Two functions of PySpark, in jobs.py, turn "
        "each day into a report."
    )
    tour.register(format="csv", options='{"strings": ["amount"]}')

    _begin_month(tour, *FUNCTIONS)

    tour.say("One day failed alone, and says at which row; its report waits. Why?")
    tour.odf("why", "report", BROKEN, may_fail=True)

    tour.say("Then everything was down for three weeks. The files kept coming.")
    tour.receive(DAYS[10:])
    tour.odf("status", "--grid")

    tour.say(
        "Dagster catches up: the same jobs, as a backfill. First it learns which chunks exist."
    )
    tour.typed("export", "DAGSTER_HOME=$PWD/dagster")
    tour.odf("drift", "--repair")
    backfill = launch_backfill(tour)
    with Daemon(tour) as daemon:
        click.echo(wait_for_run(daemon, home, backfill))
        tour.odf("status", "--grid")

        tour.say("The broken file is repaired. Resubmit its chunk, and `odf` runs what is left.")
        _resubmit_broken(tour, *FUNCTIONS)
        wait_for_backfill(daemon, home, backfill)

    tour.say("Dagster's sensor shows what `odf` produced within seconds. Or at once:")
    tour.odf("drift", "--repair")
    _show_history(tour, folder)


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
