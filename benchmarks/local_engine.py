"""The cost of a small pipeline without Spark: `benchmarks/local_engine.py [--quick|--tiny]`.

`odf pipeline run` of the project that `odf new` creates, four rows and three transformations, from
process start to exit: on Spark, and on the local engine, in turns. CPU seconds and memory include
all processes that the command starts. Both have to write the same bytes. Exit code 0 if every
target is met.
"""

import compileall
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from measure import Samples, concluded, progress  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options, spread  # noqa: E402

ODF = Path(sys.executable).with_name("odf")
SLUG = "clean_contacts"
ENGINES = SPARK, LOCAL = "spark", "local"
ROUNDS = {FULL: 7, QUICK: 3, SLICE: 1, TINY: 1}

LOOK_SECONDS = 0.05
"""Seconds between two samples of the processes: memory used only in between isn't counted."""

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ (\S+) (\S+) (\d+)")


class Cost(NamedTuple):
    """The cost of a command, with all the processes that it started."""

    seconds: float
    cpu: float
    megabytes: float


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments)
    report = Report("local_engine", given, ["pyspark", "pandas"])
    costs = Samples()
    compileall.compile_dir(ROOT / "opendataflow_dagster", quiet=1)
    with tempfile.TemporaryDirectory(prefix="odf-bench-") as folder:
        shop = Path(folder) / "shop"
        subprocess.run([ODF, "new", shop], check=True, capture_output=True)
        for number in range(ROUNDS[given.scale]):
            made = []
            for engine in ENGINES:
                progress(f"round {number + 1}: {engine}")
                cost = run(shop, engine)
                for what, value in cost._asdict().items():
                    costs.add((engine, what), value)
                made.append((shop / "output" / f"{SLUG}.csv").read_bytes())
            if made[0] != made[1]:
                raise RuntimeError("The two engines have written different bytes")
    report.table(
        "Four rows through three transformations of pandas, from start to exit",
        ["s", "CPU s", "MB"],
        [[engine, *(spread(costs[engine, what]) for what in Cost._fields)] for engine in ENGINES],
    )
    report.require("local: CPU seconds", costs[LOCAL, "cpu"], most=1.5, unit=" s")
    report.require("local: memory", costs[LOCAL, "megabytes"], most=180, aim="150 MB", unit=" MB")
    for what in ("cpu", "megabytes"):
        ratios = costs.ratios((SPARK, what), (LOCAL, what))
        report.require(f"Spark / local: {what}", ratios, least=1)
    return report.verdict()


def run(shop: Path, engine: str) -> Cost:
    """Run the pipeline once; sample its processes until it ends."""
    start, cpu, peak = time.monotonic(), {}, 0.0
    before = getrusage(RUSAGE_CHILDREN)
    words = [ODF, "pipeline", "run", SLUG, "--engine", engine]
    with subprocess.Popen(words, cwd=shop, stderr=subprocess.PIPE) as command:
        root = psutil.Process(command.pid)
        while command.poll() is None:
            with suppress(psutil.Error):
                family = [root, *root.children(recursive=True)]
                for process in family:
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        cpu[process.pid] = times.user + times.system
                peak = max(peak, memory([process.pid for process in family]))
            time.sleep(LOOK_SECONDS)
        if command.returncode:
            raise RuntimeError(command.stderr.read().decode() if command.stderr else "It failed")
    seconds, after = time.monotonic() - start, getrusage(RUSAGE_CHILDREN)
    # Exact, but without Java, which nobody waits for.
    waited_for = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, max(waited_for, sum(cpu.values())), peak)


def memory(pids: Sequence[int]) -> float:
    """Return the MB of some processes: their own pages, and those of each file once.

    Linux's PSS would be less when other programs share the same files; this isn't.
    """
    own, files = 0, {}
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/smaps").read_text()
            for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
                if found := _MAPPING.match(part):
                    sizes = dict(re.findall(r"(\w+): +(\d+) kB", part))
                    anonymous = int(sizes.get("Anonymous", 0))
                    own += min(anonymous, int(sizes.get("Pss", 0)))
                    shared = int(sizes.get("Rss", 0)) - anonymous
                    files[found.groups()] = max(files.get(found.groups(), 0), shared)
    return (own + sum(files.values())) / 1024


if __name__ == "__main__":
    sys.exit(concluded(main))
