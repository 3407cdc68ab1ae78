"""Of a result that can't be written: whether it is to blame, and why, in one line."""

from collections.abc import Callable
from typing import Any

from ..chunk import Result, reason_of
from ..errors import (
    CredentialError,
    DataflowError,
    NoDatabase,
    SessionError,
    StaleClaim,
    Unreachable,
    WrongUse,
)
from ..storage.table import is_outage

Verdict = Result | DataflowError

_NOBODYS = (StaleClaim, Unreachable, NoDatabase, CredentialError, SessionError)


def judged(work: Callable[[], Result], frame: Any, where: str) -> Verdict:
    """What writing a frame has come to; it raises only what others would meet there, too."""
    try:
        return work()
    except Exception as error:
        if not is_to_blame(error):
            raise
        return fault(error, frame, where)


def is_to_blame(error: Exception) -> bool:
    """Whether what is written is wrong, and not the claim, the place or the tables of ours."""
    import sqlite3

    import psycopg

    if isinstance(error, OSError):
        return error.errno is None  # it isn't the system's
    if error.__cause__ is not None and is_outage(error.__cause__):
        return False  # of our tables, told in a line
    return not isinstance(error, (*_NOBODYS, psycopg.Error, sqlite3.Error))


def fault(error: Exception, frame: Any, where: str) -> DataflowError:
    """The verdict on a frame that can't be written: which column it is about, and why."""
    cause = error.__context__ if isinstance(error, WrongUse) else error
    if isinstance(error, DataflowError) and not isinstance(cause, UnicodeError):
        return error
    cause = cause or error
    found = column_to_blame(cause, frame)
    told = f"{found}, which can't be written there" if found else "the frame can't be written there"
    return DataflowError(f"{where}: {told} ({reason_of(cause)}). Correct it in the transformation.")


def column_to_blame(error: BaseException, frame: Any) -> str:
    """What is odd about the first column that can have made such an error; or nothing."""
    names = [str(each) for each in frame.columns]
    for at, name in enumerate(names):
        if told := _odd(name, error):
            return f"column {name!r} is called by {told}"
        if names.count(name) > 1:
            return f"two columns are called {name!r}"
        column = frame.iloc[:, at]
        if column.dtype.kind not in "bfimM":
            told = next(filter(None, (_odd(value, error) for value in column)), "")
            if told:
                return f"column {name!r} has {told}"
    return ""


def _odd(value: Any, error: BaseException) -> str:
    """What is odd about a value, or about one in it, and makes such errors; or nothing."""
    if isinstance(value, str):
        return (
            "a text that isn't Unicode" if isinstance(error, UnicodeError) and _half(value) else ""
        )
    if isinstance(error, OverflowError) and isinstance(value, int):
        return "" if -(2**63) <= value < 2**63 else "a whole number of more than 64 bits"
    if isinstance(value, dict):
        if not isinstance(error, UnicodeError | OverflowError):
            if not value:
                return "an empty dict"
            if not all(isinstance(key, str) for key in value):
                return "a dict with a key that is no text"
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        return ""
    return next(filter(None, (_odd(each, error) for each in inner)), "")


def _half(text: str) -> bool:
    return any("\ud800" <= each <= "\udfff" for each in text)
