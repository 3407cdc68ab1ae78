"""The statements in `sql/`, by dialect and name, and the versions of the tables."""

import os
import re
from functools import cache

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = os.path.join(_HERE, "sql")
ROOT = _INSTALLED if os.path.isdir(_INSTALLED) else os.path.join(os.path.dirname(_HERE), "sql")


def schema(dialect: str) -> str:
    """The script that creates the tables of a dialect."""
    return read(os.path.join(ROOT, dialect, "schema.sql"))


def triggers(dialect: str) -> str:
    """The script that creates functions, views and triggers of a dialect."""
    return read(os.path.join(ROOT, dialect, "triggers.sql"))


@cache
def names(dialect: str) -> frozenset[str]:
    """The tables, sequences, views and functions that a dialect's scripts create."""
    created = (
        r"(?m)^create (?:or replace )?(?:table|sequence|view|function) (?:if not exists )?(\w+)"
    )
    return frozenset(re.findall(created, schema(dialect) + triggers(dialect)))


@cache
def migrations(dialect: str) -> dict[int, str]:
    """The migrations of a dialect in order: the version that each makes, and its file."""
    folder = os.path.join(ROOT, dialect, "migrations")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".sql"))
    return {int(name.partition("_")[0]): os.path.join(folder, name) for name in names}


def version(dialect: str) -> int:
    """The version of the tables that this program makes: its last migration's."""
    return max(migrations(dialect))


def statements(dialect: str, topic: str) -> dict[str, str]:
    """The named statements of a topic: the shared ones, overridden by the dialect's own."""
    found: dict[str, str] = {}
    for folder in ("shared", dialect):
        path = os.path.join(ROOT, folder, topic + ".sql")
        if os.path.exists(path):
            found.update(_split(read(path)))
    return found


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _split(text: str) -> dict[str, str]:
    found = {}
    for piece in text.split("-- name: ")[1:]:
        name, _, body = piece.partition("\n")
        found[name.strip()] = body.strip().rstrip(";")
    return found
