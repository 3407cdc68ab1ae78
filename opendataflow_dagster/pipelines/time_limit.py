"""A limit to the time that an item's transformations take, in the process that runs them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

TOLD = "it took longer than the time_limit that `odf policy` tells"


class OverTime(BaseException):
    """An item took too long; no `except Exception` of the user's keeps it from ending."""


@contextmanager
def within(seconds: float | None, root: Path) -> Iterator[None]:
    """End code of the project that takes longer, by an alarm.

    It reaches Python code, also in a library, and not a call of C that never returns.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        while frame is not None:  # our own code, which cleans up after the user's, isn't ended
            if Path(frame.f_code.co_filename).is_relative_to(root):
                raise OverTime(TOLD)
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, over)
    # Again each second: the first may be lost in a `finally` or a bare `except`.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
