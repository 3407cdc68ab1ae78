"""Functions of the C library."""

from collections.abc import Callable


def libc_function(name: str) -> Callable[..., int] | None:
    """A function of the C library; None in a Python without ctypes."""
    try:  # the core of ctypes: all of it takes longer to import than the rest of a run
        from _ctypes import call_function, dlopen, dlsym

        address = dlsym(dlopen(None, 0), name)  # type: ignore[arg-type]
    except (ImportError, OSError):
        return None
    return lambda *arguments: call_function(address, arguments)
