"""The passkey of this process: read from the environment or a file, then kept in memory alone.

A script of a job, and code of users in our own process, could read it in the environment: in
`os.environ`, and in /proc/PID/environ, which shows what the process was started with. So each
process of ours takes it out of both before it runs anything of theirs, and hands it on to its own
children by a pipe.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..errors import CredentialError

VARIABLES = ("PASSKEY", "NEW_PASSKEY")

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_ENV_START = 47  # of the fields of /proc/PID/stat after the name

_kept: dict[str, tuple[str, str]] = {}
"""Variable → the passkey, and where it came from."""


def find_passkey(environ: Mapping[str, str] = os.environ, variable: str = "PASSKEY") -> str | None:
    """The passkey from PASSKEY, or from the file that PASSKEY_FILE names."""
    found = _look_up(environ, variable)
    return found[0] if found else None


def passkey_source(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where the passkey comes from, in words; None if there is none."""
    found = _look_up(environ, "PASSKEY")
    return found[1] if found else None


def take_passkey() -> None:
    """Move the passkey from this process's environment to its memory, and keep others out of that.

    A debugger can't attach then, and no core is dumped, unless root asks for it.
    """
    taken = []
    for variable in VARIABLES:
        if os.environ.get(variable):
            _kept[variable] = os.environ.pop(variable), variable
            taken.append(os.fsencode(f"{variable}="))
        elif passkey := _read_descriptor(os.environ.get(f"{variable}_FILE", "")):
            _kept[variable] = passkey, _file_of(variable)
    if taken:
        _erase(tuple(taken))
    if _kept or any(os.environ.get(f"{variable}_FILE") for variable in VARIABLES):
        _close_memory()


@contextmanager
def handed_on() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """The environment and the descriptors with which a child process of ours is started."""
    if "PASSKEY" not in _kept:
        yield dict(os.environ), ()
        return
    reading, writing = os.pipe()
    try:
        with open(writing, "w", encoding="utf-8", errors="surrogateescape") as pipe:
            pipe.write(_kept["PASSKEY"][0])
        yield {**os.environ, "PASSKEY_FILE": f"/dev/fd/{reading}"}, (reading,)
    finally:
        os.close(reading)


def hand_on_by_multiprocessing() -> None:
    """Let children that `multiprocessing` starts have the passkey, as Dagster starts its runs.

    What is in `_config` of a process is pickled for its children, as its `authkey` is: it goes
    through the pipe by which they get their work.
    """
    if not _kept:
        return
    from multiprocessing.process import current_process

    current_process()._config["opendataflow_passkey"] = HandedOn()  # type: ignore[attr-defined]


class HandedOn:
    """Stands for what this process keeps: pickled for a child process, the child keeps it too."""

    def __reduce__(self) -> tuple:
        from multiprocessing.context import get_spawning_popen

        return _receive, ({} if get_spawning_popen() is None else dict(_kept),)


def _receive(kept: dict[str, tuple[str, str]]) -> HandedOn:
    _kept.update(kept)
    if kept:
        _close_memory()
    return HandedOn()


def _look_up(environ: Mapping[str, str], variable: str) -> tuple[str, str] | None:
    if passkey := environ.get(variable):
        return passkey, variable
    if variable in _kept:
        return _kept[variable]
    path = environ.get(f"{variable}_FILE")
    if not path:
        return None
    reason = "it is empty"
    passkey = ""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            passkey = _without_newline(file.read())
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if not passkey:
        raise CredentialError(
            f"The passkey file {path!r}, which {variable}_FILE names, can't be used: {reason}. "
            f"Correct it, or set {variable}, then run `odf doctor`."
        )
    return passkey, _file_of(variable)


def _file_of(variable: str) -> str:
    return f"the file that {variable}_FILE names"


def _read_descriptor(path: str) -> str | None:
    """What an open file that we were started with has; it is closed, so that no child gets it.

    By its name it couldn't be opened again where it belongs to another user.
    """
    for folder in ("/dev/fd/", "/proc/self/fd/"):
        number = path.removeprefix(folder)
        if number != path and number.isascii() and number.isdigit() and int(number) > 2:
            try:
                with open(int(number), encoding="utf-8", errors="surrogateescape", newline="") as f:
                    return _without_newline(f.read())
            except OSError:  # `find_passkey` tells it
                return None
    return None


def _without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _erase(starts: tuple[bytes, ...]) -> None:
    """Overwrite variables in the block of memory that /proc/PID/environ shows.

    Not by NUL: two of them end the block for psutil and others.
    """
    if sys.platform != "linux":
        return
    try:
        from _ctypes import _SimpleCData

        with open("/proc/self/environ", "rb", 0) as file:
            block = file.read()
        with open("/proc/self/stat", "rb", 0) as file:
            address = int(file.read().rpartition(b")")[2].split()[_ENV_START])
    except (ImportError, OSError):  # no ctypes, no /proc
        return

    class Byte(_SimpleCData):  # type: ignore[type-arg]
        _type_ = "c"

    for entry in block.split(b"\0"):
        for start in starts:
            if address and entry.startswith(start):
                for at in range(len(start), len(entry)):
                    Byte.from_address(address + at).value = b"*"
        address += len(entry) + 1 if address else 0


def _close_memory() -> None:
    """Let nobody but root read this process's memory and environment, or trace it."""
    from ..util.libc import libc_function

    if sys.platform == "linux" and (prctl := libc_function("prctl")):
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
