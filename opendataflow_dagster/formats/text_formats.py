"""CSV, a heading and a line of values for each row; and JSON, a line for each row."""

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from io import StringIO
from typing import Any

from ..errors import WrongUse
from .csv_options import CsvOptions, read_pandas, refuse_undecodable
from .format import NOT_UTF8, TEXTS, TIME_PATTERN, LossyValue, TextFormat, types_within

AS_READ = ""
"""In place of a dtype: the text is that of `to_csv`, and pandas tells what it is, as of any CSV."""

NO_VALUE = "\x00nothing\x00"
"""What Spark takes for no value: by default, that is an empty text, which is a value."""

_TEXT_DTYPES = ("object", "string", "str")
_QUOTING: Mapping[str, str] = {"header": "true", "escape": '"', "quote": '"'}
"""As everybody else writes CSV: a quote within quotes is doubled."""


class Csv(TextFormat):
    """CSV, as everybody else writes it."""

    name, title = "csv", "CSV"
    suffixes = (".csv",)
    is_delimited = True
    spark_reading: Mapping[str, str] = {**_QUOTING, "nullValue": NO_VALUE}
    spark_writing: Mapping[str, str] = {
        **_QUOTING,
        # An empty text is quoted, so that it isn't taken for NULL; spaces belong to a text.
        "emptyValue": '""',
        "ignoreLeadingWhiteSpace": "false",
        "ignoreTrailingWhiteSpace": "false",
        "timestampFormat": f"{TIME_PATTERN}XXXXX",
        "timestampNTZFormat": TIME_PATTERN,
    }
    lossy = (
        NOT_UTF8,
        LossyValue(
            TEXTS,
            "contains({} collate UTF8_BINARY, chr(0))",
            "a NUL character",
            "Remove it by replace({}, chr(0))",
        ),
    )

    def prepared(self, frame: Any) -> tuple[Any, dict[str, str]]:
        return as_written(frame)

    def headed(self, frame: Any) -> Any:
        return headed(frame)

    def write(self, table: Any, path: str) -> None:
        import pyarrow.csv

        refuse_nul(table)
        if table.column_names:  # a text is quoted, so that an empty one isn't taken for none
            pyarrow.csv.write_csv(table, path)
        else:
            open(path, "wb").close()

    def read_frame(self, path: str, columns: Mapping[str, str], options: CsvOptions) -> Any:
        import pandas

        if os.path.getsize(path) == 0:
            return pandas.DataFrame()
        return read(path, columns) if columns else read_pandas(path, options)

    def read_table(self, path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
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

    def dtypes(self, paths: Sequence[str], columns: Mapping[str, str]) -> Mapping[str, str]:
        return resolved(paths, columns) if AS_READ in columns.values() else columns

    def count(self, path: str) -> int:
        quotes, rows = 0, 0
        with open(path, "rb") as file:
            for line in file:
                quotes += line.count(b'"')
                rows += quotes % 2 == 0  # within quotes a row continues on the next line
        return max(0, rows - 1)

    def heading(self, path: str) -> bytes:
        """The first record: a line break within quotes doesn't end it."""
        head, quotes = b"", 0
        with open(path, "rb") as file:
            for line in file:
                head += line
                quotes += line.count(b'"')
                if quotes % 2 == 0:
                    break
        return head if head.endswith(b"\n") or not head else head + b"\n"

    def refuse_schema(self, schema: Mapping[str, Any]) -> None:
        for field in schema["fields"]:
            if field["type"] == "binary":
                quoted = "`" + field["name"].replace("`", "``") + "`"
                raise WrongUse(
                    f"Column {field['name']!r} is binary, which CSV can't hold. Return "
                    f"base64({quoted}), or register the dataset with --format parquet."
                )


CSV = Csv()


# --- frames of pandas: which columns come back as they were, and how ---


def as_written(frame: Any) -> tuple[Any, dict[str, str]]:
    """A frame whose columns Arrow can write as CSV, and column → dtype that it comes back with."""
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise WrongUse(
            f"The frame can't be written: Duplicate column names: {', '.join(dict.fromkeys(twice))}"
            ". Rename them."
        )
    told, changed = {}, frame.copy(deep=False)
    for at, (name, column) in enumerate(frame.items()):
        values = _of_category(column)
        told[name] = str(values.dtype) if _comes_back(values) else AS_READ
        if told[name] == AS_READ:
            values = _text(values)
        if values is not column:
            changed.isetitem(at, values)
    return changed, told


def refuse_nul(table: Any) -> None:
    """Refuse an Arrow table with a text that no reader of CSV gives back."""
    import pyarrow
    from pyarrow import compute as module

    compute: Any = module
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        if is_text and compute.any(compute.match_substring(column, "\0")).as_py():
            raise WrongUse(
                f"Column {name!r} has a NUL character, which CSV can't hold. Remove it, or "
                "register the dataset with --format parquet."
            )


def headed(frame: Any) -> Any:
    """A frame with the names that `read_csv` gives its columns, once `to_csv` has written it.

    A name that comes again gets a number, and one that is missing another; where the columns have
    names of several levels, the second line of them is a row.
    """
    import pandas

    if not len(frame.columns):
        return frame
    several = frame.columns.nlevels > 1
    text = (frame if several else frame.iloc[:0]).to_csv(index=False)
    found = pandas.read_csv(StringIO(text), low_memory=False)
    if several:
        return found
    same = len(found.columns) != len(frame.columns) or list(found.columns) == list(frame.columns)
    return frame if same else frame.set_axis(found.columns, axis=1)


def read(path: str, columns: Mapping[str, str]) -> Any:
    """The frame of a file of ours: 007 stays a text, and an empty text differs from none."""
    import pyarrow
    import pyarrow.csv

    arrow = {
        **dict.fromkeys((*_TEXT_DTYPES, AS_READ), pyarrow.string()),
        **dict.fromkeys(("uint64", "UInt64"), pyarrow.uint64()),  # else it would be a float
    }
    kinds = {name: arrow[dtype] for name, dtype in columns.items() if dtype in arrow}

    def found(**reading: Any) -> Any:
        return pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(**reading),
            parse_options=pyarrow.csv.ParseOptions(
                newlines_in_values=True,
                ignore_empty_lines=len(columns) != 1,  # it is the line of a row without a value
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=kinds, strings_can_be_null=True, quoted_strings_can_be_null=False
            ),
        )

    try:
        table = found()
    except pyarrow.ArrowInvalid:  # a row is longer than a block
        table = found(block_size=min(os.path.getsize(path) + 1, 2**31 - 1))
    frame = table.to_pandas(integer_object_nulls=True)
    for name, column in _as_read(path, table.column_names, columns).items():
        frame[name] = column
    return frame


