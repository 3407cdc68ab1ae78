"""The files of a chunk, as Spark writes and reads them; and CSV and JSON that others wrote."""

import csv
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Refused, WrongUse
from ..formats import Format, format_of, format_of_file
from ..formats.csv_options import UNDECLARED, CsvOptions, refuse_undecodable
from ..formats.format import LossyValue, data_files
from ..storage import folder
from ..store.store import Store
from ..util.text import printable
from .evidence import Evidence
from .progress import ending
from .schema import compare, literal, merged, quoted, schema_of, schema_text, type_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType


# Reads CSV and JSON files that Spark didn't write: as declared, or like the chunk before.


CHARSETS = ("utf-8", "utf-16", "utf-16be", "utf-16le", "utf-32", "iso-8859-1", "us-ascii")
"""The encodings that Spark reads by default."""


class KnownSchema(NamedTuple):
    """The schema that a dataset's chunks have had so far; each chunk that is read adds its own."""

    store: Store
    datasetid: str
    dataid: str
    generation: int | None

    def last(self) -> tuple[str, str] | None:
        """The last chunk but this one, and its schema."""
        db, asked = self.store.db, {"datasetid": self.datasetid, "dataid": self.dataid}
        rows = db.fetch("produce.known_schema", **asked)
        return next(iter(rows), None)

    def keep(self, schema: "StructType") -> None:
        """Remember this chunk's schema, for later ones."""
        db, text = self.store.db, schema_text(schema)
        db.insist(
            lambda: db.change(
                "produce.note_schema",
                datasetid=self.datasetid,
                dataid=self.dataid,
                generation=self.generation or 0,
                schema=text,
            )
        )


def read_foreign_files(
    spark: "SparkSession",
    reader: Any,
    path: str,
    pattern: str,
    kind: str,
    options: CsvOptions,
    known: KnownSchema | None,
) -> "DataFrame":
    """Read text files without a note: a row that differs from the others is an error, not NULL.

    For CSV, the rows are checked when they are read; for JSON, now. `pattern` is Spark's path.
    """
    format = format_of(kind)
    if format.is_delimited:
        _check(path, options)
        reader = reader.options(**csv_reader_options(spark, options))
        if options.null is not None:
            reader = reader.option("nullValue", options.null)
    else:
        for file in data_files(path):
            refuse_undecodable(file, "utf-8")
    reader = reader.options(mode="FAILFAST", columnPruning="false")
    frame = _load(reader, path, pattern)
    if not frame.columns:
        what = "a header line" if format.is_delimited else "rows"
        raise Refused(
            f"{path} is empty, so its columns aren't known. Give it {what}.",
            code="INVALID_LOCATION",
        )
    schema = _declared(frame, options)
    if format.is_delimited and known and not options.schema and options.strings is not True:
        schema = _as_before(frame, schema, path, options, known)
    return frame if schema == frame.schema else reader.schema(schema).load(pattern)


def csv_reader_options(spark: "SparkSession", options: CsvOptions) -> dict[str, str]:
    """Return the options for Spark's CSV reader, given how a file is written."""
    reader_options = options.for_spark()
    if reader_options.get("encoding", "utf-8") not in CHARSETS:
        spark.conf.set("spark.sql.legacy.javaCharsets", "true")  # otherwise it refuses all others
    return reader_options


def _load(reader: Any, path: str, pattern: str) -> "DataFrame":
    try:
        frame = reader.load(pattern)
        _ = frame.columns
    except Exception as error:
        if "MALFORMED_RECORD" in str(error) or "INVALID_JSON_RECORD_TYPE" in str(error):
            raise Refused(
                f"{path} has a line that isn't a JSON object: each line has to be one complete "
                "row. Correct the file.",
                code="INVALID_LOCATION",
            ) from error
        raise
    return frame


def _check(path: str, options: CsvOptions) -> None:
    """Refuse files that aren't as declared, or that differ in their columns."""
    first: list[str] | None = None
    for file in data_files(path):
        names = options.checked(file)
        if first is not None and names and names != first:
            raise options.refused(
                file,
                f"has the columns {', '.join(names)}, but another file of "
                f"the chunk has {', '.join(first)}",
            )
        first = first or names or None


