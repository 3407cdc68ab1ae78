"""Validating a project: its declaration, and each transformation on its expected inputs."""

import re
import time
import xml.etree.ElementTree as xml
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.settings import BUILT_IN
from ..errors import DataflowError, NoDatabase
from ..model import Say
from ..store.opening import open_from
from ..util.text import first_line, typed
from .compare import Difference, differences, identical
from .convert import as_pandas
from .engine import Engine
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


MAX_DIFFERENCES = 20
"""Differences that are kept of one transformation."""


class Verdict(NamedTuple):
    """How one transformation did; without a name, what is wrong with the whole pipeline."""

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
) -> Iterator[Verdict]:
    """Validate the project's pipelines, or one of them, as they are declared.

    Sources that are no files are looked for in the tables that are configured.
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
    """The pipelines of a project, each with all that is wrong around its transformations.

    A folder of transformations that project.yml doesn't name is one, too.
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
                    f"{where}: source {source!r} is {file}, which doesn't exist. Put the file "
                    f"there, or run: odf dataset add {typed(source)} --hostname /path/FILE.csv"
                )
        for file in _unlisted(project, pipeline.slug, pipeline.transformations):
            trouble.append(
                f"{where}: {file.relative_to(project.root)} isn't one of the `transformations`. "
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
    """The sources that the tables know a place or a writer of; None: they can't be asked."""
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
        say(f"Sources that are no files weren't looked for. {first_line(error)}.")
        return None
    finally:
        if store is not None:
            store.close()


def _joined(trouble: Sequence[str]) -> str | None:
    """All that is wrong in one line."""
    return "; ".join([*(fault.rstrip(".") for fault in trouble[:-1]), *trouble[-1:]]) or None


def _is_there(project: Project, source: str, elsewhere: Collection[str]) -> bool:
    """Whether a source is a file, is made by a pipeline, or is known to the tables."""
    if source in elsewhere or project.source_file(source).is_file():
        return True
    return bool(makers_of(project, source))


def _unlisted(project: Project, slug: str, listed: Sequence[str]) -> list[Path]:
    """The transformations in a pipeline's folder that it doesn't list, and no file imports."""
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
    """What there is to validate: None stands for the pipeline's own trouble."""
    return [*([None] if pipeline.trouble else []), *dict.fromkeys(pipeline.transformations)]


def validate_one(project: Project, pipeline: Pipeline, name: str | None) -> Verdict:
    """Run one transformation on its expected inputs, and judge what it returns."""
    if name is None:
        return Verdict(pipeline.slug, None, "project.yml", message=pipeline.trouble or "")
    file = project.transformation_file(pipeline.slug, name).relative_to(project.root)
    verdict = Verdict(pipeline.slug, name, str(file))
    start, printed = time.perf_counter(), ""
    try:
        native = supported_engine(project, pipeline.slug, name) != PANDAS
        transformation = load(project, pipeline.slug, name)
        if not native:  # else the file is loaded once more, where Spark is
            printed = transformation.printed
        found, said = _judge(project, transformation, native)
        printed += said
        first = tuple(islice(found, MAX_DIFFERENCES))
        many = len(first) + sum(1 for _ in found)
        verdict = verdict._replace(message=_in_short(first, many), differences=first)
    except TransformationError as error:
        printed += error.printed
        verdict = verdict._replace(message=str(error), traceback=error.trace)
    except DataflowError as error:  # of Spark, which some are for
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
        raise TransformationError("`stream` is empty: there is nothing to run on.")
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
            "The output equals the input, so this tests nothing. Give an input that changes.",
            printed=printed,
        )
    return chain([one] if one else [], found), printed


def _in_short(found: tuple[Difference, ...], many: int) -> str:
    if not found:
        return ""
    more = f" (and {many - 1} more)" if many > 1 else ""
    return f"{found[0]}{more}"


# Validating transformations of Spark's own frames: on a session of this process.


