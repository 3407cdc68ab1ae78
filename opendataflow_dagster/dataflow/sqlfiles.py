"""The statements in `sql/`, by dialect and name."""

import os

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = os.path.join(_HERE, "sql")
ROOT = _INSTALLED if os.path.isdir(_INSTALLED) else os.path.join(os.path.dirname(_HERE), "sql")


def schema(dialect: str) -> str:
    """The script that creates or upgrades the tables of a dialect, and their triggers."""
    return "\n".join(
        _read(os.path.join(ROOT, dialect, name)) for name in ("schema.sql", "triggers.sql")
    )


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
