"""The statements in `sql/`, by dialect and name, and the versions of the tables."""

import os
from functools import cache
from typing import NamedTuple

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = os.path.join(_HERE, "sql")
ROOT = _INSTALLED if os.path.isdir(_INSTALLED) else os.path.join(os.path.dirname(_HERE), "sql")


class Migration(NamedTuple):
    """A file that brings tables of the version before to this one."""

    version: int
    name: str

    def text(self, dialect: str) -> str:
        return _read(os.path.join(ROOT, dialect, "migrations", self.name))


def schema(dialect: str) -> str:
    """The script that creates the tables of a dialect."""
    return _read(os.path.join(ROOT, dialect, "schema.sql"))


def triggers(dialect: str) -> str:
    """The script that creates functions, views and triggers of a dialect."""
    return _read(os.path.join(ROOT, dialect, "triggers.sql"))


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """The migrations of a dialect, in order; the first one starts from nothing."""
    names = sorted(os.listdir(os.path.join(ROOT, dialect, "migrations")))
    return tuple(
        Migration(int(name.partition("_")[0]), name) for name in names if name.endswith(".sql")
    )


def version(dialect: str) -> int:
    """The version of the tables that this program makes: its last migration's."""
    return migrations(dialect)[-1].version


def statements(dialect: str, topic: str) -> dict[str, str]:
    """The named statements of a topic: the shared ones, overridden by the dialect's own."""
    found: dict[str, str] = {}
    for folder in ("shared", dialect):
        path = os.path.join(ROOT, folder, topic + ".sql")
        if os.path.exists(path):
            found.update(_split(_read(path)))
    return found


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _split(text: str) -> dict[str, str]:
    found = {}
    for piece in text.split("-- name: ")[1:]:
        name, _, body = piece.partition("\n")
        found[name.strip()] = body.strip().rstrip(";")
    return found