class Native:
    """A transformation of Spark's own frames, called like one of pandas' frames."""

    def __init__(self, project: Project, transformation: Transformation) -> None:
        self.project, self.of = project, transformation

    def __call__(self, frames: Sequence[Any], item: Any) -> tuple[Any, str]:
        """The frame, as one of pandas, that it makes of some, and what it printed."""
        with Engine(self.project, _session) as engine:
            ran = engine.run(self.of.pipeline, self.of.name, frames, item)
            return as_pandas(ran.frame), ran.printed

    def differences(self, expected: Any, got: Any) -> Iterator[Difference]:
        """What differs; rows may come in any order, as Spark promises none."""
        if next(differences(expected, got), None) is not None:
            yield from differences(_in_order(expected), _in_order(got))


def _session() -> "SparkSession":
    from ..spark.session import spark_session

    return spark_session(app="odf validate", short=True)


def _in_order(frame: Any) -> Any:
    """The rows in an order that depends on nothing but what is in them."""
    columns = sorted(frame.columns, key=str)
    keys = [[_key(cell) for cell in frame[column]] for column in columns]
    places = sorted(range(len(frame)), key=lambda place: [key[place] for key in keys])
    return frame.iloc[places]


def _key(cell: Any) -> str:
    import pandas

    if pandas.api.types.is_scalar(cell) and pandas.isna(cell):
        return ""
    if isinstance(cell, int | float):  # 1 and 1.0 are the same
        return f"{cell:.9g}"
    return str(cell)


# How verdicts are told: lines for people, objects for programs, JUnit's XML for CI.


ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MAX_PRINTED_CHARACTERS = 2000
"""Letters that are shown of what a failed transformation printed; JSON and XML have all."""


def line_of(verdict: Verdict) -> str:
    """`ok` or `FAILED`, the name, and what is wrong."""
    if verdict.passed:
        return f"ok      {verdict.name}"
    return f"FAILED  {verdict.name}: {verdict.message}"


def details_of(verdict: Verdict) -> Iterator[str]:
    """What there is to say of a failure beyond its line."""
    if len(verdict.differences) > 1:
        yield from (str(difference) for difference in verdict.differences)
    yield from verdict.traceback.rstrip("\n").splitlines()
    printed = verdict.printed.strip("\n")
    if printed:
        yield "It printed:"
        cut = len(printed) > MAX_PRINTED_CHARACTERS
        yield from ((["…"] if cut else []) + printed[-MAX_PRINTED_CHARACTERS:].splitlines())


def summary_of(verdicts: Sequence[Verdict]) -> str:
    """`3 transformations in 2 pipelines: all pass.`"""
    failed = sum(not verdict.passed for verdict in verdicts)
    of = len({verdict.pipeline for verdict in verdicts})
    many = sum(verdict.transformation is not None for verdict in verdicts)
    what = f"{_count(many, 'transformation')} in {_count(of, 'pipeline')}"
    return f"{what}: {_count(failed, 'failure') if failed else 'all pass'}."


def object_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict for JSON."""
    return {
        "pipeline": verdict.pipeline,
        "transformation": verdict.transformation,
        "file": verdict.file,
        "status": "passed" if verdict.passed else "failed",
        "seconds": round(verdict.seconds, 4),
        "message": verdict.message or None,
        "differences": [difference.told() for difference in verdict.differences],
        "traceback": verdict.traceback or None,
        "printed": verdict.printed,
    }


def write_junit(verdicts: Sequence[Verdict], file: Path) -> None:
    """Write JUnit's XML: a suite for each pipeline."""
    root = xml.Element("testsuites", _totals(verdicts))
    for pipeline in dict.fromkeys(verdict.pipeline for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.pipeline == pipeline]
        suite = xml.SubElement(root, "testsuite", {"name": _legal(pipeline)} | _totals(own))
        for verdict in own:
            _case(suite, verdict)
    xml.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def _case(suite: xml.Element, verdict: Verdict) -> None:
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


def _totals(verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {
        "tests": str(len(verdicts)),
        "failures": str(sum(not verdict.passed for verdict in verdicts)),
        "errors": "0",
        "time": f"{sum(verdict.seconds for verdict in verdicts):.3f}",
    }


def _legal(text: str) -> str:
    """Text without the letters that XML can't hold."""
    return ILLEGAL.sub("\ufffd", text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
