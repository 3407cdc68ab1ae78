"""`odf demo`: a month of chunks through a failure and an outage, with the real commands."""

import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click

from ...config.settings import DEFAULT_URL
from ...errors import WrongUse
from .dagster import Daemon, launch_backfill, wait_for_backfill, wait_for_run
from .tour import BROKEN, DAYS, Tour, interruptible

FILES = Path(__file__).parents[1] / "demo_files"
MARK = ".odf-demo"
DEMO_FOLDERS = (".dataflow", "sales", "checked", "report", "dagster")
"""The folders that the demo creates and fills."""

INSTALL = "pip install 'opendataflow-dagster[dagster-spark,java]'"


@click.command()
@click.argument("folder", default="odf-demo")
@click.option("--scripts", is_flag=True, help="With shell scripts, without Spark and Dagster.")
def demo(folder: str, scripts: bool) -> None:
    """Take the tour: a month of sales, a bad file, an outage, and the way back.

    Everything happens in FOLDER, on SQLite, by the commands that you see: jobs of PySpark, run by
    `odf` and by a Dagster that is started for it and ended. It stays there for you to play with:
    try `cd odf-demo && odf status`.
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
    from ...spark.java import find_java

    for package in ("pyspark", "pyarrow", "dagster", "dagster_graphql"):
        if find_spec(package) is None:
            return f"{package} isn't installed"
    return "" if find_java() else "There is no Java that Spark runs on"


def _fresh(folder: Path, files: str) -> Path:
    """The demo's folder, without the files of an earlier demo; a person's files stay."""
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise WrongUse(
                f"{folder} has files in it that aren't a demo's. Name another: `odf demo FOLDER`."
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
    """Make room for a file of ours; one that a person has changed is kept under another name."""
    if present.is_file() and present.read_bytes() != original.read_bytes():
        present.replace(present.with_name(present.name + "~"))
    present.unlink(missing_ok=True)


_compiled = shutil.ignore_patterns("__pycache__")


def take_scripts_tour(tour: Tour, folder: str) -> None:
    """Tour a month of sales, by two scripts."""
    tour.environ["DATAFLOW_URL"] = DEFAULT_URL  # whatever a properties file in the folder says
    tour.say("A month of sales will arrive, a file a day. Two scripts turn each day into a report.")
    tour.register()

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
    tour.end(f"Look around: cd {shlex.quote(folder)} && odf status")


# The same two jobs, as functions of PySpark.
CHECK, REPORT = ("run", "--spark", "jobs.py:check"), ("run", "--spark", "jobs.py:report")


def take_spark_tour(tour: Tour, folder: str) -> None:
    """Tour a month of sales, by two functions of DataFrames, which Dagster runs too."""
    home = tour.folder / "dagster"
    tour.environ["DAGSTER_HOME"] = str(home)
    tour.say(
        "A month of sales will arrive, a file a day. Two functions of PySpark, in jobs.py, turn "
        "each day into a report."
    )
    tour.register(format="csv", options='{"strings": ["amount"]}')

    tour.say("The first ten days arrive. One of them is broken, and nobody knows yet.")
    tour.receive(DAYS[:10])
    tour.odf(*CHECK, "--all", may_fail=True)
    tour.odf(*REPORT, "--all", quiet=True)
    tour.odf("status", "--grid")

    tour.say("One day failed alone, and says at which row; its report waits. Why?")
    tour.odf("why", "report", BROKEN, may_fail=True)

    tour.say("Then everything was down for three weeks. The files kept coming.")
    tour.receive(DAYS[10:])
    tour.odf("status", "--grid")

    tour.say("Dagster catches up: the same jobs, as a backfill. First it learns what there is.")
    tour.typed("export", "DAGSTER_HOME=$PWD/dagster")
    tour.odf("drift", "--repair")
    backfill = launch_backfill(tour)
    with Daemon(tour) as daemon:
        click.echo(wait_for_run(daemon, home, backfill))
        tour.odf("status", "--grid")

        tour.say("The broken file is mended. RESUBMIT it, and `odf` makes what is left.")
        tour.mend()
        tour.odf("resubmit", "check", BROKEN)
        tour.odf(*CHECK, "--all", quiet=True)
        tour.odf(*REPORT, "--all", quiet=True)
        tour.odf("status", "--grid")

        wait_for_backfill(daemon, home, backfill)

    tour.say("Dagster's sensor shows what `odf` made, within seconds. Or at once:")
    tour.odf("drift", "--repair")

    tour.say("Long after, it's all on record.")
    tour.odf("history", "check", BROKEN)
    tour.end(f"Look around: cd {shlex.quote(folder)} && odf status")
