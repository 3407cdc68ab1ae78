"""CSV files from elsewhere: what a dataset's `options` declare, and what is refused."""

import codecs
import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import Refused, WrongUse
from ..util.text import printable, typed

KEYS = ("delimiter", "quote", "header", "encoding", "null", "schema", "strings")

USUAL_DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that files are often written with."""

SAMPLE_BYTES = 2**20
"""How much of a file is looked at in one go."""

_ARROW = {
    "string": "string",
    "boolean": "bool_",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "date32",
}
_TIMES = ("timestamp", "timestamp_ntz")
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)")
TYPES = (*_ARROW, *_TIMES, "decimal(P,S)")


class CsvOptions(NamedTuple):
    """How a dataset's CSV files are written, as far as that is declared."""

    datasetid: str
    delimiter: str = ""
    quote: str = '"'
    header: bool = True
    encoding: str = "utf-8"
    null: str | None = None
    schema: Mapping[str, str] = {}
    strings: bool | Sequence[str] = False
    declared: bool = False

    def kinds(self, names: Iterable[str]) -> dict[str, str]:
        """Column → declared type, of these columns; the others are guessed."""
        texts = names if self.strings is True else self.strings or ()
        return {**dict.fromkeys(texts, "string"), **self.schema}

    @property
    def typed(self) -> bool:
        """Whether types or the text for nothing are declared: then only that text is nothing."""
        return bool(self.schema or self.strings or self.null is not None)

    def checked(self, path: str) -> list[str]:
        """Return a file's columns; `Refused` if it doesn't match its options or the defaults."""
        refuse_undecodable(path, self.encoding, self.datasetid)
        with open(path, encoding=self.encoding_of_text, newline="") as file:
            try:
                first = next(self._rows(file), None)
            except csv.Error:  # an endless quote: who reads all of it tells more
                return []
        if first is None:
            return []
        if not self.delimiter and len(first) == 1:
            others = [delimiter for delimiter in USUAL_DELIMITERS if delimiter in first[0]]
            if others:
                raise self.refused(
                    path,
                    f"has one column, {first[0]!r}, whose name has {others[0]!r}, which "
                    "often separates columns",
                    delimiter=others[0],
                )
        names = first if self.header else list(self.schema)
        if not self.header and len(first) != len(names):
            raise self.refused(path, f"has {len(first)} columns, and {len(names)} are declared")
        declared = self.kinds(names)
        if missing := [name for name in declared if name not in names]:
            raise self.refused(path, f"has no column {missing[0]!r}, which is declared")
        if self.schema and (new := [name for name in names if name not in declared]):
            raise self.refused(path, f"has a column {new[0]!r}, which isn't declared")
        return names

    @property
    def encoding_of_text(self) -> str:
        """The encoding, without the mark that some programs begin a file with."""
        return "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding

    def _rows(self, lines: Iterable[str]) -> Any:
        quoting = {"quotechar": self.quote} if self.quote else {"quoting": csv.QUOTE_NONE}
        return csv.reader(lines, delimiter=self.delimiter or ",", **quoting)  # pyright: ignore

    def for_pandas(self) -> dict[str, Any]:
        """The arguments of `pandas.read_csv`; columns of declared types are read as texts."""
        arguments: dict[str, Any] = {"encoding": self.encoding_of_text}
        if not self.declared:
            return arguments
        arguments |= {"sep": self.delimiter or ","}
        arguments |= {"quotechar": self.quote} if self.quote else {"quoting": csv.QUOTE_NONE}
        if not self.header:
            arguments |= {"header": None, "names": list(self.schema)}
        if self.typed:
            arguments |= {"keep_default_na": False, "na_values": ["", *filter(None, [self.null])]}
        if self.strings is True:
            arguments |= {"dtype": str}
        else:
            arguments |= {"dtype": dict.fromkeys(self.kinds(()), str)}
        return arguments

    def for_spark(self) -> dict[str, str]:
        """The options of Spark's CSV reader."""
        if not self.declared:
            return {}
        quote = self.quote or "\x00"  # Spark's word for none
        return {
            "sep": self.delimiter or ",",
            "quote": quote,
            "escape": quote,
            "header": str(self.header).lower(),
            "encoding": java_charset(self.encoding),
        }

    def converted(self, frame: Any, path: str) -> Any:
        """A frame of pandas whose columns have the declared types; what isn't one is refused."""
        import pyarrow

        for name, kind in self.kinds(frame.columns).items():
            if kind == "string":
                continue
            texts = pyarrow.array(frame[name], pyarrow.string(), from_pandas=True)
            try:
                values = texts.cast(_arrow_type(kind))
            except pyarrow.ArrowException as error:
                why = " ".join(str(error).split())
                raise self.refused(
                    path, f"has a value in column {name!r} that isn't {kind} ({why})"
                ) from error
            whole = pyarrow.types.is_integer(values.type) and values.null_count
            series = values.to_pandas(integer_object_nulls=True)
            frame[name] = series.astype("Int64").set_axis(frame.index) if whole else series
        return frame

    def refused(self, path: str, why: str, **better: Any) -> Refused:
        """The refusal of a file, and the command that declares how it is written."""
        return _refused(path, why, self.datasetid, **better)


UNDECLARED = CsvOptions("")
"""The options of files that belong to no dataset."""


def read_pandas(path: str, options: CsvOptions, **more: Any) -> Any:
    """Read a CSV file from elsewhere as a pandas frame."""
    import pandas

    options.checked(path)
    frame = pandas.read_csv(path, **options.for_pandas(), **more)
    return options.converted(frame, path)


