"""What the system gives: locks of files, functions of the C library, modules, standard output."""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import Refused, WrongUse

LOCK_WAIT_SECONDS = 60.0
"""How long to wait for another process that is publishing the same chunk or file."""


@contextmanager
def publish_lock(staging: str) -> Iterator[None]:
    """Hold a directory's lock, so that one publish of a chunk comes after the other."""
    handle = os.open(staging, os.O_RDONLY)
    try:
        wait_for_lock(handle, f"publishing to {staging}", time.monotonic() + LOCK_WAIT_SECONDS)
        yield
    finally:
        os.close(handle)


@contextmanager
def locked(path: str) -> Iterator[bool]:
    """Lock a directory, unless another process has locked or removed it meanwhile."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        mine = try_lock(handle) and os.path.exists(path)
        yield mine and os.path.samestat(os.fstat(handle), os.stat(path))
    finally:
        os.close(handle)


def wait_for_lock(handle: int, activity: str, deadline: float) -> None:
    """Take a lock, or refuse at the deadline, by `time.monotonic()`; `activity` is the other's."""
    while not try_lock(handle):
        if time.monotonic() > deadline:
            raise Refused(
                f"Another process has been {activity} for {LOCK_WAIT_SECONDS:.0f} s. If it "
                "hangs, end it, then run the chunk again.",
                code="LOCKED",
            )
        time.sleep(0.01)


def try_lock(handle: int) -> bool:
    """Whether a lock is ours now.

    A file system without locks gives it to everybody: there, the generations tell who is newer.
    """
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def libc_function(name: str) -> Callable[..., int] | None:
    """A function of the C library; None in a Python without ctypes."""
    try:  # the core of ctypes: all of it takes longer to import than the rest of a run
        from _ctypes import call_function, dlopen, dlsym

        address = dlsym(dlopen(None, 0), name)  # type: ignore[arg-type]
    except (ImportError, OSError):
        return None
    return lambda *arguments: call_function(address, arguments)


def import_beside(folder: str) -> None:
    """Make the modules of a folder importable."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def module_of_file(path: str) -> str:
    """Import a file, and return its module's name; files beside it can then be imported, too."""
    # Imported late: a run of a script loads this module too.
    from importlib import import_module
    from importlib.util import find_spec

    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    import_beside(folder)
    loaded = sys.modules.get(name)
    spec = None if loaded else find_spec(name)
    found = getattr(loaded, "__file__", None) or (spec and spec.origin) or "."
    if not (os.path.exists(found) and os.path.samefile(found, path)):
        raise WrongUse(f"{path} has the same name as the module {found}. Rename the file.")
    import_module(name)
    return name


def flush_output() -> None:
    """Write out what this process has printed so far."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # closed, or its reader is gone
            pass
