"""One script: started as a shell would start it, waited for, and signalled as a group."""

import errno
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from .process_tree import send

if TYPE_CHECKING:
    from .terminal import Terminal

NO_START = "cannot start:"
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # a shell's exit codes
NEVER = float("inf")

# Python ignores some of these, and our parent may: a script starts with the system's defaults.
DEFAULTED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGCHLD,
)


class CannotStart(Exception):
    """The program didn't start; `code` is what a shell would exit with."""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(f"{NO_START} {cause}")
        self.code = code


class Script:
    """A started script: waits for its end, at once where the system has pidfds, else in naps."""

    def __init__(self, pid: int, wakeup: int, terminal: "Terminal | None") -> None:
        self.pid = pid
        self.terminal = terminal
        self.code: int | None = None  # -n for signal n; None while it runs, or if it was lost
        self.sent = 0  # the last signal from us
        self.deaf = False  # to the wakeup of a stop, once that is known
        self._wakeup = wakeup
        try:
            self._pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._pidfd = -1

    def has_ended(self, by: float) -> bool:
        """Wait until the end, the moment `by`, or a stop, whichever comes first."""
        poll = select.poll()
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        if not self.deaf:
            poll.register(self._wakeup, select.POLLIN)
        nap = 0.001
        while not self._is_reaped():
            left = min(by - time.monotonic(), 1e6)
            if left <= 0:
                return False
            if self._pidfd < 0 or self.terminal:
                left = min(left, nap)
                nap = min(nap * 2, 0.02 if self._pidfd < 0 else 0.1)
            if any(fd == self._wakeup for fd, _ in poll.poll(left * 1000)):
                return self._is_reaped()
        return True

    def send(self, number: int) -> None:
        """Signal the script's whole group."""
        # Noted first: the thread that waits may hear of the end before this one goes on.
        before, self.sent = self.sent, number
        if not send(-self.pid, number):
            self.sent = before

    def end(self, grace: float) -> None:
        """End the script, whatever it takes."""
        self.deaf = True
        self.send(signal.SIGTERM)
        if not self.has_ended(by=time.monotonic() + grace):
            self.send(signal.SIGKILL)
            self.has_ended(by=NEVER)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self.terminal:
            self.terminal.take_back()

    def _is_reaped(self) -> bool:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return True
        if pid and os.WIFSTOPPED(status):
            if self.terminal:
                self.terminal.script_stopped(os.WSTOPSIG(status))
            return False
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        return bool(pid)


def spawn(argv: list[str], env: dict[str, str], *, stdin_null: bool = False) -> int:
    """Start `argv` as the leader of a process group of its own; return its process id.

    A name without a slash is looked up in the PATH of `env`, not in ours.
    """
    path = _find(argv[0], env.get("PATH", os.defpath))
    try:
        try:
            return _posix_spawn(path, argv, env, stdin_null)
        except OSError as error:
            if error.errno != errno.ENOEXEC or b"\0" in _first_line(path):
                raise
        # A script without a `#!` line.
        return _posix_spawn("/bin/sh", ["sh", "--", path, *argv[1:]], env, stdin_null)
    except OSError as error:
        raise _refusal(path, error) from None
    except ValueError as error:  # a NUL in an argument, a `=` in a variable's name
        raise CannotStart(NOT_EXECUTABLE, f"{argv[0]!r}: {error}") from None


def check(name: str, search_path: str) -> None:
    """Raise the `CannotStart` that would await this program, as far as looking at it tells."""
    path = _find(name, search_path)
    if not os.path.exists(path):
        raise _refusal(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        raise _refusal(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _posix_spawn(path: str, argv: list[str], env: dict[str, str], stdin_null: bool) -> int:
    return os.posix_spawn(
        path,
        argv,
        env,
        setpgroup=0,
        setsigmask=(),
        setsigdef=DEFAULTED,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)] if stdin_null else (),
    )


def _find(name: str, search_path: str) -> str:
    if "/" in name:
        return name
    unusable = None
    for folder in search_path.split(os.pathsep):
        path = os.path.join(folder or ".", name)
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            unusable = unusable or path
    if unusable:
        return unusable
    hint = f"; for the file in this folder write ./{name}" if os.path.isfile(name) else ""
    raise CannotStart(NOT_FOUND, f"{name}: not found in PATH{hint}")


def _refusal(path: str, error: OSError) -> CannotStart:
    """The shell's exit code, the cause, and what to do about it."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if not os.path.exists(path):
            return CannotStart(NOT_FOUND, f"{path}: not found")
        named = os.fsdecode(_first_line(path).rstrip(b"\n"))
        seen = f": {named!r}" if named.startswith("#!") else ""
        return CannotStart(NOT_EXECUTABLE, f"{path}: its interpreter is missing{seen}")
    if os.path.isdir(path):
        return CannotStart(NOT_EXECUTABLE, f"{path}: is a folder")
    if error.errno == errno.EACCES and not os.access(path, os.X_OK):
        return CannotStart(NOT_EXECUTABLE, f"{path}: not executable: run `chmod +x {path}`")
    return CannotStart(NOT_EXECUTABLE, f"{path}: {error.strerror}")


def _first_line(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.readline(256)
    except OSError:
        return b""
