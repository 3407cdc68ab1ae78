"""What Spark says of an error, in a line: its messages are pages with the reason somewhere."""

import re

_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_NOISE = ("Job aborted due to stage failure", "An error occurred while calling", "== SQL", "at ")


def in_a_line(error: BaseException) -> str | None:
    """The reason of an error that Spark raised; None if it is no such error."""
    package = type(error).__module__.partition(".")[0]
    if package not in ("pyspark", "py4j", "grpc"):
        return None
    text = str(error).strip()
    if _TRACE in text:  # of a function of the user's, in a worker: what it raised comes last
        lines = text.rpartition(_TRACE)[2].splitlines()
        raised = [line for line in lines if _RAISED.match(line)]
        if raised:
            return raised[0].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by:")]
    told = [line for line in lines if not line.startswith(_NOISE)]
    return (causes or told or [type(error).__name__])[-1 if causes else 0]
