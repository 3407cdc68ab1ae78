"""Schemas as texts: parsing, comparing, merging, and casting a frame to one."""

import re
from typing import TYPE_CHECKING, NoReturn

from ..errors import DataflowError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

SAME, MERGE, ANY = "same", "merge", "any"
SCHEMAS = (SAME, MERGE, ANY)
"""What a job may declare about columns that differ from the last chunk's."""

WHOLE_NUMBERS = ("tinyint", "smallint", "int", "bigint")
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
EXACT_IN_FLOATS = {
    "float": ("tinyint", "smallint"),
    "double": ("tinyint", "smallint", "int", "float"),
}
"""The integers and floats that a float can represent exactly."""

DECIMAL_DIGITS = 38


def quoted(name: str) -> str:
    """Quote a column's name for SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Quote a text for SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def compare(was: str, now: str) -> list[str]:
    """Describe how two schemas differ; the order of the columns doesn't matter."""
    if was == now:
        return []
    before, after = _columns(was), _columns(now)
    found = []
    for name, kind in before.items():
        if name not in after:
            found.append(f"column {name!r} is missing")
        elif (old := type_text(kind)) != (new := type_text(after[name])):
            found.append(f"column {name!r} was {old} and is {new}")
    return found + [f"column {name!r} is new" for name in after if name not in before]


def merged(was: str, now: str) -> str | None:
    """Return the schema that both fit into, by adding columns and widening types; None: none."""
    both = _struct(schema_of(was), schema_of(now))
    return None if both is None else schema_text(both)


def fitted(df: "DataFrame", schema: str) -> "DataFrame":
    """Return the frame with these columns, in this order: cast, and NULL where it has none."""
    wanted = schema_of(schema)
    there = {field.name: type_text(field.dataType) for field in df.schema.fields}
    lost = sorted(there.keys() - set(wanted.names))
    if lost:
        raise DataflowError(
            f"The frame has a column {lost[0]!r} that the schema lacks. "
            'Drop it, or choose @spark_job(schema="merge").'
        )
    from pyspark.sql import functions as F

    columns = []
    for field in wanted.fields:
        name, kind = quoted(field.name), field.dataType
        if there.get(field.name) == type_text(kind):
            columns.append(F.expr(name))
        elif field.name not in there:
            columns.append(F.lit(None).cast(kind).alias(field.name))
        else:
            value = _widened(name, df.schema[field.name].dataType, kind)
            columns.append(F.expr(value).cast(kind).alias(field.name))
    return df.select(*columns)


def _columns(text: str) -> "dict[str, DataType]":
    return {field.name: field.dataType for field in schema_of(text).fields}


def _widened(sql: str, have: "DataType", want: "DataType", depth: int = 0) -> str:
    """Widen a value's fields by name: a cast goes by position, and adds none."""
    from pyspark.sql import types

    match have, want:
        case types.StructType(), types.StructType():
            there = {present.name: present.dataType for present in have.fields}
            fields = []
            for wanted in want.fields:
                value = "null"
                if wanted.name in there:
                    field = f"{sql}[{literal(wanted.name)}]"
                    value = _widened(field, there[wanted.name], wanted.dataType, depth)
                fields.append(f"{literal(wanted.name)}, {value}")
            return f"if({sql} is null, null, named_struct({', '.join(fields)}))"
        case types.ArrayType(), types.ArrayType():
            inner = _widened(f"w{depth}", have.elementType, want.elementType, depth + 1)
            return sql if inner == f"w{depth}" else f"transform({sql}, w{depth} -> {inner})"
        case types.MapType(), types.MapType():
            key, value = f"k{depth}", f"w{depth}"
            inner = _widened(value, have.valueType, want.valueType, depth + 1)
            return (
                sql if inner == value else f"transform_values({sql}, ({key}, {value}) -> {inner})"
            )
        case _:
            return sql


def _struct(one: "StructType", other: "StructType") -> "StructType | None":
    from pyspark.sql.types import StructField, StructType

    new = {field.name: field.dataType for field in other.fields}
    fields = []
    for field in one.fields:
        kind = _wider(field.dataType, new.pop(field.name, field.dataType))
        if kind is None:
            return None
        fields.append(StructField(field.name, kind))
    fields += [StructField(name, kind) for name, kind in new.items()]
    folded = {field.name.casefold() for field in fields}
    return StructType(fields) if len(folded) == len(fields) else None  # Spark folds case as well


def _wider(one: "DataType", other: "DataType") -> "DataType | None":
    """Return the type that holds every value of both, exactly."""
    from pyspark.sql import types

    match one, other:
        case (types.NullType(), kind) | (kind, types.NullType()):
            return kind
        case types.StructType(), types.StructType():
            return _struct(one, other)
        case types.ArrayType(), types.ArrayType():
            inner = _wider(one.elementType, other.elementType)
            return inner and types.ArrayType(inner)
        case types.MapType(), types.MapType():
            value = _wider(one.valueType, other.valueType)
            same = type_text(one.keyType) == type_text(other.keyType)
            return types.MapType(one.keyType, value) if value and same else None
    first, second = type_text(one), type_text(other)
    if first == second:
        return one
    if first in WHOLE_NUMBERS and second in WHOLE_NUMBERS:
        return one if WHOLE_NUMBERS.index(first) > WHOLE_NUMBERS.index(second) else other
    for wide, narrow in ((one, second), (other, first)):
        if narrow in EXACT_IN_FLOATS.get(type_text(wide), ()):
            return wide
    pair = {first, second}
    if pair == {"float", "int"}:
        return types.DoubleType()
    return _decimal(one, other)


