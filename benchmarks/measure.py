"""What the benchmarks share: clients in processes of their own, samples by round, a verdict."""

import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

WARM_UP = 0.1
"""Seconds that each slice runs before it counts: for plans, caches, and all to be in motion."""


class Contender:
    """One way to claim and finish chunks, as one client sees it."""

    def run(self, k: int, until: float) -> tuple[int, float]:
        """Do cycles until a moment, or to the last chunk: how many chunks, and the last end."""
        done, last = 0, time.monotonic()
        while last < until and (count := self.cycle(k)):
            done += count
            last = time.monotonic()
        return done, last

    def cycle(self, k: int) -> int:
        """Claim up to k chunks and finish them: how many there were."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what this client holds."""


class Clients:
    """Processes that keep their connections open and work when they are told to, all at once."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs,), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()

    def open(self, name: str, make: Callable[..., Contender], *arguments: Any) -> None:
        """Let every client open a contender, in place of one that had the same name."""
        self._ask(self._pipes, ("open", name, make, arguments))

    def rate(self, name: str, k: int, clients: int, seconds: float) -> float:
        """Chunks per second of so many clients at once, from a common start to the last end."""
        start = time.monotonic() + WARM_UP
        answers = self._ask(self._pipes[:clients], ("run", name, k, start, seconds))
        if not any(done for done, _ in answers):
            raise RuntimeError(f"{name}, k={k}: all chunks were gone before the first one counted")
        return sum(done for done, _ in answers) / (max(last for _, last in answers) - start)

    def _ask(self, pipes: Sequence[Connection], order: tuple) -> list[Any]:
        for pipe in pipes:
            pipe.send(order)
        answers = [pipe.recv() for pipe in pipes]
        for _, error in answers:
            if error:
                raise RuntimeError(f"A client failed:\n{error}")
        return [answer for answer, _ in answers]


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, by closing the pipe
    opened: dict[str, Contender] = {}
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((_obey(opened, *order), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def _obey(opened: dict[str, Contender], verb: str, name: str, *details: Any) -> Any:
    if verb == "open":
        make, arguments = details
        if name in opened:
            opened.pop(name).close()
        opened[name] = make(*arguments)
        return None
    k, start, seconds = details
    opened[name].run(k, start)
    time.sleep(max(0.0, start - time.monotonic()))  # if nothing was left
    return opened[name].run(k, start + seconds)


class Samples:
    """Numbers by name, one per round; two of one round have had the same noise."""

    def __init__(self) -> None:
        self._numbers: dict[Any, list[float]] = defaultdict(list)

    def add(self, name: Any, number: float) -> None:
        self._numbers[name].append(number)

    def get(self, name: Any) -> list[float]:
        """What was measured, if anything was."""
        return self._numbers.get(name, [])

    def __getitem__(self, name: Any) -> list[float]:
        return self._numbers[name]

    def ratios(self, one: Any, other: Any) -> list[float]:
        """One per round."""
        return [a / b for a, b in zip(self[one], self[other], strict=True)]


class Report:
    """The tables as they come, then each required number on a line, and whether all were met."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str, str, str]] = []
        self.missed = 0

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        cells = [["", *columns], *rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns) + 1)]
        print(f"\n{title}")
        for row in cells:
            first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            print("  " + "  ".join([row[0].ljust(len(first)), *others]).rstrip())
        sys.stdout.flush()

    def require(self, what: str, numbers: Sequence[float], *, least: float | None = None,
                most: float | None = None, aim: str = "", unit: str = "") -> None:  # fmt: skip
        """A median that has to be at least, or at most, so much."""
        median = statistics.median(numbers)
        met = (least is None or median >= least) and (most is None or median <= most)
        self.missed += not met
        target = f"≥ {least:g}{unit}" if least is not None else f"≤ {most:g}{unit}"
        if aim:
            target += f" (aim {aim})"
        self._lines.append((what, spread(numbers, unit), target, "ok" if met else "MISSED"))

    def verdict(self) -> int:
        """Print the required numbers; return the exit code."""
        print("\nRequired (median of the rounds, least–most)")
        widths = [max((len(line[i]) for line in self._lines), default=0) for i in range(3)]
        for what, number, target, met in self._lines:
            print(f"  {what:<{widths[0]}}  {number:>{widths[1]}}  {target:<{widths[2]}}  {met}")
        print(f"\n{self.missed} of {len(self._lines)} missed" if self.missed else "\nAll met")
        return 1 if self.missed else 0


def spread(numbers: Sequence[float], unit: str = "") -> str:
    """Median (least–most)."""
    if not numbers:
        return "-"
    low, middle, high = (
        _short(each) for each in (min(numbers), statistics.median(numbers), max(numbers))
    )
    return f"{middle}{unit} ({low}–{high})"


def _short(number: float) -> str:
    return (
        f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )


def amount(number: int) -> str:
    """10k, 1M."""
    return f"{number // 1_000_000}M" if number % 1_000_000 == 0 else f"{number // 1000}k"


def progress(what: str) -> None:
    """Tell who waits at a terminal what happens now."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def end_in_order() -> None:
    """Let a TERM end the benchmark as Ctrl-C does, so that its server is stopped."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def concluded(main: Callable[[], int]) -> int:
    """The exit code of a benchmark; 130 for one that was stopped."""
    end_in_order()
    try:
        return main()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    finally:
        progress("")
