"""Reads CSV and JSON files that Spark didn't write: as declared, or like the chunk before."""

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Refused
from ..formats import format_of
from ..formats.csv_options import CsvOptions, refuse_undecodable
from ..formats.format import data_files
from ..store.store import Store
from ..util.text import printable
from .schema import compare, merged, quoted, schema_of, schema_text, type_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


CHARSETS = ("utf-8", "utf-16", "utf-16be", "utf-16le", "utf-32", "iso-8859-1", "us-ascii")
"""The encodings that Spark reads by default."""


class KnownSchema(NamedTuple):
    """The schema that the chunks of a dataset have had so far; each that is read tells its own."""

    store: Store
    datasetid: str
    dataid: str
    generation: int | None

    def last(self) -> tuple[str, str] | None:
        """The last chunk but this one, and its schema."""
        db, asked = self.store.db, {"datasetid": self.datasetid, "dataid": self.dataid}
        rows, _ = db.insist(lambda: db.run("produce.known_schema", **asked))
        return next(iter(rows), None)

    def keep(self, schema: "StructType") -> None:
        """Remember with which schema this chunk was read, for those that come."""
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
    """Texts of which no note tells: a row that isn't like the others is an error, not NULL.

    Of CSV that is seen when the rows are read, of JSON now. `pattern` is how Spark knows the path.
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
        what = "a first line with the names of its columns" if format.is_delimited else "rows"
        raise Refused(
            f"{path} is empty, so there is nothing to tell its columns by. Give it {what}.",
            code="INVALID_LOCATION",
        )
    schema = _declared(frame, options)
    if format.is_delimited and known and not options.schema and options.strings is not True:
        schema = _as_before(frame, schema, path, options, known)
    return frame if schema == frame.schema else reader.schema(schema).load(pattern)


def csv_reader_options(spark: "SparkSession", options: CsvOptions) -> dict[str, str]:
    """What Spark's reader of CSV is told of how a file is written."""
    reader_options = options.for_spark()
    if reader_options.get("encoding", "utf-8") not in CHARSETS:
        spark.conf.set("spark.sql.legacy.javaCharsets", "true")  # else it refuses all others
    return reader_options


def _load(reader: Any, path: str, pattern: str) -> "DataFrame":
    try:
        frame = reader.load(pattern)
        _ = frame.columns
    except Exception as error:
        if "MALFORMED_RECORD" in str(error) or "INVALID_JSON_RECORD_TYPE" in str(error):
            raise Refused(
                f"{path} has a line that isn't an object of JSON: each line has to be one whole "
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
                f"has the columns {', '.join(names)}, and another file of "
                f"the chunk has {', '.join(first)}",
            )
        first = first or names or None


def _declared(frame: "DataFrame", options: CsvOptions) -> "StructType":
    """The frame's schema, with the types that are declared."""
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
    """The schema with the types of the last chunk, in the order of the file."""
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
    """Whether all values of a column, as they look, are of the type that it had before."""
    now, before = type_text(field.dataType), type_text(was)
    if now == before or before == "string":
        return True
    one, other = schema_text(_only(was)), schema_text(_only(field.dataType))
    if merged(one, other) == one:
        return True
    # A column without any value looks like texts.
    return now == "string" and frame.where(frame[quoted(field.name)].isNotNull()).isEmpty()


def _only(kind: Any) -> "StructType":
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField("c", kind)])
