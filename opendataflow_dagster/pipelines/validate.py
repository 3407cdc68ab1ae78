"""Validating a project: its declaration, and each transformation on its expected inputs."""

import re
import time
import xml.etree.ElementTree as xml
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import chain, islice
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.settings import BUILT_IN
from ..errors import DataflowError, NoDatabase
from ..model import Say
from ..store import open_from
from ..util.text import first_line, printable, typed
from .engine import Engine
from .frames import as_pandas
from .jobs import known_of, makers_of
from .project import FILE, Pipeline, Project, project_settings
from .sandbox import forget
from .transformation import (
    NO_STREAM,
    PANDAS,
    Transformation,
    TransformationError,
    copied,
    expectations_of,
    load,
    supported_engine,
    takes_stream,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Deep comparison of two tables, cell by cell. The index of the rows and the order of the columns
# don't matter; the order of the rows does. Missing values (None, NaN, NaT, NA) are equal. 1 equals
# 1.0, but True isn't 1, and a date is neither a string nor a timestamp.


TOLERANCE = 1e-12
SHORT = 1e-6
"""For numbers that were stored in 32 bits."""
MAX_SHOWN_CHARACTERS = 80
SIMPLE = (str, int, float, bool)
"""The types of most cells, which take a shortcut in the comparison."""


class Difference(NamedTuple):
    """One cell that differs; or, without a row, a column or the number of rows."""

    column: Any
    row: int | None
    expected: Any
    got: Any
    what: str = ""

    def __str__(self) -> str:
        if self.what:
            return self.what
        place = f"column {_shown(self.column)}, row {self.row}"
        return f"{place}: expected {_shown(self.expected)}, got {_shown(self.got)}"

    def as_object(self) -> dict[str, Any]:
        """Return an object for JSON; rows count from 0, as in pandas."""
        column = None if self.column is None else str(self.column)
        row = {"column": column, "row": self.row}
        return row | {
            "expected": _shown(self.expected),
            "got": _shown(self.got),
            "message": str(self),
        }


def differences(expected: Any, got: Any) -> Iterator[Difference]:
    """Yield how two DataFrames differ: columns first, then the number of rows, then cells."""
    wanted, found = _columns(expected), _columns(got)
    # `[]` can't say which columns there are.
    if wanted or len(got):
        for key, place in wanted.items():
            if key not in found:
                name = expected.columns[place]
                there = ", ".join(map(_shown, got.columns))
                what = f"column {_shown(name)} is missing; the output has: {there or 'none'}"
                yield Difference(name, None, "a column", None, what)
        for key, place in found.items():
            if key not in wanted:
                name = got.columns[place]
                what = f"column {_shown(name)} isn't expected"
                yield Difference(name, None, None, "a column", what)
    if len(expected) != len(got):
        what = f"expected {_rows(len(expected))}, got {len(got)}"
        yield Difference(None, None, len(expected), len(got), what)
    for key, place in wanted.items():
        if key in found:
            cells = expected.iloc[:, place], got.iloc[:, found[key]]
            yield from _cells(expected.columns[place], *cells)


def identical(one: Any, other: Any) -> bool:
    """Whether a table is completely unchanged, down to the type of each column."""
    first, second = _columns(one), _columns(other)
    if first.keys() != second.keys() or len(one) != len(other):
        return False
    for key, place in first.items():
        left, right = one.iloc[:, place], other.iloc[:, second[key]]
        if left.dtype != right.dtype:
            return False
        if not all(
            type(a) is type(b) and equal(a, b)
            for a, b in zip(map(_plain, left), map(_plain, right), strict=True)
        ):
            return False
    return True


def equal(expected: Any, got: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two values are equivalent."""
    expected, got = _plain(expected), _plain(got)
    if _missing(expected) or _missing(got):
        return _missing(expected) and _missing(got)
    kind = _kind(expected)
    if kind != _kind(got):
        return False
    if kind == "number":
        return _same_number(expected, got, tolerance)
    if kind == "mapping":
        return expected.keys() == got.keys() and all(
            equal(value, got[key], tolerance) for key, value in expected.items()
        )
    if kind == "list":
        return len(expected) == len(got) and all(
            equal(a, b, tolerance) for a, b in zip(expected, got, strict=True)
        )
    try:
        return bool(expected == got)
    except Exception:  # user values may refuse to be compared
        return False


def _columns(frame: Any) -> dict[tuple[Any, int], int]:
    """Return where each column is; columns with one name are numbered in their order."""
    found: dict[tuple[Any, int], int] = {}
    for place, name in enumerate(map(_known, frame.columns)):
        turn = 0
        while (name, turn) in found:
            turn += 1
        found[name, turn] = place
    return found


_NAMELESS = object()


def _known(name: Any) -> Any:
    """Return a column's name that equals itself, even for NaN."""
    if isinstance(name, tuple):
        return tuple(map(_known, name))
    return _NAMELESS if _missing(name) else name


def _cells(column: Any, expected: Any, got: Any) -> Iterator[Difference]:
    small = {str(expected.dtype).lower(), str(got.dtype).lower()} & {"float16", "float32"}
    tolerance = SHORT if small else TOLERANCE
    for row, (a, b) in enumerate(zip(expected, got, strict=False)):
        if type(a) is type(b) and type(a) in SIMPLE and a == b:
            continue
        if not equal(a, b, tolerance):
            yield Difference(column, row, _plain(a), _plain(b))


def _same_number(one: Any, other: Any, tolerance: float) -> bool:
    if one == other:
        return True
    exact = isinstance(one, Decimal) and isinstance(other, Decimal)
    if exact or (_whole(one) and _whole(other)):
        return False  # an id with one wrong digit is another id, however long it is
    try:
        return isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
    except (TypeError, OverflowError, ValueError):
        return False


def _whole(number: Any) -> bool:
    if isinstance(number, Decimal):
        return number == number.to_integral_value()
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def _kind(value: Any) -> str:
    # To Python, datetime is a date, and bool a number: the order matters.
    kinds = {
        "bool": bool,
        "number": (int, float, Decimal, complex),
        "text": str,
        "bytes": bytes | bytearray,
        "moment": datetime,
        "date": date,
        "duration": timedelta,
        "mapping": Mapping,
        "list": list | tuple,
        "set": AbstractSet,
    }
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "other")


def _plain(value: Any) -> Any:
    """Convert numpy's scalars and arrays to Python's."""
    import numpy
    import pandas

    if isinstance(value, numpy.datetime64):
        return pandas.Timestamp(value)
    if isinstance(value, numpy.timedelta64):
        return pandas.Timedelta(value)
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray | pandas.Series | pandas.Index):
        return value.tolist()
    return value


