"""Locks of directories and files, which end with their process: whose turn it is to change them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import Refused

LOCK_WAIT_SECONDS = 60.0
"""How long to wait for another process that is publishing the same chunk or file."""


@contextmanager
def publish_lock(staging: str) -> Iterator[None]:
    """Let one publish of a chunk after the other look at what is there and replace it."""
    handle = os.open(staging, os.O_RDONLY)
    try:
        wait_for_lock(handle, f"publishing to {staging}", time.monotonic() + LOCK_WAIT_SECONDS)
        yield
    finally:
        os.close(handle)


@contextmanager
def locked(path: str) -> Iterator[bool]:
    """Have a directory's lock, or hear that somebody else has, or has removed it, meanwhile."""
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
                f"Another process has been {activity} for {LOCK_WAIT_SECONDS:.0f} s. "
                "If it hangs, end it; then let the chunk be made again.",
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
