"""Whether a signal came while some code ran: what the code raised may be an interruption then."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """What tells whether a signal that has a handler came since."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # handlers run in the main thread
        return
    heard, told = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(told, False)
    seen = b""

    def came() -> bool:
        nonlocal seen
        with suppress(BlockingIOError):
            seen += os.read(heard, 4096)
        return bool(seen)

    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        if came() and before != -1:
            with suppress(OSError):
                os.write(before, seen)
        os.close(heard)
        os.close(told)