def _missing(value: Any) -> bool:
    import pandas

    if value is None or value is pandas.NA or value is pandas.NaT:
        return True
    return isinstance(value, float | Decimal) and bool(value != value)


def _shown(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 1]}…"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


MAX_DIFFERENCES = 20
"""Differences of one transformation that are kept."""


class ValidationResult(NamedTuple):
    """The result of one transformation; without a name, what is wrong with the whole pipeline."""

    pipeline: str
    transformation: str | None
    file: str
    seconds: float = 0.0
    message: str = ""
    """What is wrong, in one line; empty if nothing is."""
    differences: tuple[Difference, ...] = ()
    traceback: str = ""
    printed: str = ""

    @property
    def passed(self) -> bool:
        return not self.message

    @property
    def name(self) -> str:
        return f"{self.pipeline}.{self.transformation}" if self.transformation else self.pipeline


def validate(
    project: Project,
    pipeline: str | None = None,
    config: str | None = None,
    *,
    say: Say = lambda line: None,
) -> Iterator[ValidationResult]:
    """Validate the project's pipelines, or one of them, as declared.

    Sources that aren't files are looked up in the configured tables.
    """
    forget(project.root)
    if pipeline is not None:
        project.pipeline(pipeline)
    for checked in examined(project, config, say=say):
        if pipeline in (None, checked.slug):
            for name in names_of(checked):
                yield validate_one(project, checked, name)


