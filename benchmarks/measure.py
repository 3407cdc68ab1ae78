"""Tools of the benchmarks: clients in processes of their own, and samples by round."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

FAILED, STOPPED = 2, 130
"""The exit codes of a benchmark that failed or was stopped: without a verdict."""

WARM_UP = 0.1
"""Seconds before each slice counts: for plans, caches, and until all clients are running."""


class Contender:
    """One way to claim and finish chunks, as one client sees it."""

    def run(self, k: int, until: float) -> tuple[int, float]:
        """Run cycles until a given time, or to the last chunk; return the chunks and the last end.

        On a busy machine, that time may have passed at the start: one cycle runs anyway.
        """
        done, last = 0, time.monotonic()
        while count := self.cycle(k):
            done += count
            last = time.monotonic()
            if last >= until:
                break
        return done, last

    def cycle(self, k: int) -> int:
        """Claim up to k chunks and finish them; return how many there were."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what this client holds."""


class Clients:
    """Processes that keep their connections open and work on command, all at once."""

    def __init__(self, count: int, warm_up: float = WARM_UP) -> None:
        self._warm_up = warm_up
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
        """Let every client open a contender, replacing one of the same name."""
        self._ask(self._pipes, ("open", name, make, arguments))

    def rate(self, name: str, k: int, clients: int, seconds: float) -> float:
        """Return the chunks per second of parallel clients, from a common start to the last end."""
        start = time.monotonic() + self._warm_up
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
    time.sleep(max(0.0, start - time.monotonic()))  # in case nothing was left
    return opened[name].run(k, start + seconds)


class Samples:
    """Numbers by name, one per round; those of one round had the same noise."""

    def __init__(self) -> None:
        self._numbers: dict[Any, list[float]] = defaultdict(list)

    def add(self, name: Any, number: float) -> None:
        self._numbers[name].append(number)

    def get(self, name: Any) -> list[float]:
        """Return what was measured, if anything."""
        return self._numbers.get(name, [])

    def __getitem__(self, name: Any) -> list[float]:
        return self._numbers[name]

    def ratios(self, one: Any, other: Any) -> list[float]:
        """Return one ratio per round."""
        return [a / b for a, b in zip(self[one], self[other], strict=True)]


def progress(what: str) -> None:
    """Show progress to a person at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def end_in_order() -> None:
    """Let a TERM end the benchmark like Ctrl-C, so that its server is stopped."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def concluded(main: Callable[[], int]) -> int:
    """Return the exit code of a benchmark: 0 all met, 1 missed, 2 failed, 130 stopped."""
    end_in_order()
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return FAILED
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED
    finally:
        progress("")
