"""What a script leaves behind: the rest of its process group, and daemons that left the group.

A daemon is found on Linux only, where this process can ask to become the parent of its orphans.
It is told from other scripts' daemons by its environment, so one that cleared or overwrote its
environment is left alone, unless it is in the process group of another that didn't; and so is every
child that isn't a script's.
"""

import os
import signal
import stat
import sys
import time
from _thread import allocate_lock  # `threading` would cost a cron line milliseconds
from collections.abc import Collection

from ..util.system import libc_function

MARKS = ("dataflow_jobid", "dataflow_generation", "dataid")

# A `tee` that still writes the last lines ends by itself: first it gets the time to.
STAGES = ((0, 0.1), (signal.SIGTERM, 0.2), (signal.SIGKILL, 5.0))

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


def adopt_orphans(wanted: bool = True) -> bool:
    """Become the parent of descendants that lose theirs, or stop being it; return what it was."""
    if sys.platform != "linux" or not (prctl := libc_function("prctl")):
        return False
    from _ctypes import _SimpleCData, byref

    class Int(_SimpleCData):  # type: ignore[type-arg]
        _type_ = "i"

    before = Int(0)
    prctl(_GET_CHILD_SUBREAPER, byref(before), 0, 0, 0)
    if bool(before.value) != wanted:
        prctl(_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
    return bool(before.value)


class Adopting:
    """Adopts orphaned processes while any thread of this process runs scripts."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._users, self._before = 0, False

    def begin(self) -> None:
        with self._lock:
            if not self._users:
                self._before = adopt_orphans()
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                adopt_orphans(self._before)


adopting = Adopting()


def clear(group: int, env: dict[str, str], running: Collection[int]) -> None:
    """End and reap whatever is left of the ended script `group`: gently, then by force.

    `env` is the environment it was started with, `running` the scripts that still run.
    """
    marks = {os.fsencode(f"{name}={env[name]}") for name in MARKS if name in env}
    if "dataflow_jobid" not in env:  # the rest wouldn't tell it from the scripts of other jobs
        marks.clear()
    groups, orphans = {group}, set[int]()
    for number, patience in STAGES:
        deadline = time.monotonic() + patience
        pause = 0.001
        told: set[int] = set()
        while True:
            # Listed after the reaping: the children of an orphan that has ended are ours now.
            orphans -= {pid for pid in orphans if _is_gone(pid)}
            groups -= {pid for pid in groups if _is_empty(pid)}
            found, complete = _orphans(marks, running)
            orphans |= found
            groups |= _groups(found, running)
            if not orphans and not groups and (complete or number == signal.SIGKILL):
                return
            if number == signal.SIGKILL:
                # A group is killed at once, whoever forks in it. Again and again: what is killed
                # can leave new orphans.
                for target in orphans | {-pid for pid in groups}:
                    send(target, number)
            elif number:
                targets = orphans | ({-group} if group in groups else set())
                for target in targets - told:
                    send(target, number)
                told |= targets
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(pause * 2, 0.02)


def send(target: int, number: int) -> bool:
    """Signal a process, or a group by its negative id; wake it if it is stopped."""
    try:
        os.kill(target, number)
        if number != signal.SIGKILL:
            os.kill(target, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _is_empty(group: int) -> bool:
    """Whether no member is left that we may signal; members that became our children are reaped."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return True
    return False


def _is_gone(orphan: int) -> bool:
    try:
        return os.waitpid(orphan, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _groups(orphans: set[int], running: Collection[int]) -> set[int]:
    """The process groups of orphans, other than ours and those of the running scripts."""
    found = set()
    for orphan in orphans:
        try:
            found.add(os.getpgid(orphan))
        except ProcessLookupError:
            continue
    return found - {os.getpgrp(), *running}


def _orphans(marks: set[bytes], running: Collection[int]) -> tuple[set[int], bool]:
    """Our children that carry the marks of the script, and whether those are all.

    A child that ends while it is looked at leaves us its own children, which this listing misses:
    nothing found is the truth once two listings in a row are the same.
    """
    if not marks or sys.platform != "linux":
        return set(), True
    before: set[int] = set()
    for _ in range(3):
        children = set(_children()) - set(running)
        if children == before:
            return set(), True
        found = {pid for pid in children if marks <= _environment(pid)}
        if found:
            return found, True
        before = children
    return set(), False


def _environment(pid: int) -> set[bytes]:
    return set(_read(f"/proc/{pid}/environ").split(b"\0"))


def _children() -> list[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    if os.path.exists("/proc/thread-self/children"):
        tasks = os.listdir("/proc/self/task")
        return [int(pid) for t in tasks for pid in _read(f"/proc/self/task/{t}/children").split()]
    # A kernel without CONFIG_PROC_CHILDREN: read the parent of every process.
    parent = b"%d" % os.getpid()
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    return [int(pid) for pid in processes if _parent(_read(f"/proc/{pid}/stat")) == parent]


def _parent(stat: bytes) -> bytes:
    """The parent in `PID (any name) STATE PARENT …`."""
    return b"".join(stat.rpartition(b")")[2].split()[1:2])


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", 0) as file:
            return file.read()
    except OSError:  # it ended meanwhile, or it is another user's
        return b""


# --- the terminal, lent to a script so that prompts, debuggers, Ctrl-C and Ctrl-Z work in it ---


STDIN, STDOUT = 0, 1


class Terminal:
    """The terminal on standard input, of which this process's group is the foreground."""

    def __init__(self) -> None:
        self._own = os.getpgrp()
        self._script = 0
        self._is_lent = False

    @classmethod
    def to_lend(cls) -> "Terminal | None":
        """The terminal, if it is ours to lend: in `odf run x.sh | less` it is less's too."""
        try:
            piped = stat.S_ISFIFO(os.fstat(STDOUT).st_mode)
        except OSError:  # closed
            piped = False
        return cls() if _foreground() == os.getpgrp() and not piped else None

    def lend(self, script: int) -> None:
        """Make `script` the foreground; if it read too early, `script_stopped` wakes it."""
        self._script = script
        self._is_lent = True
        _set_foreground(script)

    def take_back(self) -> None:
        """Be the foreground again, unless the shell has sent us to the background meanwhile."""
        if self._is_lent:
            self._is_lent = False
            _set_foreground(self._own)

    def pass_on_interrupt(self) -> None:
        """Interrupt our process group, as Ctrl-C would: `make` or a shell loop ends as well."""
        os.kill(0, signal.SIGINT)

    def script_stopped(self, number: int) -> None:
        """Stop as a shell's job does when `number` has stopped the script, until `fg` or `bg`.

        After `bg` and `fg` the script may want the terminal that the shell gave to us: lend it.
        """
        wants_terminal = number in (signal.SIGTTIN, signal.SIGTTOU)
        if not (wants_terminal and _foreground() in (self._own, self._script)):
            self.take_back()
            os.kill(0, signal.SIGTSTP)
        if _foreground() == self._own:
            self.lend(self._script)
        try:
            os.killpg(self._script, signal.SIGCONT)
        except OSError:  # it has ended
            return


def _foreground() -> int:
    try:
        return os.tcgetpgrp(STDIN)
    except OSError:  # not the terminal of our session, or it is gone
        return -1


def _set_foreground(group: int) -> None:
    # From the background, SIGTTOU would stop us. The mask is per thread: no handler is needed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        os.tcsetpgrp(STDIN, group)
    except OSError:  # the script has ended already, or the terminal is gone
        pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
