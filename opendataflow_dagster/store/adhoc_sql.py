"""A person's own SQL: the original's `sql` and `dml`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DataflowError, NoDatabase
from .store import Store


def select(store: Store, text: str) -> list[dict[str, Any]]:
    """The rows of a query; it can't change anything."""
    with _in_one_line(store), store.db.reading():
        rows, cursor = store.db.one(text)
        names = _distinct([column[0] for column in cursor.description or ()])
    return [dict(zip(names, row, strict=True)) for row in rows]


def change(store: Store, text: str, *, who: str) -> int:
    """How many rows a statement changed; history is signed with `who`."""
    with _in_one_line(store), store.db.transaction(who=who, why="odf dml"):
        _, cursor = store.db.one(text)
        return max(0, cursor.rowcount)


@contextmanager
def _in_one_line(store: Store) -> Iterator[None]:
    try:
        yield
    except (DataflowError, *store.db.failures) as error:
        cause = error.__cause__ if isinstance(error, DataflowError) else error
        if cause is None or "locked" in str(cause):
            raise
        line = str(cause).strip().partition("\n")[0].rstrip(".")
        raise DataflowError(
            f"The database refused the statement: {line}. {_advice(error, line)}"
        ) from None


def _advice(error: BaseException, line: str) -> str:
    if "readonly" in line or "read-only" in line:
        return "`odf sql` only reads; `odf dml` changes rows."
    if isinstance(error, NoDatabase):
        return "Correct it; if our tables are missing, run `odf init`."
    return "Correct it, and try again."


def _distinct(names: list[str]) -> list[str]:
    """Column names as keys: `id`, and `id_2` for another `id`."""
    return [
        name if name not in names[:at] else f"{name}_{names[:at].count(name) + 1}"
        for at, name in enumerate(names)
    ]