def examined(
    project: Project, config: str | None = None, *, say: Say = lambda line: None
) -> list[Pipeline]:
    """Yield the pipelines of a project, each with all that is wrong around its transformations.

    A folder of transformations that project.yml doesn't name counts as one, too.
    """
    elsewhere = _elsewhere(project, config, say)
    found = []
    for pipeline in project.pipelines:
        trouble = [pipeline.trouble] if pipeline.trouble else []
        where = f"{FILE}:{pipeline.line}"
        for source in dict.fromkeys(pipeline.sources):
            if elsewhere is not None and not _is_there(project, source, elsewhere):
                file = project.source_file(source).relative_to(project.root)
                trouble.append(
                    f"{where}: source {source!r} is {file}, which doesn't exist. Put a file "
                    f"there, or run: odf dataset add {typed(source)} --hostname /path/FILE.csv"
                )
        for file in _unlisted(project, pipeline.slug, pipeline.transformations):
            trouble.append(
                f"{where}: {file.relative_to(project.root)} isn't listed in `transformations`. "
                "List it, or remove the file."
            )
        found.append(pipeline._replace(trouble=_joined(trouble)))
    slugs = {pipeline.slug for pipeline in project.pipelines}
    for folder in sorted((project.root / "pipelines").glob("*/")):
        if folder.name not in slugs and (files := _unlisted(project, folder.name, ())):
            trouble = (
                f"{FILE}:1: {files[0].relative_to(project.root)} is a transformation, but no "
                f"pipeline is called {folder.name!r}. Declare it, or remove the folder."
            )
            found.append(Pipeline(folder.name, (), None, (), {}, 1, trouble))
    return found


def _elsewhere(project: Project, config: str | None, say: Say) -> set[str] | None:
    """Return the sources for which the tables have a place or a writer; None: unreadable."""
    store, is_built_in = None, False
    try:
        settings = project_settings(project.root, config)
        is_built_in = settings.origin == BUILT_IN
        store = open_from(settings)
        known = known_of(store, {pipeline.slug for pipeline in project.pipelines})
        return {*known.placed, *known.produced}
    except DataflowError as error:
        if is_built_in and isinstance(error, NoDatabase):  # nothing has run here yet
            return set()
        say(f"Sources that aren't files weren't checked. {first_line(error)}.")
        return None
    finally:
        if store is not None:
            store.close()


def _joined(trouble: Sequence[str]) -> str | None:
    """Join all that is wrong into one line."""
    return "; ".join([*(fault.rstrip(".") for fault in trouble[:-1]), *trouble[-1:]]) or None


def _is_there(project: Project, source: str, elsewhere: Collection[str]) -> bool:
    """Whether a source is a file, is produced by a pipeline, or is known to the tables."""
    if source in elsewhere or project.source_file(source).is_file():
        return True
    return bool(makers_of(project, source))


def _unlisted(project: Project, slug: str, listed: Sequence[str]) -> list[Path]:
    """Return the files in a pipeline's folder that it doesn't list and no file imports."""
    folder = project.root / "pipelines" / slug
    stray = [
        file
        for file in sorted(folder.glob("*.py"))
        if file.stem not in listed and takes_stream(file, project.root) is not None
    ]
    if not stray:
        return []
    others = (project.root / "pipelines").rglob("*.py")
    lines = {path: path.read_text(errors="replace") for path in others}
    return [
        file
        for file in stray
        if not any(
            re.search(rf"(?m)^\s*(from|import)\b.*\b{re.escape(file.stem)}\b", text)
            for other, text in lines.items()
            if other != file
        )
    ]


