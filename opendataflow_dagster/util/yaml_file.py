"""Files of YAML: read safely, and with the line of each value."""

import math
from typing import Any

from ..errors import DataflowError
from .text import printable

MOST_VALUES = 100_000
"""Values of a file, its aliases written out: a few lines of them can be billions."""


def refuse_many_values(node: Any, name: str, error: type[DataflowError]) -> None:
    """Refuse a document that has more values than anybody writes, before they are made."""
    if size_of(node, {}) > MOST_VALUES:
        raise error(
            f"{name} has more than {MOST_VALUES:,} values once its aliases (`*name`) are "
            "written out. Leave most of them out."
        )


def size_of(node: Any, sizes: dict[int, float]) -> float:
    """How many values a node of YAML has, each alias written out; one within itself has no end."""
    if node is None:
        return 0
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # until it is known: what an alias within itself finds
        values = node.value if isinstance(node.value, list) else ()
        # A mapping has pairs, a sequence has nodes.
        inner = [each for value in values for each in (value if type(value) is tuple else (value,))]
        sizes[id(node)] = 1 + sum(size_of(each, sizes) for each in inner)
    return sizes[id(node)]


def not_yaml(error: Exception, name: str) -> str:
    """What says why a file can't be read as YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark else name
    why = getattr(error, "problem", None) or str(error).split("\n")[0] or type(error).__name__
    return f"{where} isn't YAML: {printable(why)}. Correct it."