def _declared(frame: "DataFrame", options: CsvOptions) -> "StructType":
    """Return the frame's schema, with the declared types."""
    from pyspark.sql.types import StructField, StructType

    names = frame.columns if options.header else list(options.schema)
    kinds = options.kinds(names)
    types = [
        schema_of(f"{quoted(name)}:{kinds[name]}")[0].dataType if name in kinds else each.dataType
        for name, each in zip(names, frame.schema.fields, strict=True)
    ]
    fields = zip(names, types, strict=True)
    return StructType([StructField(name, each) for name, each in fields])


def _as_before(
    frame: "DataFrame", schema: "StructType", path: str, options: CsvOptions, known: KnownSchema
) -> "StructType":
    """Return the schema with the types of the last chunk, in the order of the file."""
    from pyspark.sql.types import StructField, StructType

    last = known.last()
    if last is not None:
        kinds = {field.name: field.dataType for field in schema_of(last[1]).fields}
        declared = options.kinds(schema.names)
        fields, wrong = [], []
        for field in schema.fields:
            was = kinds.get(field.name)
            if was is None or field.name in declared or _fits(frame, field, was):
                kind = field.dataType if was is None or field.name in declared else was
                fields.append(StructField(field.name, kind))
            else:
                fields.append(field)
                wrong.append(field.name)
        schema = StructType(fields)
        before = StructType(
            [StructField(name, kind) for name, kind in kinds.items() if name not in declared]
        )
        now = StructType([field for field in schema.fields if field.name not in declared])
        if differences := compare(schema_text(before), schema_text(now)):
            better: dict[str, Any] = {"strings": wrong} if wrong else {}
            raise options.refused(
                path,
                f"differs from chunk {printable(last[0])!r} of {options.datasetid!r}, which "
                f"was read before: {'; '.join(differences)}",
                **better,
            )
    known.keep(schema)
    return schema


def _fits(frame: "DataFrame", field: Any, was: Any) -> bool:
    """Whether all values of a column look like the type that it had before."""
    now, before = type_text(field.dataType), type_text(was)
    if now == before or before == "string":
        return True
    one, other = schema_text(_only(was)), schema_text(_only(field.dataType))
    if merged(one, other) == one:
        return True
    # A column without any value looks like strings.
    return now == "string" and frame.where(frame[quoted(field.name)].isNotNull()).isEmpty()


def _only(kind: Any) -> "StructType":
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField("c", kind)])


def read_files(
    spark: "SparkSession",
    path: str,
    note: Mapping[str, Any],
    format: str,
    options: CsvOptions = UNDECLARED,
    known: KnownSchema | None = None,
) -> "DataFrame":
    """Read the files of one chunk: with the schema of its note, or as Spark finds it."""
    kind = note.get("format") or format_of_file(path, format).name
    found = spark_format(kind)
    reader = spark.read.format(kind).options(**_reader_options(kind, path, note))
    if schema := noted_schema(note):
        reader = reader.schema(schema if found.has_collations else without_collations(schema))
        return restored(reader.load(escaped_path(path)), schema, kind)
    if os.path.isdir(path) and not data_files(path):
        raise Refused(
            f"{path} has no files, so its columns aren't known. Let the job "
            "write an empty frame instead: it keeps the columns.",
            code="INVALID_LOCATION",
        )
    if found.is_text and (columns := note.get("columns")):
        schema = _as_pandas_had(reader, path, found, columns)
        if found.is_delimited and len(columns) == 1 and _has_empty_lines(path):
            rows = folder.read_table(path, kind, columns)
            return spark.createDataFrame(rows, schema)  # pyright: ignore
        reader = reader.schema(schema)
    elif found.is_text:
        return read_foreign_files(spark, reader, path, escaped_path(path), kind, options, known)
    return reader.load(escaped_path(path))


