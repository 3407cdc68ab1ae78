"""The evidence of a chunk: rows, fingerprint, schema; and that of the chunks before it."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from ..chunk import ChunkFailed
from ..errors import DataflowError
from ..store.store import Store
from ..util.text import printable, typed
from .schema import ANY, MERGE, compare, fitted, literal, merged, quoted, schema_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation
    from pyspark.sql.types import DataType, StructField, StructType


ROWS, HIGH, LOW = "odf_rows", "odf_high", "odf_low"
OBSERVATION_SECONDS = 60.0
"""Seconds that Spark may take after a job to report observations: a lost event never arrives."""


class Evidence(NamedTuple):
    """What is known of a chunk's rows; `extra` has the values of the extra aggregates."""

    rows: int
    fingerprint: str
    schema: str
    extra: Mapping[str, Any] = {}


class IncompleteObservation(DataflowError):
    """What Spark observed differs from what was written."""


class Observed:
    """What a frame's first action saw of its rows: call it after that action."""

    def __init__(self, frame: "DataFrame", observation: "Observation", schema: str) -> None:
        self._frame, self._observation, self._schema = frame, observation, schema

    def __call__(self, rows: int | None = None) -> Evidence:
        """Return the evidence, once Spark has it; pass `rows`, the count of what was written.

        After a failed job, or repeated tasks, Spark reports only part of the rows, or some of them
        twice. Spark doesn't say so: only a different count shows it.
        """
        # Callers count what was written from the files' footers: that is what was stored, while
        # Spark adds up all that its tasks saw, including repeated ones.
        values = self.aggregates()
        seen = values.get(ROWS)
        if rows is None and seen == 0 and not self._frame.isEmpty():
            rows = -1
        if seen is None or (rows is not None and rows != seen):
            saw = "nothing" if seen is None else f"{seen:,} rows"
            there = "others were written" if rows is None or rows < 0 else f"{rows:,} were written"
            raise IncompleteObservation(
                f"Spark observed {saw} of this chunk, but {there}: its job failed, or repeated "
                "tasks. No evidence was recorded: run the chunk again."
            )
        return _evidence(values, self._schema)

    def aggregates(self) -> dict[str, Any]:
        """Return the aggregates that Spark reported; empty if it lost them."""
        from pyspark.errors import PySparkException

        # `Observation.get` waits forever for an event that Spark's listener bus may have dropped.
        # So we ask its future, which answers at once; Spark Connect has none.
        waiting = getattr(self._observation, "_jo", None)
        if waiting is not None:
            until, pause, future = time.monotonic() + OBSERVATION_SECONDS, 0.0005, waiting.future()
            while not future.isCompleted():
                if time.monotonic() > until:
                    raise DataflowError(
                        "Spark reported no observation of this chunk within "
                        f"{OBSERVATION_SECONDS:.0f} s: the chunk was never written, or Spark "
                        "dropped the event. Run the chunk again."
                    )
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
        try:
            return self._observation.get
        except PySparkException:
            return {}


def observed(df: "DataFrame", extra: Sequence[str] = ()) -> tuple["DataFrame", Observed]:
    """Return the frame, and what its first action observes; `extra` are aggregates with aliases.

    The fingerprint of more than 2^31 rows overflows, which Spark reports as an error.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    # `observe` collects the evidence in the pass that writes: counting afterwards would read the
    # chunk again, and before, compute it twice. A name of its own keeps threads of one session
    # apart.
    schema = df.schema
    observation = Observation(f"odf_{uuid4().hex}")
    frame = df.observe(observation, *map(F.expr, [*_aggregates(row_hash(schema)), *extra]))
    return frame, Observed(df, observation, schema_text(schema))


def evidence_of_frame(df: "DataFrame", extra: Sequence[str] = ()) -> Evidence:
    """Return the evidence of a frame's rows, in a pass of its own."""
    from pyspark.sql import functions as F

    schema = df.schema
    values = df.agg(*map(F.expr, [*_aggregates(row_hash(schema)), *extra])).collect()[0]
    return _evidence(values.asDict(recursive=False), schema_text(schema))


def evidence_by_group(
    df: "DataFrame", column: str, extra: Sequence[str] = ()
) -> dict[str, Evidence]:
    """Return the evidence of each chunk in a frame of many, by the column with the dataid."""
    from pyspark.sql import functions as F

    kept = [field for field in df.schema.fields if field.name != column]
    schema = schema_text(type(df.schema)(kept))
    aggregates = [*_aggregates(row_hash(df.schema, without=[column])), *extra]
    key = F.expr(f"{quoted(column)} as odf_key")
    rows = df.groupBy(key).agg(*map(F.expr, aggregates)).collect()
    values = [row.asDict(recursive=False) for row in rows]
    return {str(value.pop("odf_key")): _evidence(value, schema) for value in values}


