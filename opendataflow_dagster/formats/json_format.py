"""JSON lines: each line is one row."""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from ..errors import WrongUse
from .csv_options import CsvOptions, refuse_undecodable
from .format import NOT_UTF8, TIME_PATTERN, TextFormat, types_within


class Json(TextFormat):
    """JSON lines; a value can be a list or an object."""

    name, title = "json", "JSON"
    suffixes = (".json", ".jsonl")
    spark_writing: Mapping[str, str] = {
        "timestampFormat": f"{TIME_PATTERN}XXXXX",
        "timestampNTZFormat": TIME_PATTERN,
        "ignoreNullFields": "false",
    }
    lossy = (NOT_UTF8,)

    def write(self, table: Any, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            for batch in table.to_batches(max_chunksize=10_000):
                for row in batch.to_pylist():
                    json.dump(row, file, ensure_ascii=False, allow_nan=False, default=_as_text)
                    file.write("\n")

    def read_frame(self, path: str, columns: Mapping[str, str], options: CsvOptions) -> Any:
        import pandas

        if os.path.getsize(path) == 0:
            return pandas.DataFrame()
        if not columns:
            refuse_undecodable(path, "utf-8")
        with open(path, encoding="utf-8") as file:
            frame = pandas.DataFrame([json.loads(line) for line in file], dtype=object)
        return frame if columns else frame.infer_objects()

    def read_table(self, path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
        import pyarrow

        def rows() -> Iterator[Any]:
            with open(path, encoding="utf-8") as file:
                for line in file:
                    yield _value(schema, json.loads(line, parse_float=Decimal))

        return pyarrow.Table.from_pylist(list(rows()), schema=wanted)

    def count(self, path: str) -> int:
        with open(path, "rb") as file:
            return sum(1 for _ in file)

    def refuse_schema(self, schema: Mapping[str, Any]) -> None:
        for field in schema["fields"]:
            if any(
                isinstance(kind, Mapping) and kind["type"] == "map" and kind["keyType"] != "string"
                for kind in types_within(field["type"])
            ):
                raise WrongUse(
                    f"Column {field['name']!r} has a map whose keys aren't texts, and in JSON "
                    "nobody could read it. Cast the keys to string, or register the dataset with "
                    "--format parquet."
                )


JSON = Json()


def _as_text(value: Any) -> str:
    """A time or a decimal for JSON, which has none."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "Decimal":
        return str(value)
    raise WrongUse(f"A {type(value).__name__} can't be written as JSON. Use the format parquet.")


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