def _has_empty_lines(path: str) -> bool:
    """Whether a row of one column has no value: Spark skips its line."""
    for each in data_files(path):
        with open(each, "rb") as file:
            if b"\n" in file:
                return True
    return False


def _as_pandas_had(reader: Any, path: str, format: Format, columns: Mapping[str, str]) -> Any:
    """Return the schema of a pandas frame from its dtypes: in a text file, 007 may be a number.

    For what dtypes don't say, Spark looks into the file.
    """
    from pyspark.sql.types import StringType, StructType

    columns = format.dtypes(data_files(path), columns)
    types = {name: _DTYPES.get(dtype.partition("[")[0]) for name, dtype in columns.items()}
    types |= {name: "timestamp" for name, dtype in columns.items() if "," in dtype}  # with its zone
    if not format.is_delimited:  # an object may be a list there
        types = {name: None if columns[name] == "object" else each for name, each in types.items()}
    inferred = {}
    if None in types.values():
        inferred = {field.name: field.dataType for field in reader.load(escaped_path(path)).schema}
    schema = StructType()
    for name, each in types.items():
        schema.add(name, each or inferred.get(name, StringType()))
    return schema


_DTYPES = {
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "Int64": "long",
    "float32": "float",
    "float64": "double",
    "bool": "boolean",
    "boolean": "boolean",
    "object": "string",
    "string": "string",
    "datetime64": "timestamp_ntz",
}
"""A pandas dtype, and the Spark type of its values in a text file."""


def noted_schema(note: Mapping[str, Any]) -> Any:
    """Return the schema that Spark wrote a chunk with, if its note has it."""
    from pyspark.sql.types import StructType

    schema = note.get("schema")
    # From a copy: the parser removes the collations' providers from its argument.
    return StructType.fromJson(deepcopy(schema)) if isinstance(schema, dict) else None


def escaped_path(path: str) -> str:
    """Return a path in which Spark sees no pattern."""
    return "".join(f"\\{each}" if each in "{}[]*?\\" else each for each in path)


def _reader_options(kind: str, path: str, note: Mapping[str, Any]) -> dict[str, str]:
    format = format_of(kind)
    options = dict(format.spark_reading)
    if format.is_delimited:
        options["multiLine"] = str(is_read_whole(path, note)).lower()
        if noted_schema(note) is None:
            options["inferSchema"] = "true"
    return options


def spark_format(name: str) -> Format:
    """Return the format of a name, if Spark reads and writes it."""
    format = format_of(name)
    if not format.in_spark:
        raise Refused(
            f"Spark has no format {name!r}. Use a pandas DataFrame instead, or register the "
            "dataset with --format parquet.",
            code="INVALID_LOCATION",
        )
    return format


def write_files(df: "DataFrame", path: str, format: str, by: str | None = None) -> None:
    """Write a frame's files into an empty directory; of many chunks, split by their column."""
    found = spark_format(format)
    found.refuse_schema(df.schema.jsonValue())
    writer = storable(df, format).write.format(format).mode("append")
    writer = writer.options(**found.spark_writing)
    with ending(df.sparkSession):
        (writer.partitionBy(by) if by else writer).save(path)


def remove_markers(path: str) -> int:
    """Remove what Spark leaves beside the data; return the bytes of the data."""
    total = 0
    for above, folders, names in os.walk(path):
        for name in names:
            each = os.path.join(above, name)
            if name == "_SUCCESS" or (name.startswith(".") and name.endswith(".crc")):
                os.unlink(each)
            elif name[0] not in "_.":
                total += os.path.getsize(each)
        if "_temporary" in folders:
            shutil.rmtree(os.path.join(above, "_temporary"), ignore_errors=True)
            folders.remove("_temporary")
    return total


def count_rows(path: str, format: str) -> int | None:
    """Return how many rows a chunk's files have; None: a text file would have to be read whole."""
    kind, total = format_of(format), 0
    for file in data_files(path):
        if kind.is_text and os.path.getsize(file) > WHOLE_FILE_BYTES:
            return None
        rows = kind.count(file)
        if rows is None:
            return None
        total += rows
    return total


