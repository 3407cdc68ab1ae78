"""What Spark says of an error, in a line: its messages are pages with the reason somewhere."""

import re
from itertools import takewhile

from ..util.text import in_one
from .session_health import MEMORY

_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_RAGGED = re.compile(r"\[MALFORMED_CSV_RECORD\] Malformed CSV record: (.*?)(?: SQLSTATE|\n|$)")
_READ = re.compile(r"error while reading file (?:file:/*(?=/))?(.+?)\. +SQLSTATE")
_NOISE = ("Job aborted due to stage failure", "An error occurred while calling", "== SQL", "at ")


def in_a_line(error: BaseException) -> str | None:
    """The reason of an error that Spark raised; None if it is no such error."""
    package = type(error).__module__.partition(".")[0]
    if package not in ("pyspark", "py4j", "grpc"):
        return None
    text = str(error).strip()
    if "java.lang.OutOfMemoryError" in text:
        return f"Java ran out of memory. {MEMORY}"
    if _TRACE in text:  # of a function of the user's, in a worker: what it raised comes last
        lines = text.rpartition(_TRACE)[2].splitlines()
        raised = next((at for at, line in enumerate(lines) if _RAISED.match(line)), None)
        if raised is not None:
            return in_one("\n".join(takewhile(_is_message, lines[raised:])))
    if (row := _RAGGED.search(text)) and (file := _READ.search(text)):
        return (
            f"{file[1]} has a row with more or fewer values than its first line has names: "
            f"{row[1]}. Correct the file."
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by:")]
    told = [line for line in lines if not line.startswith(_NOISE)]
    return (causes or told or [type(error).__name__])[-1 if causes else 0]


def _is_message(line: str) -> bool:
    """Whether a line is of what was raised; Java's own follows after an empty one."""
    return bool(line.strip()) and not line.startswith("\tat ")
