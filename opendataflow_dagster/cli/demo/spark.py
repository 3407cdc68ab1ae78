"""The tour of `odf demo` with jobs of PySpark, run by `odf` and by a Dagster of its own."""

import shlex

import click

from .dagster import Daemon, launch_backfill, wait_for_backfill, wait_for_run
from .tour import BROKEN, DAYS, Tour

CHECK, REPORT = ("run", "--spark", "jobs.py:check"), ("run", "--spark", "jobs.py:report")


def take(tour: Tour, folder: str) -> None:
    """A month of sales, by two functions of DataFrames."""
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
