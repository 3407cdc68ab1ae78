"""All benchmarks, one after the other: `python benchmarks/all.py [--quick|--tiny] [--record]`.

A program that misses a target or fails doesn't stop the others. The last lines sum up each
program; the exit code is 0 if all programs met all targets.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from measure import FAILED, STOPPED, concluded  # noqa: E402

PROGRAMS = (
    "claims",
    "online",
    "runjob",
    "reconcile",
    "listings",
    "outage",
    "wake",
    "catchup",
    "load",
    "spark",
    "spark_postgres",
    "evidence",
    "stream",
    "local_engine",
)
VERDICTS = {0: "ok", 1: "MISSED", FAILED: "FAILED"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help="run only these")
    for option in ("--quick", "--tiny", "--record"):
        parser.add_argument(option, action="store_true", help="passed to each program")
    given = parser.parse_args(arguments)
    if unknown := set(given.program) - set(PROGRAMS):
        parser.error(f"no program {', '.join(sorted(unknown))}: there are {', '.join(PROGRAMS)}")
    words = [f"--{name}" for name in ("quick", "tiny", "record") if getattr(given, name)]
    lines, worst = [], 0
    for program in given.program or PROGRAMS:
        print(f"\n=== {program}.py", flush=True)
        start = time.monotonic()
        code = ended([sys.executable, str(HERE / f"{program}.py"), *words])
        minutes = (time.monotonic() - start) / 60
        if code == STOPPED:
            return STOPPED
        lines.append(f"{program}.py".ljust(20) + f"{minutes:5.1f} min  " + verdict(code))
        worst = max(worst, FAILED if code not in VERDICTS else code)
    print("\n=== all\n" + "\n".join(lines))
    return worst


def ended(line: Sequence[str]) -> int:
    """Run a program to its end; if it is stopped, give it time to stop its server."""
    process = subprocess.Popen(line)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def verdict(code: int) -> str:
    return VERDICTS.get(code, f"FAILED, exit code {code}")


if __name__ == "__main__":
    sys.exit(concluded(main))