def _aggregates(hash_of_row: str) -> list[str]:
    """Return the count of rows, and the sum of their hashes in two halves of 32 bits.

    In ANSI mode, Spark's default, a sum beyond 64 bits is an error, not a wrap-around. The sums of
    halves overflow only beyond 2^31 rows. Python combines them, modulo 2^64.
    """
    return [
        f"count(1) as {ROWS}",
        f"sum(shiftright({hash_of_row}, 32)) as {HIGH}",
        f"sum({hash_of_row} & 4294967295L) as {LOW}",
    ]


def _evidence(values: Mapping[str, Any], schema: str) -> Evidence:
    rows = values[ROWS]
    total = ((values[HIGH] or 0) << 32) + (values[LOW] or 0)
    others = {name: value for name, value in values.items() if name not in (ROWS, HIGH, LOW)}
    return Evidence(rows, f"{rows}-{total % 2**64:016x}", schema, others)


# --- the hash of a row, equal however the row is stored ---


VALUE_END = "5138008317640127543L"
"""Hashed after each value: Spark's hash skips a NULL, and (NULL, 'a') would equal ('a', NULL).

A number that no data has. Booleans for NULLs would do, too, but planning a chunk of usual size
costs more than hashing it: the number of expressions matters most.
"""


def row_hash(schema: "StructType", without: Iterable[str] = ()) -> str:
    """Return an expression for 64 bits of a row, its columns' names, and their kinds.

    The order of the columns doesn't matter.
    """
    left_out, names = set(without), count()
    fields = sorted(
        (field for field in schema.fields if field.name not in left_out),
        key=lambda field: (field.name.casefold(), field.name),
    )
    parts = (
        part
        for field in fields
        for part in _parts(quoted(field.name), field.dataType, field.nullable, names)
    )
    return _hash([f"{_number(columns(fields))}L", *parts])


def columns(fields: "Iterable[StructField]") -> str:
    """Return the names and kinds of columns, equal however they are stored.

    Without them, 1.23, 12.3 and 123 would hash alike: Spark hashes a decimal without its scale.
    Databases fold the case of names.
    """
    return ",".join(f"{quoted(field.name.casefold())}:{_kind(field.dataType)}" for field in fields)


def _number(text: str) -> int:
    """Return 64 bits of a text, as Spark computes them."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


_SAME_HASH_KINDS = {
    "byte": "int",
    "short": "int",
    "integer": "int",
    "char": "string",
    "varchar": "string",
}
"""Types whose values hash alike, and which a place may store as each other."""


def _kind(type: "DataType") -> str:
    from pyspark.sql import types

    match type:
        case types.StructType():
            return f"struct<{columns(type.fields)}>"
        case types.ArrayType():
            return f"array<{_kind(type.elementType)}>"
        case types.MapType():
            return f"map<{_kind(type.keyType)},{_kind(type.valueType)}>"
        case types.DecimalType():
            return f"decimal({type.scale})"
        case types.StringType():
            return "string"
        case types.UserDefinedType():
            return _kind(type.sqlType())
        case _:
            name = type.typeName().partition("(")[0]
            return _SAME_HASH_KINDS.get(name, name)


def _hash(parts: Iterable[str]) -> str:
    return f"xxhash64({', '.join(parts)})"


def _parts(sql: str, kind: "DataType", nullable: bool, names: Iterator[int]) -> list[str]:
    """Return what is hashed of a value, by its type alone: read back from a file, all may be NULL.

    No two values give the same sequence, and none gives the beginning of another's.
    """
    from pyspark.sql import types

    match kind:
        case types.NullType():
            return [VALUE_END]
        case types.StructType():
            parts = [f"{sql} is null" if nullable else "false"]
            for member in kind.fields:
                # Not `a`.`b`: for a frame with the alias `a`, that would be the column `b`.
                field = f"{sql}[{literal(member.name)}]"
                parts += _parts(field, member.dataType, nullable or member.nullable, names)
            return parts
        case types.MapType():
            entry = f"e{next(names)}"
            key = _parts(f"{entry}['key']", kind.keyType, False, names)
            value = _parts(f"{entry}['value']", kind.valueType, True, names)
            hashes = f"transform(map_entries({sql}), {entry} -> {_hash(key + value)})"
            # Sorted, since the order of a map's entries has no meaning.
            return [_size(sql), f"sort_array({hashes})"]
        case types.ArrayType() if _plain(kind.elementType):
            # All elements at once, not one by one: fast for ordinary arrays. It skips NULL
            # elements, so their positions are hashed separately.
            element, gaps = f"e{next(names)}", "0L"
            if kind.containsNull:
                where = f"{element} -> {element} is null"
                gaps = f"if(exists({sql}, {where}), xxhash64(transform({sql}, {where})), 0L)"
            return [_size(sql), f"xxhash64({_leaf(sql, kind.elementType)})", gaps]
        case types.ArrayType():
            element = f"e{next(names)}"
            inner = _hash(_parts(element, kind.elementType, True, names))
            return [_size(sql), f"transform({sql}, {element} -> {inner})"]
        case types.VariantType():
            # Its text has no types: a date looks like a string.
            return [f"to_json({sql})", f"schema_of_variant({sql})", VALUE_END]
        case _:
            return [_leaf(sql, kind), VALUE_END]


def _size(sql: str) -> str:
    """Without it, [1, 2] beside [3] would hash like [1] beside [2, 3]; for NULL it is always -1."""
    return f"coalesce(size({sql}), -1)"


def _plain(kind: "DataType") -> bool:
    """Whether an array of this type can be hashed at once."""
    from pyspark.sql import types

    nested = (types.StructType, types.MapType, types.ArrayType, types.VariantType, types.NullType)
    return not isinstance(kind, nested) and _leaf("x", kind) == "x"


def _leaf(sql: str, kind: "DataType") -> str:
    from pyspark.sql import types

    if isinstance(kind, types.StringType) and not kind.isUTF8BinaryCollation():
        return f"({sql} collate UTF8_BINARY)"  # otherwise 'a' may equal 'A', by the collation
    if kind.typeName() in ("geometry", "geography"):
        return f"st_asbinary({sql})"
    return sql


# --- the last published chunks of a dataset, with which the next one is compared ---

REMEMBERED_CHUNKS = 5
"""Chunks whose row counts predict the next one's."""