def resolved(paths: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns with the dtype of each: of those that pandas tells, as it reads these files.

    Truth beside nothing is `boolean`, since no dtype tells what an object is.
    """
    import pandas

    found: dict[str, list[Any]] = {}
    for path in filter(os.path.getsize, paths):
        names = list(pandas.read_csv(path, encoding="utf-8", nrows=0))
        for name, column in _as_read(path, names, columns).items():
            found.setdefault(name, []).append(column)
    told = dict(columns)
    for name, parts in found.items():
        column = parts[0] if len(parts) == 1 else pandas.concat(parts)
        truth = pandas.api.types.infer_dtype(column, skipna=True) == "boolean"
        told[name] = "boolean" if truth else str(column.dtype)
    return told


def _as_read(path: str, names: list[str], columns: Mapping[str, str]) -> dict[str, Any]:
    """The columns without a declared type, as `read_csv` reads them."""
    import pandas

    numbers: Any = [at for at, name in enumerate(names) if columns.get(name) == AS_READ]
    if not numbers:
        return {}
    found = pandas.read_csv(
        path, encoding="utf-8", usecols=numbers, low_memory=False, skip_blank_lines=len(names) > 1
    )
    return {names[number]: found.iloc[:, at] for at, number in enumerate(numbers)}


def _of_category(column: Any) -> Any:
    """The values of categories, which have an order and more members than a file tells."""
    import pandas

    if not isinstance(column.dtype, pandas.CategoricalDtype):
        return column
    with suppress(TypeError, ValueError):  # whole numbers beside nothing
        return column.astype(column.cat.categories.dtype)
    return column.astype(object)


def _comes_back(column: Any) -> bool:
    """Whether the dtype of a column can be recorded, so that its text is read back unchanged."""
    import pandas

    dtype = column.dtype
    if str(dtype) == "object":
        kind = pandas.api.types.infer_dtype(column, skipna=True)
        if kind == "date":  # which a datetime is, too, and would lose its time
            return not any(isinstance(each, datetime) for each in column)
        return kind in ("string", "empty")
    if isinstance(dtype, pandas.StringDtype):
        return True
    if isinstance(dtype, pandas.SparseDtype) or dtype.kind not in "biufMm" or dtype.itemsize > 8:
        return False
    try:
        return pandas.api.types.pandas_dtype(str(dtype)) == dtype
    except (TypeError, ValueError, NotImplementedError):
        return False


def _text(column: Any) -> Any:
    """The text that `to_csv` writes of each value."""
    import pandas

    values = zip(column.astype(object), column.isna(), strict=True)
    texts = [None if gone else str(value) for value, gone in values]
    return pandas.Series(texts, index=column.index, dtype=object)


# JSON lines: each line is one row.


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
                    f"Column {field['name']!r} has a map whose keys aren't strings, which JSON "
                    "can't hold. Cast the keys to string, or register the dataset with "
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
