"""The chunks of a dataset that were published last: how many rows they had, and their schema."""

from typing import Any

from ..dataflow.store import Store
from .evidence import Evidence

LAST = 5
"""Chunks whose rows tell how many to expect."""


class Last:
    """The chunks of a dataset that were published last: read once, then followed."""

    def __init__(self, store: Store, datasetid: str) -> None:
        self._store, self.datasetid = store, datasetid
        self._rows: dict[str, int] | None = None
        self._schema: tuple[str, str] | None = None
        self._read = False

    def rows(self, dataid: str) -> list[int]:
        """How many rows the last chunks had, without this one."""
        self._begin(dataid)
        return [rows for each, rows in (self._rows or {}).items() if each != dataid][-LAST:]

    def schema(self, dataid: str) -> tuple[str, str] | None:
        """The last chunk, without this one, and its schema."""
        self._begin(dataid)
        return self._schema if self._schema and self._schema[0] != dataid else self._older(dataid)

    def add(self, dataid: str, evidence: Evidence) -> None:
        self._begin(dataid)
        rows = self._rows if self._rows is not None else {}
        rows.pop(dataid, None)
        rows[dataid] = evidence.rows
        while len(rows) > LAST + 1:
            rows.pop(next(iter(rows)))
        self._schema = (dataid, evidence.schema)

    def _begin(self, dataid: str) -> None:
        if self._read:
            return
        found = self._ask("produce.last_rows", dataid, most=LAST)
        self._rows = {each: rows for each, rows in reversed(found)}
        self._schema = self._older(dataid)
        self._read = True

    def _older(self, dataid: str) -> tuple[str, str] | None:
        return next(iter(self._ask("produce.last_schema", dataid)), None)

    def _ask(self, name: str, dataid: str, **more: Any) -> list[Any]:
        known = {"datasetid": self.datasetid, "dataid": dataid, **more}
        return self._store.db.insist(lambda: self._store.db.run(name, **known))[0]
