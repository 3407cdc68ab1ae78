"""The files of a chunk: a frame as Parquet, CSV or JSON lines, bytes, or files that are there."""

import base64
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from errno import ENOENT
from pathlib import Path
from typing import Any

from ..errors import Refused, WrongUse, what_installs
from ..location import FORMATS
from ..store.csv_options import UNDECLARED, CsvOptions, read_pandas, refuse_undecodable
from . import csv_types

SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def write(obj: Any, folder: str, format: str) -> dict[str, Any]:
    """Write an object into an empty folder; what it says of it: rows, bytes, format, columns.

    A frame's index becomes columns if it has a name, and is left out if it hasn't.
    """
    told: dict[str, Any] = {"format": format}
    path = new_file(folder, f".{format}")
    if isinstance(obj, bytes):
        with open(path, "wb") as file:
            file.write(obj)
    elif isinstance(obj, Path):
        _copy(obj, folder)
    else:
        told["columns"] = columns_of(obj) if is_frame(obj) else {}
        if is_frame(obj) and format == "csv":
            obj, told["columns"] = csv_types.as_written(flat(obj))
        table = as_table(obj)
        if format == "csv":
            csv_types.refuse_nul(table)
        told["rows"] = table.num_rows
        _WRITERS[format](table, path)
        found = count(path, format)
        if found != table.num_rows:
            raise OSError(f"{path} has {found} rows after {table.num_rows} were written")
    told["bytes"] = sum(os.path.getsize(each) for each in data_files(folder))
    return told


def is_frame(obj: Any) -> bool:
    """Whether it is a frame of pandas, which isn't imported to find out."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(obj, pandas.DataFrame)


def as_table(obj: Any) -> Any:
    """A frame of pandas or Spark, or an Arrow table, as the latter."""
    pyarrow = need("pyarrow")
    if is_frame(obj):
        try:
            return pyarrow.Table.from_pandas(flat(obj), preserve_index=False)
        except pyarrow.ArrowException as error:
            raise WrongUse(
                f"The frame can't be written: {' '.join(map(str, error.args))}"
            ) from None
        except UnicodeEncodeError:
            raise WrongUse(
                "The frame has a text that isn't Unicode, so it can't be written as UTF-8. "
                "Correct it."
            ) from None
    if isinstance(obj, pyarrow.Table):
        return obj
    if hasattr(obj, "toArrow"):
        return obj.toArrow()
    kind = type(obj).__name__
    raise WrongUse(
        f"{'An' if kind[0] in 'AEIOaeio' else 'A'} {kind} can't be published. Return a DataFrame, "
        "an Arrow table, bytes, or the Path of a file or folder."
    )


def flat(frame: Any) -> Any:
    """A frame without an index of its own; its columns called by texts."""
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    return frame.rename(columns=str)


def columns_of(frame: Any) -> dict[str, str]:
    """Column → dtype: what CSV and JSON can't tell, nor Parquet the unit of a time."""
    frame = flat(frame)
    return {name: str(dtype) for name, dtype in zip(frame.columns, frame.dtypes, strict=True)}


def data_files(path: str) -> list[str]:
    """The files of a chunk, without those that tell of it."""
    if os.path.isfile(path):
        return [path]
    found, before = [], os.stat(path).st_ino
    for above, folders, names in os.walk(path):
        folders[:] = [each for each in folders if each[0] not in "_."]
        found += [os.path.join(above, each) for each in names if each[0] not in "_."]
    if os.stat(path).st_ino != before:
        raise FileNotFoundError(ENOENT, "replaced while it was listed", path)
    return sorted(found)


def read_frame(
    path: str,
    format: str,
    columns: Mapping[str, str] | None = None,
    options: CsvOptions = UNDECLARED,
) -> Any:
    """The frame that a chunk's files are; its columns have the dtypes told, if any are.

    `options` tell how CSV is written that isn't ours.
    """
    pandas, columns = need("pandas"), columns or {}
    frames = [
        _read(pandas, each, SUFFIXES.get(_suffix(each), format), columns, options)
        for each in data_files(path)
    ]
    if frames:
        frame = frames[0] if len(frames) == 1 else pandas.concat(frames, ignore_index=True)
    else:
        frame = pandas.DataFrame()
    return typed_as(frame, columns)