# What CSV, JSON and ORC can't hold: refused, counted, or written in another way.


def storable(df: "DataFrame", format: str) -> "DataFrame":
    """Return the frame as a format stores it, perhaps without its collations."""
    return df if format_of(format).has_collations else _cast(df, without_collations(df.schema))


def restored(df: "DataFrame", schema: "StructType", format: str) -> "DataFrame":
    """Return the written frame, from what the format stored."""
    return df if format_of(format).has_collations else _cast(df, schema)


def without_collations(kind: Any) -> Any:
    """Return a type whose strings have no collation."""
    from pyspark.sql import types

    return retyped(
        kind, lambda leaf: types.StringType() if isinstance(leaf, types.StringType) else leaf
    )


def retyped(kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a type in which `change` was applied to each type that holds no others."""
    from pyspark.sql import types

    def inner(kind: Any) -> Any:
        return retyped(kind, change)

    match kind:
        case types.StructType():
            return types.StructType(
                [
                    types.StructField(
                        field.name, inner(field.dataType), field.nullable, field.metadata
                    )
                    for field in kind.fields
                ]
            )
        case types.ArrayType():
            return types.ArrayType(inner(kind.elementType), kind.containsNull)
        case types.MapType():
            return types.MapType(inner(kind.keyType), inner(kind.valueType), kind.valueContainsNull)
        case _:
            return change(kind)


def _cast(df: "DataFrame", schema: "StructType") -> "DataFrame":
    from pyspark.sql import functions as F

    if without_collations(schema) == schema and without_collations(df.schema) == df.schema:
        return df
    wanted = schema_of(schema_text(schema))  # all parts may be NULL, as in a file
    return df.select(
        *(
            F.col(quoted(field.name)).cast(field.dataType).alias(field.name)
            for field in wanted.fields
        )
    )


# --- rows of CSV with line breaks: one task has to read the whole file ---


WHOLE_FILE_BYTES = 64 * 2**20
"""Bytes of a text file that one task may read, so that a value may have several lines."""

LINES, NULLS = "odf_lines", "odf_nothing"
_BLOCK_BYTES = 2**20


def line_aggregates(schema: "StructType", format: str) -> list[str]:
    """Return the aggregates, computed during a write, that say how to read the files."""
    from pyspark.sql import types

    if not format_of(format).is_delimited:
        return []
    kinds = (types.StringType, types.CharType, types.VarcharType)
    texts = [
        f"({quoted(field.name)} collate UTF8_BINARY)"
        for field in schema.fields
        if isinstance(field.dataType, kinds)
    ]
    found = []
    if texts:
        text = f"concat_ws('', {', '.join(texts)})"
        breaks = " or ".join(f"contains({text}, chr({each}))" for each in (10, 13))
        found.append(f"count_if({breaks}) as {LINES}")
    if len(schema.fields) == 1:
        found.append(f"count_if({quoted(schema.fields[0].name)} is null) as {NULLS}")
    return found


def line_note(evidence: Evidence, schema: "StructType", format: str) -> dict[str, Any]:
    """Return what a chunk's note says about it; a frame whose rows CSV would lose is refused."""
    if not format_of(format).is_delimited:
        return {}
    if evidence.extra.get(NULLS):
        raise WrongUse(
            f"In CSV, a row without a value is an empty line, which Spark skips: the only "
            f"column {schema.names[0]!r} is NULL in {evidence.extra[NULLS]:,} of {evidence.rows:,} "
            "rows. Return another column beside it, or register the dataset with --format parquet."
        )
    if len(schema.fields) == 1:  # a blank string would be a blank line, which tasks skip
        return {"lines": True}
    named = any(each in name for name in schema.names for each in "\r\n")
    return {"lines": named or bool(evidence.extra.get(LINES))}


def is_read_whole(path: str, note: Mapping[str, Any]) -> bool:
    """Whether one task has to read a whole CSV file: always correct, but slow for a large one.

    Files that others wrote are checked: tasks would take a line within quotes for a row.
    """
    if (note.get("bytes") or WHOLE_FILE_BYTES + 1) <= WHOLE_FILE_BYTES:
        return True
    if isinstance(lines := note.get("lines"), bool):
        return lines
    if not os.path.exists(path):  # it isn't on this machine
        return True
    found = data_files(path)
    return all(os.path.getsize(each) <= WHOLE_FILE_BYTES for each in found) or any(
        map(_has_lines, found)
    )


def _has_lines(path: str) -> bool:
    """Whether a row may span lines, or its line ends aren't those that Spark's tasks recognize."""
    quotes, ends = _marks(path)
    if not ends:
        return True
    with open(path, encoding="latin-1", newline="") as file:  # bytes, unchanged
        rows = csv.reader(file, strict=True)
        try:
            if len(next(rows, [])) < 2:  # in a single column, a blank string is a blank line
                return True
            return quotes and any(rows.line_num != at for at, _ in enumerate(rows, 2))
        except csv.Error:  # wrong quotes, or one that doesn't end
            return True


def _marks(path: str) -> tuple[bool, bool]:
    """Whether a file has quotes, and whether all its lines end alike, with `\\n` or `\\r\\n`."""
    quotes, lines, returns, both, last = False, 0, 0, 0, b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            quotes = quotes or b'"' in block
            lines += block.count(b"\n")
            returns += block.count(b"\r")
            both += block.count(b"\r\n") + (last == b"\r" and block[:1] == b"\n")
            last = block[-1:]
    return quotes, not returns or returns == lines == both


# --- values that a format would change: counted while a frame is written ---


BROKEN = "odf_broken"


def loss_aggregates(schema: "StructType", format: str) -> list[str]:
    """Return the aggregate that counts, while a frame is written, rows with such a value."""
    broken = [sql for _, _, sql in _broken_of(schema, format)]
    return [f"count_if({' or '.join(broken)}) as {BROKEN}"] if broken else []


def refuse_lossy(evidence: Evidence, df: "DataFrame", format: str) -> None:
    """Refuse a frame that has such a value."""
    if not evidence.extra.get(BROKEN):
        return
    broken = _broken_of(df.schema, format)
    counts = df.selectExpr(*(f"count_if({sql})" for _, _, sql in broken)).collect()[0]
    found = ((name, rule, rows) for (name, rule, _), rows in zip(broken, counts, strict=True))
    name, rule, rows = next((each for each in found if each[2]), (*broken[0][:2], 0))
    raise WrongUse(
        f"Column {name!r} has {rows:,} {'row' if rows == 1 else 'rows'} with {rule.what}, which "
        f"{format_of(format).title} can't hold. {rule.cure.format(quoted(name))}, or register the "
        "dataset with --format parquet."
    )


def _broken_of(schema: "StructType", format: str) -> list[tuple[str, LossyValue, str]]:
    """Yield column, rule, and the condition for a row that breaks it."""
    names = count()
    found = [
        (field.name, rule, _broken(quoted(field.name), field.dataType, rule, names))
        for field in schema.fields
        for rule in format_of(format).lossy
    ]
    return [each for each in found if each[2]]


def _broken(sql: str, kind: "DataType", rule: LossyValue, names: Iterator[int]) -> str:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            fields = (
                _broken(f"{sql}[{literal(field.name)}]", field.dataType, rule, names)
                for field in kind.fields
            )
            return " or ".join(filter(None, fields))
        case types.ArrayType():
            element = f"t{next(names)}"
            inner = _broken(element, kind.elementType, rule, names)
            return inner and f"exists({sql}, {element} -> {inner})"
        case types.MapType():
            parts = {f"map_keys({sql})": kind.keyType, f"map_values({sql})": kind.valueType}
            found = (
                _broken(each, types.ArrayType(part), rule, names) for each, part in parts.items()
            )
            return " or ".join(filter(None, found))
        case _:
            is_of = kind.typeName().partition("(")[0] in rule.kinds
            return f"({rule.wrong.format(sql)})" if is_of else ""
