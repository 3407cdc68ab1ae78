"""A schema as a text, and back: without a session, which Spark's own parser needs."""

import re
from typing import TYPE_CHECKING, NoReturn

from ..errors import DataflowError
from .row_hash import quoted

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

TIMES = ("day", "hour", "minute", "second")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"`(?:[^`]|``)*`|[A-Za-z0-9_ ]+(?:\([^)]*\))?")


def schema_text(schema: "StructType") -> str:
    """A schema as `id:bigint,name:string`, never truncated; nullability isn't told."""
    return ",".join(f"{_name(each.name)}:{type_text(each.dataType)}" for each in schema.fields)


def schema_of(text: str) -> "StructType":
    """The schema that a text tells; all that it holds may be NULL."""
    reader = _Reader(text)
    fields = reader.fields("")
    reader.end()
    return fields


def columns_of(text: str) -> list[tuple[str, str]]:
    """The columns of a schema and their types, as texts: for those who have no Spark."""
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
        raise DataflowError(f"The recorded schema has a column {text[:80]!r}, which can't be read.")
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


class _Reader:
    """Reads a schema's text, without a session: Spark's own parser needs one."""

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
    """A type without parts, as `simpleString` writes it."""
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
            units = ("year", "month") if first in ("year", "month") else TIMES
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