def csv_options(datasetid: str, text: str | None) -> CsvOptions:
    """What the `options` of a dataset declare; `WrongUse` says in a line what they can't be."""
    if not text:
        return CsvOptions(datasetid)
    given, why = {}, ""
    try:
        given = json.loads(text)
    except ValueError as error:
        why = f'{printable(text[:60])!r} isn\'t JSON ({error}). Write \'{{"delimiter": ";"}}\'.'
    if why := why or _what_is_wrong(given, text):
        raise WrongUse(f"options of dataset {datasetid!r}: {why}")
    return CsvOptions(datasetid, **given, declared=bool(given))


def _what_is_wrong(given: Any, text: str) -> str:
    if not isinstance(given, dict):
        return f'{printable(text[:60])!r} isn\'t an object of JSON, such as {{"delimiter": ";"}}.'
    if unknown := sorted(set(given) - set(KEYS)):
        return f"there is no option {unknown[0]!r}. The options are {', '.join(KEYS)}."
    for key in ("delimiter", "quote", "encoding", "null"):
        if not isinstance(given.get(key, ""), str):
            return f"`{key}` must be a text, not {given[key]!r}."
    for key, least in (("delimiter", 1), ("quote", 0)):
        mark = given.get(key, "x")
        if not least <= len(mark) <= 1 or mark in ("\r", "\n", "\0"):
            return f"`{key}` must be one character, not {mark!r}."
    if not isinstance(given.get("header", True), bool):
        return f"`header` must be true or false, not {given['header']!r}."
    try:
        "a".encode(given.get("encoding", "utf-8"))
    except (LookupError, UnicodeError):
        return (
            f"the encoding {given['encoding']!r} isn't known. Write latin-1, cp1252, "
            "utf-16 or another one of Python's."
        )
    return _what_is_wrong_with_types(given)


def _what_is_wrong_with_types(given: Mapping[str, Any]) -> str:
    schema, strings = given.get("schema", {}), given.get("strings", False)
    if not isinstance(schema, dict):
        return f"`schema` must be an object of column and type, not {schema!r}."
    for name, kind in schema.items():
        if not isinstance(kind, str) or not _is_type(kind):
            return f"`schema` has the type {kind!r} for {name!r}. There are {', '.join(TYPES)}."
    is_list = isinstance(strings, list) and all(isinstance(name, str) for name in strings)
    if not (isinstance(strings, bool) or is_list):
        return f"`strings` must be true, or a list of columns, not {strings!r}."
    if schema and strings:
        return "`schema` and `strings` are both given. A schema names the types of all."
    if not given.get("header", True) and not schema:
        return "without a header, `schema` must name the columns in their order."
    return ""


def refuse_undecodable(path: str, encoding: str, datasetid: str = "") -> None:
    """Refuse a file with bytes that are no text in its encoding, or with a NUL; say where."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line, column = 1, 1
    with open(path, "rb") as file:
        while True:
            block = file.read(SAMPLE_BYTES)
            kept = decoder.getstate()[0]
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                before = error.object[: error.start].decode(encoding, "ignore")
                line, column = _after(line, column, before)
                byte = (kept + block)[error.start]
                other = "cp1252" if codecs.lookup(encoding).name == "utf-8" else "utf-8"
                raise _refused(
                    path,
                    f"isn't {encoding} at line {line}, column {column}: the byte "
                    f"0x{byte:02x} is no part of a character",
                    datasetid,
                    encoding=other,
                ) from None
            if "\0" in text:
                line, column = _after(line, column, text[: text.index("\0")])
                raise _refused(
                    path,
                    f"has a NUL character at line {line}, column {column}, which CSV can't hold",
                    datasetid,
                    encoding="utf-16",
                )
            line, column = _after(line, column, text)
            if not block:
                return


def java_charset(encoding: str) -> str:
    """What Java calls an encoding of Python's."""
    name = codecs.lookup(encoding).name
    if name.startswith("iso8859"):
        return name.replace("iso", "iso-", 1)
    known = {"utf-8-sig": "utf-8", "ascii": "us-ascii"}
    return known.get(name, name.replace("cp125", "windows-125"))


def _after(line: int, column: int, text: str) -> tuple[int, int]:
    """Where a text ends that begins at a line and a column."""
    breaks = text.count("\n")
    if not breaks:
        return line, column + len(text)
    return line + breaks, len(text) - text.rindex("\n")


def _refused(path: str, why: str, datasetid: str, **better: Any) -> Refused:
    if datasetid and better:
        options = typed(json.dumps(better, ensure_ascii=False))
        cure = f"If it is written so, run: odf dataset add {typed(datasetid)} --options {options}"
    elif datasetid:
        cure = f"Correct the file, or declare it: odf dataset add {typed(datasetid)} --options JSON"
    else:
        cure = "Correct the file."
    return Refused(f"{path} {why}. {cure}", code="INVALID_LOCATION")


def _is_type(kind: str) -> bool:
    if found := _DECIMAL.fullmatch(kind):
        return 1 <= int(found[1]) <= 38 and int(found[2]) <= int(found[1])
    return kind in _ARROW or kind in _TIMES


def _arrow_type(kind: str) -> Any:
    import pyarrow

    if found := _DECIMAL.fullmatch(kind):
        return pyarrow.decimal128(int(found[1]), int(found[2]))
    return pyarrow.timestamp("us") if kind in _TIMES else getattr(pyarrow, _ARROW[kind])()
