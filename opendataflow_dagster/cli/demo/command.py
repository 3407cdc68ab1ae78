"""`odf demo`: a month of chunks through a failure and an outage, with the real commands."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click

from ...errors import WrongUse
from .tour import Tour, interruptible

FILES = Path(__file__).parents[1] / "demo_files"
MARK = ".odf-demo"
MADE = (".dataflow", "sales", "checked", "report", "dagster")
"""The folders that the demo makes and fills."""

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
    lacking = "" if scripts else _lacking()
    here = _fresh(Path(folder), "scripts" if scripts or lacking else "spark")
    with interruptible():
        if scripts or lacking:
            from .scripts import take

            if lacking:
                click.secho(
                    f"{lacking}, so this is the tour with shell scripts. For the one with Spark "
                    f"and Dagster: {INSTALL}",
                    fg="yellow",
                    err=True,
                )
        else:
            from .spark import take
        take(Tour(here), folder)


def _lacking() -> str:
    """What the tour with Spark and Dagster would need and isn't here."""
    from ...spark.java import find_java

    for package in ("pyspark", "pyarrow", "dagster", "dagster_graphql"):
        if find_spec(package) is None:
            return f"{package} isn't installed"
    return "" if find_java() else "There is no Java that Spark runs on"


def _fresh(folder: Path, files: str) -> Path:
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
        for ours in _files():
            _put_aside(folder / ours.name, ours)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    shutil.copytree(FILES / files, folder, dirs_exist_ok=True, ignore=_compiled)
    return folder


def _files() -> Iterator[Path]:
    return (each for kind in FILES.iterdir() for each in kind.iterdir() if each.is_file())


def _put_aside(there: Path, ours: Path) -> None:
    """Make room for a file of ours; one that a person has changed is kept under another name."""
    if there.is_file() and there.read_bytes() != ours.read_bytes():
        there.replace(there.with_name(there.name + "~"))
    there.unlink(missing_ok=True)


_compiled = shutil.ignore_patterns("__pycache__")