def names_of(pipeline: Pipeline) -> list[str | None]:
    """Return what to validate: None stands for the pipeline's own trouble."""
    return [*([None] if pipeline.trouble else []), *dict.fromkeys(pipeline.transformations)]


def validate_one(project: Project, pipeline: Pipeline, name: str | None) -> ValidationResult:
    """Run one transformation on its expected inputs, and judge its output."""
    if name is None:
        return ValidationResult(pipeline.slug, None, "project.yml", message=pipeline.trouble or "")
    file = project.transformation_file(pipeline.slug, name).relative_to(project.root)
    verdict = ValidationResult(pipeline.slug, name, str(file))
    start, printed = time.perf_counter(), ""
    try:
        native = supported_engine(project, pipeline.slug, name) != PANDAS
        transformation = load(project, pipeline.slug, name)
        if not native:  # otherwise the file is loaded once more, where Spark is
            printed = transformation.printed
        found, said = _judge(project, transformation, native)
        printed += said
        first = tuple(islice(found, MAX_DIFFERENCES))
        many = len(first) + sum(1 for _ in found)
        verdict = verdict._replace(message=_in_short(first, many), differences=first)
    except TransformationError as error:
        printed += error.printed
        verdict = verdict._replace(message=str(error), traceback=error.trace)
    except DataflowError as error:  # some are Spark's
        verdict = verdict._replace(message=str(error))
    return verdict._replace(seconds=time.perf_counter() - start, printed=printed)


def _judge(
    project: Project, transformation: Transformation, native: bool
) -> tuple[Iterator[Difference], str]:
    inputs, expected, samples = expectations_of(transformation.module)
    run, compare = transformation, differences
    if native:
        run = Native(project, transformation)
        compare = run.differences
    printed, output = "", None
    frames = [copied(frame) for frame in inputs]
    if samples == []:
        raise TransformationError("`stream` is empty: there is nothing to run with.")
    try:
        # One item's result is the first frame of the next.
        for sample in [NO_STREAM] if samples is None else samples:
            output, said = run(frames, sample)
            printed += said
            frames = [output, *frames[1:]]
    except TransformationError as error:
        error.printed = printed + error.printed
        raise
    found = compare(expected, output)
    one = next(found, None)
    if one is None and identical(inputs[0], output):
        raise TransformationError(
            "The output equals the input, so this tests nothing. Use an input that changes.",
            printed=printed,
        )
    return chain([one] if one else [], found), printed


def _in_short(found: tuple[Difference, ...], many: int) -> str:
    if not found:
        return ""
    more = f" (and {many - 1} more)" if many > 1 else ""
    return f"{found[0]}{more}"


# Validates transformations of Spark's own frames, in a session of this process.


class Native:
    """A transformation of Spark's own frames, called like one of pandas frames."""

    def __init__(self, project: Project, transformation: Transformation) -> None:
        self.project, self.of = project, transformation

    def __call__(self, frames: Sequence[Any], item: Any) -> tuple[Any, str]:
        """Return the resulting frame, converted to pandas, and what was printed."""
        with Engine(self.project, _session) as engine:
            ran = engine.run(self.of.pipeline, self.of.name, frames, item)
            return as_pandas(ran.frame), ran.printed

    def differences(self, expected: Any, got: Any) -> Iterator[Difference]:
        """Yield the differences; rows may come in any order, as Spark guarantees none."""
        if next(differences(expected, got), None) is not None:
            yield from differences(_in_order(expected), _in_order(got))


def _session() -> "SparkSession":
    from ..spark.session import spark_session

    return spark_session(app="odf validate", short=True)


def _in_order(frame: Any) -> Any:
    """Sort rows by nothing but their content."""
    columns = sorted(frame.columns, key=str)
    keys = [[_key(cell) for cell in frame[column]] for column in columns]
    places = sorted(range(len(frame)), key=lambda place: [key[place] for key in keys])
    return frame.iloc[places]


