"""The last published chunk of a dataset, with which the next one is compared."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..chunk import ChunkFailed
from ..store.store import Store
from ..util.text import printable, typed
from .evidence import Evidence
from .job import ANY, MERGE
from .schema import compare, fitted, merged, schema_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


REMEMBERED_CHUNKS = 5
"""Chunks whose rows tell how many to expect."""


class LastChunks:
    """The chunks of a dataset that were published last: read once, then followed by all threads."""

    def __init__(self, store: Store, datasetid: str) -> None:
        self._store, self.datasetid = store, datasetid
        self._rows: dict[str, int] = {}
        self._schema: tuple[str, str] | None = None
        self._read = False
        self._lock = threading.RLock()

    def rows(self, dataid: str) -> list[int]:
        """How many rows the last chunks had, without this one."""
        with self._lock:
            self._begin(dataid)
            return [rows for each, rows in self._rows.items() if each != dataid][
                -REMEMBERED_CHUNKS:
            ]

    def schema(self, dataid: str) -> tuple[str, str] | None:
        """The last chunk, without this one, and its schema."""
        with self._lock:
            self._begin(dataid)
            last = self._schema
        return last if last and last[0] != dataid else self._older(dataid)

    @contextmanager
    def next(self, dataid: str, evidence: Evidence, check: Callable[[], None]) -> Iterator[None]:
        """Let a chunk that passes `check` be the last one, for all threads, while it is shown.

        If the block raises, it wasn't. Were it added only then, two chunks that are shown at once
        would both be compared with the one before.
        """
        with self._lock:
            self._begin(dataid)
            check()
            rows, schema = self._rows.get(dataid), self._schema
            mine = self._add(dataid, evidence)
        try:
            yield
        except BaseException:
            with self._lock:
                self._rows.pop(dataid, None)
                if rows is not None:
                    self._rows[dataid] = rows
                if self._schema is mine:
                    self._schema = schema
            raise

    def _add(self, dataid: str, evidence: Evidence) -> tuple[str, str]:
        self._rows.pop(dataid, None)
        self._rows[dataid] = evidence.rows
        while len(self._rows) > REMEMBERED_CHUNKS + 1:
            self._rows.pop(next(iter(self._rows)))
        self._schema = (dataid, evidence.schema)
        return self._schema

    def _begin(self, dataid: str) -> None:
        if self._read:
            return
        found = self._ask("produce.last_rows", dataid, most=REMEMBERED_CHUNKS)
        self._rows = {each: rows for each, rows in reversed(found)}
        self._schema = self._older(dataid)
        self._read = True

    def _older(self, dataid: str) -> tuple[str, str] | None:
        return next(iter(self._ask("produce.last_schema", dataid)), None)

    def _ask(self, name: str, dataid: str, **more: Any) -> list[Any]:
        known = {"datasetid": self.datasetid, "dataid": dataid, **more}
        return self._store.db.insist(lambda: self._store.db.run(name, **known))[0]


# --- does a new chunk have the schema of its dataset? ---


def fit(df: "DataFrame", last: LastChunks, dataid: str, rule: str, declared: str) -> "DataFrame":
    """The frame, or `ChunkFailed` if its columns aren't those of the last chunk.

    `rule` says what to do then; `declared`, how a rule is declared, with a `{}` for it.
    """
    schema = _wanted(schema_text(df.schema), last, dataid, rule, declared)
    return df if schema is None else fitted(df, schema)


def confirm(
    schema: str, last: LastChunks, dataid: str, rule: str, declared: str, *, jobid: str
) -> None:
    """`ChunkFailed` if a chunk that was written with this schema isn't right as it is any more."""
    both = _wanted(schema, last, dataid, rule, declared)
    if both is not None and compare(both, schema):
        was = last.schema(dataid)
        raise ChunkFailed(
            f"NOT_VALIDATED: while this chunk of {last.datasetid!r} was made, chunk "
            f"{printable(was[0] if was else '')!r} was published with columns that this one hasn't."
            f" Make it again: odf resubmit {typed(jobid, dataid)}"
        )


def _wanted(schema: str, last: LastChunks, dataid: str, rule: str, declared: str) -> str | None:
    """The schema that a chunk is to be given; None if its own will do."""
    if rule == ANY:
        return None
    was = last.schema(dataid)
    if was is None or not (differences := compare(was[1], schema)):
        return None
    differs = "; ".join(differences)
    difference = f"{last.datasetid!r} differs from its last chunk {printable(was[0])!r}: {differs}"
    if rule == MERGE:
        if (both := merged(was[1], schema)) is not None:
            return both
        raise ChunkFailed(f"NOT_VALIDATED: the schema of {difference}, which can't be merged.")
    raise ChunkFailed(
        f"NOT_VALIDATED: the schema of {difference}. If it is meant so: {declared.format(MERGE)}, "
        f'or "{ANY}".'
    )