def _decimal(one: "DataType", other: "DataType") -> "DataType | None":
    from pyspark.sql.types import DecimalType

    sizes = []
    for kind in (one, other):
        if isinstance(kind, DecimalType):
            sizes.append((kind.precision - kind.scale, kind.scale))
        elif type_text(kind) in _DIGITS:
            sizes.append((_DIGITS[type_text(kind)], 0))
        else:
            return None
    whole, scale = (max(pair) for pair in zip(*sizes, strict=True))
    return DecimalType(whole + scale, scale) if whole + scale <= DECIMAL_DIGITS else None


# --- a schema as a text, and back, without the session that Spark's own parser needs ---


INTERVAL_UNITS = ("day", "hour", "minute", "second")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"`(?:[^`]|``)*`|[A-Za-z0-9_ ]+(?:\([^)]*\))?")


def schema_text(schema: "StructType") -> str:
    """Return a schema as `id:bigint,name:string`, never truncated, without nullability."""
    return ",".join(f"{_name(field.name)}:{type_text(field.dataType)}" for field in schema.fields)


def schema_of(text: str) -> "StructType":
    """Return the schema that a text describes; everything in it may be NULL."""
    reader = _SchemaReader(text)
    fields = reader.fields("")
    reader.end()
    return fields


def columns_of(text: str) -> list[tuple[str, str]]:
    """Return the columns of a schema and their types, as texts: for machines without Spark."""
    found, start, depth, quoted = [], 0, 0, False
    for at, mark in enumerate(text + ","):
        if mark == "`":
            quoted = not quoted
        elif quoted:
            continue
        elif mark in "<(":
            depth += 1
        elif mark in ">)":
            depth -= 1
        elif mark == "," and depth == 0 and at > start:
            found.append(_column(text[start:at]))
            start = at + 1
    return found


def _column(text: str) -> tuple[str, str]:
    name = re.match(r"(?:`(?:[^`]|``)*`|[^`:]+)(?=:)", text)
    if not name:
        raise DataflowError(
            f"The recorded schema has a column {text[:80]!r}, which can't be read. "
            "Run the chunk again."
        )
    return _unquoted(name[0]), text[name.end() + 1 :]


def _name(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else quoted(name)


def type_text(kind: "DataType") -> str:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            return f"struct<{schema_text(kind)}>"
        case types.ArrayType():
            return f"array<{type_text(kind.elementType)}>"
        case types.MapType():
            return f"map<{type_text(kind.keyType)},{type_text(kind.valueType)}>"
        case types.UserDefinedType():
            return type_text(kind.sqlType())
        case _:
            return kind.simpleString()


class _SchemaReader:
    """Parses a schema's text without a session, which Spark's own parser needs."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fields(self, closing: str) -> "StructType":
        from pyspark.sql.types import StructField, StructType

        found = []
        while self._peek() != closing:
            name = self._token()
            self._expect(":")
            found.append(StructField(_unquoted(name), self._kind()))
            if self._peek() == closing:
                break
            self._expect(",")
        return StructType(found)

    def end(self) -> None:
        if self.at < len(self.text):
            raise self._unreadable()

    def _kind(self) -> "DataType":
        from pyspark.sql import types

        word = self._token()
        if self._peek() != "<":
            return _simple(word) or self._fail()
        self._expect("<")
        match word:
            case "struct":
                kind = self.fields(">")
            case "array":
                kind = types.ArrayType(self._kind())
            case "map":
                key = self._kind()
                self._expect(",")
                kind = types.MapType(key, self._kind())
            case _:
                self._fail()
        self._expect(">")
        return kind

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _token(self) -> str:
        found = _TOKEN.match(self.text, self.at)
        if not found:
            raise self._unreadable()
        self.at = found.end()
        return found[0]

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            raise self._unreadable()
        self.at += 1

    def _fail(self) -> NoReturn:
        raise self._unreadable()

    def _unreadable(self) -> DataflowError:
        return DataflowError(
            f"The recorded schema {self.text[:80]!r} can't be read at character {self.at}: "
            "it was written by something else. Run the chunk again."
        )


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def _simple(word: str) -> "DataType | None":
    """Return a type without parts, as `simpleString` writes it."""
    from pyspark.sql import types

    name, _, sizes = word.rstrip(")").partition("(")
    match name.split(), sizes.split(",") if sizes else []:
        case ["decimal"], [precision, scale]:
            return types.DecimalType(int(precision), int(scale))
        case ["char" | "varchar"], [length]:
            return (types.CharType if name == "char" else types.VarcharType)(int(length))
        case ["time"], [precision]:
            return types.TimeType(int(precision))
        case ["geometry" | "geography"], [place]:
            kind = types.GeometryType if name == "geometry" else types.GeographyType
            return kind(int(place) if place.lstrip("-").isdigit() else place.upper())
        case ["string", "collate", collation], []:
            return types.StringType(collation)
        case ["interval", first, *last], []:
            units = ("year", "month") if first in ("year", "month") else INTERVAL_UNITS
            kind = types.YearMonthIntervalType if "year" in units else types.DayTimeIntervalType
            if first in units:
                return kind(units.index(first), units.index(last[-1] if last else first))
    plain = (
        types.BinaryType,
        types.BooleanType,
        types.ByteType,
        types.CalendarIntervalType,
        types.DateType,
        types.DoubleType,
        types.FloatType,
        types.IntegerType,
        types.LongType,
        types.NullType,
        types.ShortType,
        types.StringType,
        types.TimestampType,
        types.TimestampNTZType,
        types.VariantType,
    )
    return next((kind() for kind in plain if kind().simpleString() == word), None)
