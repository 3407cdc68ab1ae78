"""The files of a chunk that Spark wrote, read without it: with the types that their note tells."""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from .files import data_files, need

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


def read(path: str, format: str, schema: Mapping[str, Any]) -> Any:
    """The rows of a chunk as an Arrow table; `schema` is Spark's, as JSON has it."""
    pyarrow = need("pyarrow")
    wanted = arrow_schema(schema)
    ways = {"parquet": _parquet, "csv": _csv, "json": _json}
    files = [each for each in data_files(path) if os.path.getsize(each)]
    found = [conform(ways[format](each, schema, wanted), wanted) for each in files]
    return pyarrow.concat_tables(found) if found else wanted.empty_table()


def frame(table: Any) -> Any:
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
