"""The files of a chunk: a frame in some format, bytes, or files that are there."""

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import Refused, WrongUse, what_installs
from ..formats import format_of, format_of_file
from ..formats.csv_options import UNDECLARED, CsvOptions
from ..formats.format import data_files, new_file


def write(obj: Any, folder: str, format: str) -> dict[str, Any]:
    """Write an object into an empty folder; what it says of it: rows, bytes, format, columns.

    A frame's index becomes columns if it has a name, and is left out if it hasn't.
    """
    told: dict[str, Any] = {"format": format}
    kind = format_of(format)
    path = new_file(folder, kind.suffix)
    if isinstance(obj, bytes):
        with open(path, "wb") as file:
            file.write(obj)
    elif isinstance(obj, Path):
        _copy(obj, folder)
    else:
        told["columns"] = {}
        if is_frame(obj):
            obj, told["columns"] = kind.prepared(flat(obj))
        table = as_table(obj)
        told["rows"] = table.num_rows
        kind.write(table, path)
        found = kind.count(path)
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
        format_of_file(file, format).read_frame(file, columns, options) for file in data_files(path)
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


def need(module: str, extra: str | None = None) -> Any:
    """A library that only those need who hand over frames; `extra` brings it, too."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module or (line := what_installs(error, extra)) is None:
            raise
        raise WrongUse(line) from None


def _copy(source: Path, folder: str) -> None:
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copyfile(source, new_file(folder, source.suffix))
    else:
        raise WrongUse(f"There is nothing at {source}, which was returned to be published.")


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
    wanted, kind = arrow_schema(schema), format_of(format)
    files = [file for file in data_files(path) if os.path.getsize(file)]
    found = [conform(kind.read_table(file, schema, wanted), wanted) for file in files]
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