class LastChunks:
    """The chunks of a dataset that were published last: read once, then followed by all threads."""

    def __init__(self, store: Store, datasetid: str) -> None:
        self._store, self.datasetid = store, datasetid
        self._rows: dict[str, int] = {}
        self._schema: tuple[str, str] | None = None
        self._read = False
        self._lock = threading.RLock()

    def rows(self, dataid: str) -> list[int]:
        """Return how many rows the last chunks had, except this one."""
        with self._lock:
            self._begin(dataid)
            return [rows for other, rows in self._rows.items() if other != dataid][
                -REMEMBERED_CHUNKS:
            ]

    def schema(self, dataid: str) -> tuple[str, str] | None:
        """Return the last chunk, except this one, and its schema."""
        with self._lock:
            self._begin(dataid)
            last = self._schema
        return last if last and last[0] != dataid else self._older(dataid)

    @contextmanager
    def next(self, dataid: str, evidence: Evidence, check: Callable[[], None]) -> Iterator[None]:
        """Count a chunk that passes `check` as the last one, for all threads, while it is shown.

        If the block raises, this is undone. If it were added only afterwards, two chunks that are
        shown at once would both be compared with the one before.
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
        self._rows = dict(reversed(found))
        self._schema = self._older(dataid)
        self._read = True

    def _older(self, dataid: str) -> tuple[str, str] | None:
        return next(iter(self._ask("produce.last_schema", dataid)), None)

    def _ask(self, name: str, dataid: str, **more: Any) -> list[Any]:
        known = {"datasetid": self.datasetid, "dataid": dataid, **more}
        return self._store.db.fetch(name, **known)


# --- does a new chunk have the schema of its dataset? ---


def fit(df: "DataFrame", last: LastChunks, dataid: str, rule: str, declared: str) -> "DataFrame":
    """Return the frame, or raise `ChunkFailed` if its columns aren't those of the last chunk.

    `rule` says what to do then; `declared` shows how a rule is declared, with a `{}` for it.
    """
    schema = _wanted(schema_text(df.schema), last, dataid, rule, declared)
    return df if schema is None else fitted(df, schema)


def confirm(
    schema: str, last: LastChunks, dataid: str, rule: str, declared: str, *, jobid: str
) -> None:
    """Raise `ChunkFailed` if the schema that a chunk was written with isn't right any more."""
    both = _wanted(schema, last, dataid, rule, declared)
    if both is not None and compare(both, schema):
        was = last.schema(dataid)
        raise ChunkFailed(
            f"NOT_VALIDATED: while this chunk of {last.datasetid!r} was produced, chunk "
            f"{printable(was[0] if was else '')!r} was published with other columns."
            f" Produce it again: odf resubmit {typed(jobid, dataid)}"
        )


def _wanted(schema: str, last: LastChunks, dataid: str, rule: str, declared: str) -> str | None:
    """Return the schema that a chunk has to get; None if its own will do."""
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
        f"NOT_VALIDATED: the schema of {difference}. If that is intended: "
        f"{declared.format(MERGE)}, "
        f'or "{ANY}".'
    )
