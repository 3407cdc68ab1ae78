"""The tour of `odf demo` with shell scripts, for where neither Spark nor Dagster is."""

import shlex

from ...config.settings import DEFAULT_URL
from .tour import BROKEN, DAYS, Tour


def take(tour: Tour, folder: str) -> None:
    """A month of sales, by two scripts."""
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