def typed_as(frame: Any, columns: Mapping[str, str]) -> Any:
    """The frame with these columns at least, of these dtypes as far as that can be."""
    for name, dtype in columns.items():
        if name not in frame:
            frame[name] = None
        if dtype and str(frame[name].dtype) != dtype:
            with suppress(TypeError, ValueError):  # then it is as the format tells it
                frame[name] = frame[name].astype(dtype)
    return frame


def read_table(
    path: str,
    format: str,
    columns: Mapping[str, str] | None = None,
    options: CsvOptions = UNDECLARED,
) -> Any:
    """The same as an Arrow table."""
    pyarrow = need("pyarrow")
    return pyarrow.Table.from_pandas(
        read_frame(path, format, columns, options), preserve_index=False
    )


def read_bytes(path: str) -> bytes:
    """The one file that a chunk is."""
    found = data_files(path)
    if len(found) != 1:
        raise Refused(
            f"{path} has {len(found)} files, so it isn't read as bytes. Annotate the input as "
            "pathlib.Path, and read them.",
            code="INVALID_LOCATION",
        )
    return Path(found[0]).read_bytes()


def count(path: str, format: str) -> int:
    """How many rows a file has, by the file alone."""
    if format == "parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    quotes, lines = 0, 0
    with open(path, "rb") as file:
        for line in file:
            # Within quotes a line goes on; of JSON, each has a whole row.
            quotes += line.count(b'"') if format == "csv" else 0
            lines += quotes % 2 == 0
    return max(0, lines - 1) if format == "csv" else lines


def need(module: str, extra: str | None = None) -> Any:
    """A library that only those need who hand over frames; `extra` brings it, too."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module or (line := what_installs(error, extra)) is None:
            raise
        raise WrongUse(line) from None


def _write_parquet(table: Any, path: str) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    try:  # Spark reads no nanoseconds
        parquet.write_table(table, path, coerce_timestamps="us", allow_truncated_timestamps=False)
    except pyarrow.ArrowInvalid:  # they would be lost, or it is another error, which comes again
        parquet.write_table(table, path)


def _write_csv(table: Any, path: str) -> None:
    import pyarrow.csv

    if table.column_names:  # a text is quoted, so that an empty one isn't taken for none
        pyarrow.csv.write_csv(table, path)
    else:
        Path(path).touch()


def _write_json(table: Any, path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for batch in table.to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                json.dump(row, file, ensure_ascii=False, allow_nan=False, default=_as_text)
                file.write("\n")


def _as_text(value: Any) -> str:
    """A time or a decimal for JSON, which has none."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "Decimal":
        return str(value)
    raise WrongUse(f"A {type(value).__name__} can't be written as JSON. Use the format parquet.")


_WRITERS = {"parquet": _write_parquet, "csv": _write_csv, "json": _write_json}
assert set(_WRITERS) == set(FORMATS)


def _read(
    pandas: Any, path: str, format: str, columns: Mapping[str, str], options: CsvOptions
) -> Any:
    if format == "parquet":
        import pyarrow.parquet

        # Of this file alone: a reader of paths would add a column for the directory's name.
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read().to_pandas()
    if os.path.getsize(path) == 0:
        return pandas.DataFrame()
    if format == "csv":
        if columns:
            return csv_types.read(path, columns)
        return read_pandas(path, options)
    if not columns:
        refuse_undecodable(path, "utf-8")
    with open(path, encoding="utf-8") as file:
        frame = pandas.DataFrame([json.loads(line) for line in file], dtype=object)
    return frame if columns else frame.infer_objects()


def _copy(source: Path, folder: str) -> None:
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copyfile(source, new_file(folder, source.suffix))
    else:
        raise WrongUse(f"There is nothing at {source}, which was returned to be published.")


def new_file(folder: str, suffix: str, number: int = 0) -> str:
    """A name that no earlier file of the chunk has had; by their names, files are in order.

    Who has listed the old files and opens them by name, as Spark does, fails then; it doesn't read
    the new ones by the sizes of the old.
    """
    return os.path.join(folder, f"part-{number:05d}-{os.urandom(4).hex()}{suffix}")


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


# The files of a chunk that Spark wrote, read without it: with the types that their note tells.