def _key(cell: Any) -> str:
    import pandas

    if pandas.api.types.is_scalar(cell) and pandas.isna(cell):
        return ""
    if isinstance(cell, int | float):  # 1 and 1.0 are equal
        return f"{cell:.9g}"
    return str(cell)


# How verdicts are printed: lines for people, objects for programs, JUnit's XML for CI.


ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MAX_PRINTED_CHARACTERS = 2000
"""Characters shown of what a failed transformation printed; JSON and XML have everything."""


def line_of(verdict: ValidationResult) -> str:
    """Return `ok` or `FAILED`, the name, and what is wrong."""
    if verdict.passed:
        return f"ok      {verdict.name}"
    return f"FAILED  {verdict.name}: {verdict.message}"


def details_of(verdict: ValidationResult) -> Iterator[str]:
    """Yield what there is to say about a failure beyond its line."""
    if len(verdict.differences) > 1:
        yield from (str(difference) for difference in verdict.differences)
    yield from verdict.traceback.rstrip("\n").splitlines()
    printed = verdict.printed.strip("\n")
    if printed:
        yield "It printed:"
        cut = len(printed) > MAX_PRINTED_CHARACTERS
        yield from ((["…"] if cut else []) + printed[-MAX_PRINTED_CHARACTERS:].splitlines())


def summary_of(verdicts: Sequence[ValidationResult]) -> str:
    """Return the summary: `3 transformations in 2 pipelines: all pass.`"""
    failed = sum(not verdict.passed for verdict in verdicts)
    of = len({verdict.pipeline for verdict in verdicts})
    many = sum(verdict.transformation is not None for verdict in verdicts)
    what = f"{_count(many, 'transformation')} in {_count(of, 'pipeline')}"
    return f"{what}: {_count(failed, 'failure') if failed else 'all pass'}."


def object_of(verdict: ValidationResult) -> dict[str, Any]:
    """Return a verdict for JSON."""
    return {
        "pipeline": verdict.pipeline,
        "transformation": verdict.transformation,
        "file": verdict.file,
        "status": "passed" if verdict.passed else "failed",
        "seconds": round(verdict.seconds, 4),
        "message": verdict.message or None,
        "differences": [difference.as_object() for difference in verdict.differences],
        "traceback": verdict.traceback or None,
        "printed": verdict.printed,
    }


def write_junit(verdicts: Sequence[ValidationResult], file: Path) -> None:
    """Write JUnit's XML: a suite for each pipeline."""
    root = xml.Element("testsuites", _totals(verdicts))
    for pipeline in dict.fromkeys(verdict.pipeline for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.pipeline == pipeline]
        suite = xml.SubElement(root, "testsuite", {"name": _legal(pipeline)} | _totals(own))
        for verdict in own:
            _case(suite, verdict)
    xml.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def _case(suite: xml.Element, verdict: ValidationResult) -> None:
    attributes = {
        "classname": verdict.pipeline,
        "name": verdict.transformation or "project.yml",
        "file": verdict.file,
        "time": f"{verdict.seconds:.3f}",
    }
    case = xml.SubElement(
        suite, "testcase", {key: _legal(text) for key, text in attributes.items()}
    )
    if not verdict.passed:
        failure = xml.SubElement(case, "failure", {"message": _legal(verdict.message)})
        lines = [*map(str, verdict.differences), verdict.traceback]
        failure.text = _legal("\n".join(filter(None, lines)) or verdict.message)
    if verdict.printed:
        xml.SubElement(case, "system-out").text = _legal(verdict.printed)


def _totals(verdicts: Sequence[ValidationResult]) -> dict[str, str]:
    return {
        "tests": str(len(verdicts)),
        "failures": str(sum(not verdict.passed for verdict in verdicts)),
        "errors": "0",
        "time": f"{sum(verdict.seconds for verdict in verdicts):.3f}",
    }


def _legal(text: str) -> str:
    """Return text without the characters that XML can't hold."""
    return ILLEGAL.sub("\ufffd", text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
