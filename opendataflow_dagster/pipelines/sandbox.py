"""A project's folder and modules around its code, so that projects in one process don't mix."""

import fcntl
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from io import RawIOBase, TextIOWrapper
from pathlib import Path
from threading import RLock
from types import FrameType, ModuleType
from typing import IO, Any

OURS = __name__.partition(".")[0]
INSTALLED = {"site-packages", "dist-packages"}
LINK = ".odf-project"
"""In a copy of a project's code: the project's own folder, which is its working folder."""

_turn = RLock()
_inside: list[Path] = []
_modules: dict[Path, dict[str, ModuleType]] = {}


@contextmanager
def surroundings(root: Path) -> Iterator[None]:
    """Work in `root`, with its modules importable, and those of other projects out of sight.

    The working folder and the modules belong to the process: one thread at a time is inside.
    """
    root = root.resolve()
    with _turn:
        if _inside and _inside[-1] == root:
            with _working_in(_home(root)):
                yield
            return
        hidden = {name: sys.modules.pop(name) for name in _shadowed(root)}
        before, path, bytecode = set(sys.modules), list(sys.path), sys.dont_write_bytecode
        _inside.append(root)
        sys.modules.update(_modules.get(root) or _folders(root))
        sys.path.insert(0, str(root))
        sys.dont_write_bytecode = True  # no `__pycache__` in the user's folders
        try:
            with _working_in(_home(root)):
                _look_again(root)
                yield
        finally:
            own = {
                name: module
                for name, module in sys.modules.copy().items()  # other threads import
                if name not in before and _own(name, module, root)
            }
            for name in own:
                del sys.modules[name]
            _modules[root] = own
            sys.modules.update(hidden)
            sys.path[:] = path
            sys.dont_write_bytecode = bytecode
            _inside.pop()


def forget(root: Path) -> None:
    """Make Python import the project's modules again: their files may have changed."""
    with _turn:
        home = _home(root.resolve())
        for known in [name for name in _modules if _home(name) == home]:  # other versions, too
            del _modules[known]


def _home(root: Path) -> Path:
    """Return the project's own folder, for a copy of its code; else `root`."""
    home = Path(os.readlink(root / LINK)) if (root / LINK).is_symlink() else root
    return home if home.is_dir() else root


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = None
    with suppress(FileNotFoundError):
        before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        if before is not None:
            os.chdir(before)


def _look_again(root: Path) -> None:
    """Let Python see new files of the project.

    `importlib.invalidate_caches` would read every zip file on the path again: in a Spark worker,
    that takes longer than most transformations.
    """
    for place, finder in list(sys.path_importer_cache.items()):
        if Path(place).is_relative_to(root):
            getattr(finder, "invalidate_caches", lambda: None)()


def _shadowed(root: Path) -> list[str]:
    """Return loaded modules that a fresh Python in `root` would import from the project instead."""
    found = []
    for path in root.iterdir():
        name = path.stem if path.suffix == ".py" else path.name
        if name in (OURS, "__main__") or name in sys.stdlib_module_names:
            continue
        loaded = sys.modules.get(name)
        if loaded is None:
            continue
        # A folder without `__init__.py` gives way to what is installed.
        plain = path.is_dir() and not (path / "__init__.py").exists()
        if not plain or not INSTALLED & set(Path(getattr(loaded, "__file__", None) or "").parts):
            found.append(name)
    inner = tuple(f"{name}." for name in found)
    return found + [name for name in sys.modules.copy() if name.startswith(inner)]


def _folders(root: Path) -> dict[str, ModuleType]:
    """Return the project's folders without `__init__.py`, which any package on the path overrides.

    In a process of the project's own, only installed packages are on the path.
    """
    installed = [folder for folder in sys.path if INSTALLED & set(Path(folder).parts)]
    found = {}
    for path in root.iterdir():
        name = path.name
        if not path.is_dir() or not name.isidentifier() or (path / "__init__.py").exists():
            continue
        other = PathFinder.find_spec(name, installed)
        if name in sys.modules or name in sys.stdlib_module_names or (other and other.loader):
            continue
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(path)]
        found[name] = module_from_spec(spec)
    return found


def _own(name: str, module: ModuleType, root: Path) -> bool:
    if name.partition(".")[0] == OURS:
        return False
    places = []
    with suppress(Exception):  # some libraries put things there that aren't modules
        places.append(getattr(module, "__file__", None))
        places += list(getattr(module, "__path__", ()))
    for place in filter(None, places):
        with suppress(ValueError, TypeError):
            # A virtual environment may be in the project.
            return not INSTALLED & set(Path(place).resolve().relative_to(root).parts)
    return False


# Whether a signal came while some code ran: then, what the code raised may be an interruption.


@contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a handled signal has come since."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # handlers run in the main thread
        return
    heard, ring = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(ring, False)
    seen = b""

    def came() -> bool:
        nonlocal seen
        with suppress(BlockingIOError):
            seen += os.read(heard, 4096)
        return bool(seen)

    before = signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        if came() and before != -1:
            with suppress(OSError):
                os.write(before, seen)
        os.close(heard)
        os.close(ring)


# What some code prints, in any way: kept, and not shown.


STDOUT = 1

_files: list[IO[bytes]] = []
"""Where printed text goes; the last one counts."""


class _Bytes(RawIOBase):
    """Sends what is printed to the current file, or else to standard error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            _files[-1].write(data)
        except (IndexError, ValueError):  # a thread, or a log at the very end
            shown = sys.__stderr__ if isinstance(sys.stderr, _Stream) else sys.stderr
            with suppress(Exception):
                shown.write(bytes(data).decode(errors="replace"))  # pyright: ignore
        return len(data)

    def close(self) -> None:
        """Stay open: `TextIOWrapper(sys.stdout.buffer)` closes what it was given."""


class _Stream(TextIOWrapper):
    """`sys.stdout` or `sys.stderr` for all code whose output is kept.

    They are always the same two objects, since a `logging` handler keeps the one it started with.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            _Bytes(f"<{name}>"), "utf-8", "backslashreplace", newline="", write_through=True
        )
        self._called = name

    def close(self) -> None:
        """Stay open, for later code."""

    def detach(self) -> Any:
        return self.buffer

    def reconfigure(self, **_: Any) -> None:
        """Stay UTF-8, which is what most callers ask for."""

    def __reduce__(self) -> Any:
        return getattr, (sys, self._called)


_out, _err = _Stream("stdout"), _Stream("stderr")


class Prints:
    """What some code prints: on standard output and error, as warnings, as logs.

    This includes what processes that it starts write on standard output. Their standard error isn't
    captured: threads of ours may be writing there.
    """

    text = ""
    """All of it, once the code has ended."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep what the code prints. If it reads standard input, that is at its end."""

        def show(message, category, filename, lineno, file=None, line=None) -> None:
            _err.write(warnings.formatwarning(message, category, filename, lineno, line))

        before = sys.stdin, sys.stdout, sys.stderr
        _flush(sys.stdout, sys.__stdout__)
        with _file() as file, open(os.devnull) as nothing, warnings.catch_warnings():
            # A warning in user code is reported, and never an error, whatever `-W` or pytest say.
            warnings.simplefilter("default")
            warnings.showwarning = show
            _files.append(file)
            try:
                with _instead_of_stdout(file.fileno()):
                    try:
                        sys.stdin, sys.stdout, sys.stderr = nothing, _out, _err
                        yield
                    finally:
                        # The code may have replaced them.
                        _flush(sys.stdout, sys.stderr, sys.__stdout__)
                        sys.stdin, sys.stdout, sys.stderr = before
            finally:
                _files.remove(file)
                file.seek(0)
                self.text = file.read().decode(errors="replace")


@contextmanager
def _file() -> Iterator[IO[bytes]]:
    """Return a file without a name, in memory if possible."""
    try:
        handle = os.memfd_create("printed")
    except (AttributeError, OSError):
        opened = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed below
    else:
        opened = os.fdopen(handle, "w+b", buffering=0)
    with opened as file:
        # Otherwise a process that opens /dev/stdout again would overwrite what is there.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        yield file


@contextmanager
def _instead_of_stdout(file: int) -> Iterator[None]:
    """Make a file the standard output of this process, and of those it starts."""
    try:
        ours = os.dup(STDOUT)
    except OSError:  # closed: nobody sees what is written there
        yield
        return
    try:
        os.dup2(file, STDOUT)
        yield
    finally:
        os.dup2(ours, STDOUT)
        os.close(ours)


def _flush(*streams: Any) -> None:
    for stream in streams:
        with suppress(Exception):  # None, or closed
            stream.flush()


# A limit to the time that an item's transformations take, in the process that runs them.


TIME_LIMIT_REASON = "it took longer than its time_limit, see `odf policy`"


class OverTime(BaseException):
    """An item took too long; no `except Exception` in user code catches this."""


@contextmanager
def within(seconds: float | None, root: Path) -> Iterator[None]:
    """End code of the project that takes longer, by an alarm.

    This stops Python code, even in a library, but not a C call that never returns.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        while frame is not None:  # our own code, which cleans up after the user's, isn't ended
            if Path(frame.f_code.co_filename).is_relative_to(root):
                raise OverTime(TIME_LIMIT_REASON)
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, over)
    # Again each second: the first may be lost in a `finally` or a bare `except`.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
