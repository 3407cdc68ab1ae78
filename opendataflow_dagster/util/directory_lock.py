"""Locks of directories, which end with their process: whose turn it is to change what is there."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import Refused

PATIENCE = 60.0
"""Seconds to wait for somebody else who is publishing the same chunk this moment."""


@contextmanager
def turn(staging: str) -> Iterator[None]:
    """Let one publish of a chunk after the other look at what is there and replace it."""
    handle = os.open(staging, os.O_RDONLY)
    try:
        deadline = time.monotonic() + PATIENCE
        while not had(handle):
            if time.monotonic() > deadline:
                raise Refused(
                    f"Another process has been publishing to {staging} for {PATIENCE:.0f} s. "
                    "If it hangs, end it; then let the chunk be made again.",
                    code="LOCKED",
                )
            time.sleep(0.02)
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
        mine = had(handle) and os.path.exists(path)
        yield mine and os.path.samestat(os.fstat(handle), os.stat(path))
    finally:
        os.close(handle)


def had(handle: int) -> bool:
    """Whether a lock is ours now; without locks in this file system, the generations tell."""
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
