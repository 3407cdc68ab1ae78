"""One script: which code it is; started as a shell would start it, awaited, ended as a group."""

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..util.system import flush_output
from . import process_tree
from .process_tree import Terminal, send

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

    def __init__(self, pid: int, wakeup: int, terminal: Terminal | None) -> None:
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
            # A second at most: a signal that comes just before `poll` is handled after it.
            left = min(by - time.monotonic(), 1.0)
            if left <= 0:
                return False
            # A pidfd tells of the end, not of a stop: with a terminal, Ctrl-Z has to be looked for.
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

    def send_leader(self, number: int) -> None:
        """Signal the script alone, not what it has started: it decides what becomes of that."""
        send(self.pid, number)

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
    """Raise the `CannotStart` that this program would end with, as far as that can be foreseen."""
    path = _find(name, search_path)
    if not os.path.exists(path):
        raise _refusal(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        raise _refusal(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _posix_spawn(path: str, argv: list[str], env: dict[str, str], stdin_null: bool) -> int:
    # Not `subprocess`, whose import alone costs every `odf run` milliseconds. A group of its own
    # lets one signal reach all that the script starts; the empty mask undoes what this thread
    # blocks.
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
    """Return the shell's exit code, the cause, and what to do about it."""
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


# What this can't do: when SIGKILL ends this process, the script runs on without it. Linux's
# PR_SET_PDEATHSIG would need a fork in place of posix_spawn, fires when the starting *thread* ends,
# and reaches the shell of a script but not the programs that the shell runs. The claim's lease and
# generation cover that case: another worker claims the chunk, and the lost script settles nothing.


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_STOP_SECONDS = 0.2
"""`timeout` and service managers send one stop twice, to us and to our group, within this time."""


class Ended(NamedTuple):
    """How a script ended: `code` as a shell gives it, `reason` empty on success."""

    code: int
    reason: str
    seconds: float
    began: bool = True


class Scripts:
    """The scripts that this process runs, each the leader of its own process group.

    Inside the `with`, TERM, INT and HUP go to every running script's group, and `stopping` is
    set, so that loops start nothing more; a second one kills. A script that ignores the first
    is killed after `stop_grace` seconds. Outside of the main thread no handler is installed.
    With `works_here` the work is Python code of this process: the second signal, or the end of the
    grace, raises KeyboardInterrupt in the main thread.

    If it `drains`, one signal more comes before these: with it `draining` is set, scripts run on to
    their ends, and none is started any more.
    """

    works_here = False

    def __init__(self, *, stop_grace: float = 10.0, drains: bool = False) -> None:
        self.stopping: int | None = None
        self.draining: int | None = None
        self.stop_grace = stop_grace
        self._drains = drains
        self._stopped_at = 0.0
        self._running: dict[int, Script] = {}
        self._untold: set[int] = set()  # who hasn't been told yet that we stop
        self._handlers = {}
        self._wakeup = self._alarm = -1
        self._is_over = False

    def __enter__(self) -> "Scripts":
        # Python runs a handler in the main thread, and wakes no other thread from its poll: a byte
        # in this pipe does. All of them poll it.
        self._wakeup, self._alarm = os.pipe()
        process_tree.adopting.begin()
        try:
            for number in STOP_SIGNALS:
                # What is ignored stays so: `nohup`, and INT in a shell's background job.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._stop)
            if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:  # the end of the grace
                self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end_grace)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # it would lose exit codes
                self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:  # the caller leaves by an exception while its threads still wait
            self.stop(signal.SIGTERM)
        while self._running:
            time.sleep(0.01)
        if signal.SIGALRM in self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            if handler is not None:  # None: it was installed by C code, which alone can restore it
                signal.signal(number, handler)
        process_tree.adopting.end()
        os.close(self._wakeup)
        os.close(self._alarm)
        self._is_over = True

    def why_stopping(self) -> str | None:
        """What ends the work, if something does."""
        return None if self.stopping is None else _stopped_by(self.stopping)

    def why_no_more(self) -> str | None:
        """Why nothing is started any more, if so: what runs may be running to its end."""
        number = self.draining if self.stopping is None else self.stopping
        return None if number is None else _stopped_by(number)

    def has_stopped(self, ended: Ended) -> bool:
        """Whether a script ended by our signals, or didn't start because of them."""
        numbers = (self.stopping, self.draining)
        return ended.reason in [_stopped_by(number) for number in numbers if number is not None]

    def run(
        self,
        argv: list[str],
        env: dict[str, str],
        *,
        time_limit: float | None = None,
        beat: Callable[[], object] | None = None,
        beat_every: float = 30.0,
        grace: float = 5.0,
        stdin_null: bool = False,
    ) -> Ended:
        """Run one script to its end, and end what it leaves behind; any thread may call this.

        `beat` is called every `beat_every` seconds, and its False means that the claim is lost.
        A script past its time limit, or whose claim is lost, has `grace` seconds between TERM and
        KILL. An exception of `beat` is raised again once the script has ended.
        """
        if why := self.why_no_more():
            return Ended(128 + (self.stopping or self.draining or 0), why, 0.0, began=False)
        flush_output()  # before the script's
        terminal = None
        if not stdin_null and os.isatty(0):
            terminal = None if self._running else Terminal.to_lend()
            stdin_null = terminal is None  # in the background, reading would stop it for ever
        started = time.monotonic()
        try:
            pid = spawn(argv, env, stdin_null=stdin_null)
        except CannotStart as refusal:
            return Ended(refusal.code, str(refusal), 0.0, began=False)
        script = Script(pid, self._wakeup, terminal)
        try:
            # Before `_running`: a handler that comes in between finds no script to tell, and the
            # `if` below makes up for it. The other way round, it would take the script for one that
            # was told.
            self._untold.add(pid)
            self._running[pid] = script
            if terminal:
                terminal.lend(pid)
            if self.stopping is not None:  # the signal came while the script was being started
                self._tell(script)
            why = self._watch(script, time_limit, beat, beat_every, grace)
        except BaseException:
            script.end(grace)
            raise
        finally:
            self._untold.discard(pid)
            self._running.pop(pid, None)
            script.close()
            process_tree.clear(pid, env, self._running)
        return Ended(*self._verdict(script, why), time.monotonic() - started)

    def _watch(
        self,
        script: Script,
        time_limit: float | None,
        beat: Callable[[], object] | None,
        beat_every: float,
        grace: float,
    ) -> str:
        """Wait until the script has ended; return why we had to end it, if we had to."""
        now = time.monotonic()
        limit_at = NEVER if time_limit is None else now + time_limit
        beat_at = NEVER if beat is None else now + beat_every
        kill_at = NEVER
        why = ""
        while not script.has_ended(by=min(limit_at, beat_at, kill_at)):
            now = time.monotonic()
            cause = ""
            if self.stopping is not None and not script.deaf:
                script.deaf = True
                limit_at = NEVER
                kill_at = min(kill_at, self._stopped_at + self.stop_grace)
            if now >= kill_at:
                script.send(signal.SIGKILL)
                kill_at = NEVER
            if now >= limit_at:
                limit_at = NEVER
                cause = f"time limit of {time_limit:g} s"
            if beat and now >= beat_at:
                beat_at = now + beat_every  # also while the script is being ended: it still writes
                if beat() is False:
                    beat_at = NEVER
                    cause = "claim lost"
            if cause and not why and self.stopping is None:
                why = cause
                script.send(signal.SIGTERM)
                kill_at = time.monotonic() + grace  # `beat` may have taken long
        return why

    def _verdict(self, script: Script, why: str) -> tuple[int, str]:
        """The code and the reason; a script that we ended never counts as a success."""
        if script.code is None:
            return 1, "exit code unknown: something else in this process waited for it"
        killed_by = max(-script.code, 0)
        code = 128 + killed_by if killed_by else script.code
        if code - 128 in STOP_SIGNALS and not (why or script.terminal):
            self._await_same_stop()
        if script.terminal and code == 128 + signal.SIGINT and self.stopping is None:
            self._stop(signal.SIGINT)
            script.terminal.pass_on_interrupt()
            return code, _stopped_by(signal.SIGINT)
        if why:
            return 128 + (script.sent or signal.SIGTERM), why
        if self.stopping is not None and (script.sent or code):
            return code or 128 + script.sent, _stopped_by(self.stopping)
        if self.draining is not None and code == 128 + self.draining:
            return code, _stopped_by(self.draining)  # the whole process group was signalled
        if killed_by:
            return code, f"killed by {_name(killed_by)}"
        return code, f"exit code {code}" if code else ""

    def _await_same_stop(self) -> None:
        """Wait for the stop that ended a script: service managers signal all processes at once."""
        until = time.monotonic() + SAME_STOP_SECONDS
        while self.why_no_more() is None and time.monotonic() < until:
            time.sleep(0.01)

    def drain(self, number: int) -> None:
        """Pass a signal on to programs that drain: they end when what they run has ended."""
        for script in list(self._running.values()):
            script.send_leader(number)

    def stop(self, number: int) -> None:
        """Stop the scripts at once, as by a signal after the draining."""
        if self.stopping is None:
            self.draining, self._stopped_at = number, float("-inf")
            self._stop(number)

    def _stop(self, number: int, _frame: object = None) -> None:
        """Handle a stop signal: the first is passed on to the scripts, a second kills them."""
        if self._is_over:  # another one of us, which began later, has ended later, too
            signal.signal(number, self._handlers.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        now = time.monotonic()
        if self._drains and self.draining is None:
            self.draining, self._stopped_at = number, now
        elif self.draining is not None and now - self._stopped_at <= SAME_STOP_SECONDS:
            pass
        elif self.stopping is None:
            self._stopped_at = now
            self.stopping = number
            os.write(self._alarm, b".")  # never read: it wakes up every thread
            for script in list(self._running.values()):
                self._tell(script)
            if self.works_here and signal.SIGALRM in self._handlers:
                signal.setitimer(signal.ITIMER_REAL, self.stop_grace)
        elif now - self._stopped_at > SAME_STOP_SECONDS:
            for script in list(self._running.values()):
                script.send(signal.SIGKILL)
            if self.works_here:
                raise KeyboardInterrupt

    def _end_grace(self, number: int, _frame: object = None) -> None:
        if self.stopping is not None:
            self._stop(number)

    def _tell(self, script: Script) -> None:
        """Pass the stop signal on, once, whichever thread comes first."""
        try:
            self._untold.remove(script.pid)
        except KeyError:
            return
        script.send(self.stopping or signal.SIGTERM)


def stop_code(scripts: Scripts) -> int:
    """The exit code of a run that a signal has stopped; else 0."""
    return 128 + scripts.stopping if scripts.stopping is not None else 0


def _stopped_by(number: int) -> str:
    return f"stopped by {_name(number)}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# Which code made a chunk: the git commit of its folder, and a hash of the script's own files.


MAX_SCRIPT_BYTES = 1_000_000
"""Size beyond which a file counts as a program that was installed, not as a script."""

HASH_LETTERS = COMMIT_LETTERS = 12


class CodeVersion:
    """The version of a script, looked up when it is asked for, and again when the script changes.

    Args:
        argv: The script and its arguments. Those of them that are files belong to the code:
            of `python3 load.py` the second word.
        environ: Its PATH tells where a script without a slash is.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        self._argv, self._path = argv, environ.get("PATH", os.defpath)
        self._text: str | None = None
        self._stamps: list[tuple[str, int, int]] | None = None

    def text(self) -> str | None:
        """`git:COMMIT file:HASH`, as much of it as is known; None if nothing is."""
        files = self._files()
        # A worker runs for weeks, and the file may be replaced under it.
        if (stamps := [stamp for _, stamp in files]) != self._stamps:
            self._text, self._stamps = code_of([file for file, _ in files]), stamps
        return self._text

    def _files(self) -> list[tuple[str, tuple[str, int, int]]]:
        found = []
        for number, word in enumerate(self._argv):
            path = self._in_path(word) if number == 0 and os.sep not in word else word
            try:
                status = os.stat(path)
            except (OSError, ValueError):
                continue
            if status.st_size <= MAX_SCRIPT_BYTES and os.path.isfile(path):
                found.append((path, (path, status.st_mtime_ns, status.st_size)))
        return found

    def _in_path(self, name: str) -> str:
        for folder in self._path.split(os.pathsep):
            if os.access(path := os.path.join(folder, name), os.X_OK):
                return path
        return name


def code_of(files: Sequence[str]) -> str | None:
    """The version of the code in some files: the commit of the first file's folder, and a hash.

    The hash detects a file that was changed without a commit. Programs of the machine, such as an
    interpreter, belong to no job's code.
    """
    digest, folder = _blake2b(), ""
    for file in files:
        try:
            with open(file, "rb") as opened:
                text = opened.read(MAX_SCRIPT_BYTES)
        except OSError:
            return None
        if b"\0" not in text[:1024]:
            digest.update(text)
            folder = folder or os.path.dirname(os.path.realpath(file))
    if not folder:
        return None
    commit = git_commit(folder)
    return (f"git:{commit} " if commit else "") + f"file:{digest.hexdigest()[:HASH_LETTERS]}"


def code_of_function(fn: Callable[..., Any]) -> str | None:
    """The version of the file that a function is in, as it is now: ask when it is loaded."""
    import inspect

    try:
        file = inspect.getsourcefile(inspect.unwrap(fn))
    except TypeError:  # a callable object, or a function of C
        return None
    return code_of([file] if file else [])


def git_commit(folder: str) -> str | None:
    """The commit that is checked out where a folder is, read from git's files; None without git.

    Calling git would take longer than many a script.
    """
    try:
        while not os.path.exists(git := os.path.join(folder, ".git")):
            if folder == (folder := os.path.dirname(folder)):
                return None
        if os.path.isfile(git):  # a worktree, or a submodule
            git = os.path.join(folder, _line(git).removeprefix("gitdir: "))
        head = _line(os.path.join(git, "HEAD"))
        if head.startswith("ref: "):
            head = _commit_of(git, head.removeprefix("ref: "))
    except OSError:
        return None
    return head[:COMMIT_LETTERS] or None


def _blake2b() -> Any:
    try:
        from _blake2 import blake2b  # type: ignore[import-not-found]
    except ImportError:
        from hashlib import blake2b  # which loads OpenSSL: longer than all else here
    return blake2b()


def _commit_of(git: str, ref: str) -> str:
    common = git
    if os.path.exists(shared := os.path.join(git, "commondir")):
        common = os.path.join(git, _line(shared))
    for folder in (git, common):
        if os.path.exists(path := os.path.join(folder, ref)):
            return _line(path)
    with open(os.path.join(common, "packed-refs")) as file:
        for line in file:
            commit, _, name = line.rstrip().partition(" ")
            if name == ref:
                return commit
    return ""


def _line(path: str) -> str:
    with open(path) as file:
        return file.readline().strip()
