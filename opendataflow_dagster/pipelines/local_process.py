"""Processes that run transformations of pandas without Spark, one request after the other.

Run as a program, this module is such a process: it answers its parent, and ends with it.
"""

import atexit
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from ..config.settings import redact
from ..errors import DataflowError, SessionError
from ..runner.environment import SECRETS
from .task import compute, in_one_line

POLL_SECONDS = 0.5
"""Seconds between two looks whether a process has ended, or what it does has to be ended."""

STDERR = 2

SPARK_DEFAULTS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "YES"}
"""What Spark sets for its workers, if nobody does: sets of texts have another order without the
first, and sums of floats may have other last digits without the second."""


class ProcessDied(Exception):
    """The process ended before it has answered."""


class LocalProcess:
    """One process with the environment that a worker of Spark has, which answers requests."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # The kernel ends the process once this one is gone, whatever it is doing then.
        listens, self._lifeline = os.pipe()
        # -P: a file of the working folder isn't taken for a module.
        words = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(listens)]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=_standard_error(),
                pass_fds=(theirs.fileno(), listens),
                env=public_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            self._connection.close()
            os.close(self._lifeline)
            raise SessionError(
                f"No process can be started for transformations: {error.strerror}. Free memory or "
                "processes of this machine, then run it again."
            ) from None
        finally:
            theirs.close()
            os.close(listens)

    def ask(self, request: tuple, why_not: Callable[[], object]) -> Any:
        """What `compute` answers to a request; once `why_not` tells something, it is ended.

        It ends whatever else ends the wait for it, too: an answer that comes later is nobody's.
        """
        try:
            self._connection.send_bytes(pickle.dumps(request, 5))
            while not self._connection.poll(POLL_SECONDS):
                if why_not() or (self._has_ended() and not self._connection.poll()):
                    raise ProcessDied
            reason, answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # of the connection
            self.end()
            raise ProcessDied from None
        except BaseException:
            self.end()
            raise
        if reason:
            raise DataflowError(reason)
        return pickle.loads(answer)

    @property
    def is_usable(self) -> bool:
        return not self._connection.closed and not self._has_ended()

    def end(self) -> None:
        """End it, and what it has started."""
        if self._connection.closed:
            return
        self._connection.close()
        # It isn't waited for before, so that its group is no other's yet.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._lifeline)

    def _has_ended(self) -> bool:
        """Whether it is over: a process that it has forked may keep its connection open."""
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return self._process.poll() is not None
        with suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return True


class LocalProcesses:
    """The processes of this one, which are reused: as many as there are threads that ask at once.

    They are to this engine what the session is to Spark's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[LocalProcess] = []
        self._owner = os.getpid()

    def start(self) -> None:
        """Have one ready."""
        with self.one():
            pass

    @contextmanager
    def one(self) -> Iterator[LocalProcess]:
        """A process that nobody else asks."""
        with self._lock:
            if self._owner != os.getpid():  # they are those of the process that this is a fork of
                self._owner, self._idle = os.getpid(), []
            while self._idle and not self._idle[-1].is_usable:
                self._idle.pop().end()
            process = self._idle.pop() if self._idle else LocalProcess()
        try:
            yield process
        finally:
            if process.is_usable:
                self._idle.append(process)
            else:
                process.end()

    def end(self) -> None:
        """End those that wait for work."""
        with self._lock:
            while self._idle and self._owner == os.getpid():
                self._idle.pop().end()


processes = LocalProcesses()
"""Those of this process, whichever engine asks: it has one session of Spark, too."""

atexit.register(processes.end)


def _standard_error() -> int:
    """Where the user's code may write past us: never among what a command prints as its data."""
    try:
        os.fstat(STDERR)
    except OSError:
        return subprocess.DEVNULL
    return STDERR


def public_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker of Spark has of an environment: nothing of ours that is secret."""
    found = {name: value for name, value in environ.items() if name not in SECRETS}
    if redact(url := found.get("DATAFLOW_URL", "")) != url:
        del found["DATAFLOW_URL"]
    return SPARK_DEFAULTS | found


# --- the process itself ---


def serve(connection: Connection, lifeline: int) -> NoReturn:
    """Answer requests, until the other side is gone."""
    _end_with(lifeline)
    here = os.getpid()
    import pandas  # noqa: F401 - while the parent does something else

    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        reason, answer = "", b""
        try:
            answer = compute(*pickle.loads(request))
        except Exception as error:  # it isn't the transformation's
            reason = in_one_line(error)
        if os.getpid() != here:  # a process that the user's code has forked, and that came back
            os._exit(0)
        connection.send_bytes(pickle.dumps((reason, answer), 5))


def _end_with(lifeline: int) -> None:
    """Let the kernel end this process, and what it has started, when the lifeline is cut.

    Not a thread, which would watch for it: what the user's code forks would have a copy of its
    locks. Where there are no such signals, the process ends after what it is doing.
    """
    with suppress(AttributeError, OSError):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