_PLAIN = {
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "boolean": "bool_",
    "binary": "binary",
    "date": "date32",
    "void": "null",
}


def read_with_schema(path: str, format: str, schema: Mapping[str, Any]) -> Any:
    """The rows of a chunk as an Arrow table; `schema` is Spark's, as JSON has it."""
    pyarrow = need("pyarrow")
    wanted = arrow_schema(schema)
    ways = {"parquet": _parquet, "csv": _csv, "json": _json}
    files = [each for each in data_files(path) if os.path.getsize(each)]
    found = [conform(ways[format](each, schema, wanted), wanted) for each in files]
    return pyarrow.concat_tables(found) if found else wanted.empty_table()


def nullable_frame(table: Any) -> Any:
    """The table for pandas: integers stay such beside none, and a map is a dict."""
    pandas, pyarrow = need("pandas"), need("pyarrow")
    whole = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if pyarrow.types.is_integer(column.type) and column.null_count
    ]
    made = table.to_pandas(integer_object_nulls=True, maps_as_pydicts="strict")
    for name in whole:
        made[name] = made[name].astype(pandas.Int64Dtype())
    return made


def conform(table: Any, wanted: Any) -> Any:
    """The table with these types: an instant that is kept without its zone is in UTC."""
    columns = []
    for field in wanted:
        column = table[field.name]
        if column.type != field.type:
            with suppress(need("pyarrow").ArrowException):  # then it is as the file tells it
                column = column.cast(field.type)
        columns.append(column)
    return need("pyarrow").table(columns, names=wanted.names)


def arrow_schema(schema: Mapping[str, Any]) -> Any:
    pyarrow = need("pyarrow")
    return pyarrow.schema([(each["name"], arrow_type(each["type"])) for each in schema["fields"]])


def arrow_type(kind: Any) -> Any:
    """Arrow's type for one of Spark's, as JSON has it."""
    pyarrow = need("pyarrow")
    if isinstance(kind, Mapping):
        match kind["type"]:
            case "struct":
                return pyarrow.struct(
                    [(each["name"], arrow_type(each["type"])) for each in kind["fields"]]
                )
            case "array":
                return pyarrow.list_(arrow_type(kind["elementType"]))
            case "map":
                return pyarrow.map_(arrow_type(kind["keyType"]), arrow_type(kind["valueType"]))
            case _:
                return arrow_type(kind.get("sqlType", "string"))
    name, _, sizes = kind.rstrip(")").partition("(")
    if name == "decimal":
        return pyarrow.decimal128(*(int(each) for each in sizes.split(",")))
    if name == "timestamp":
        return pyarrow.timestamp("us", "UTC")
    if name == "timestamp_ntz":
        return pyarrow.timestamp("us")
    return getattr(pyarrow, _PLAIN.get(name, "string"))()


def _parquet(path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
    import pyarrow.parquet

    # Of this file alone: a reader of paths would add a column for the directory's name. The unit
    # is Spark's; in nanoseconds, years before 1678 and after 2262 would become others.
    with pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        return file.read()


def _csv(path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
    import pyarrow.csv

    return pyarrow.csv.read_csv(
        path,
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={each.name: each.type for each in wanted},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _json(path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
    def rows() -> Iterator[Any]:
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield _value(schema, json.loads(line, parse_float=Decimal))

    return need("pyarrow").Table.from_pylist(list(rows()), schema=wanted)


def _value(kind: Any, value: Any) -> Any:
    """A value of JSON as its type has it in Python."""
    if value is None:
        return None
    if isinstance(kind, Mapping):
        match kind["type"]:
            case "struct":
                fields = {each["name"]: each["type"] for each in kind["fields"]}
                return {name: _value(each, value.get(name)) for name, each in fields.items()}
            case "array":
                return [_value(kind["elementType"], each) for each in value]
            case "map":
                return [(name, _value(kind["valueType"], each)) for name, each in value.items()]
        return value
    match kind.partition("(")[0]:
        case "decimal":
            return Decimal(str(value))
        case "float" | "double":
            return float(value)
        case "binary":
            return base64.b64decode(value)
        case "date":
            return date.fromisoformat(value)
        case "timestamp":
            return datetime.fromisoformat(value).astimezone(UTC)
        case "timestamp_ntz":
            return datetime.fromisoformat(value)
        case _:
            return value
