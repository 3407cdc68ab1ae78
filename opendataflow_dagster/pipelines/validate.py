"""Validating a project: its declaration, and each transformation on its expected inputs."""

import re
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from ..config.settings import BUILT_IN
from ..errors import DataflowError, NoDatabase
from ..model import Say
from ..store.opening import open_from
from ..util.text import first_line, typed
from .annotation import PANDAS, takes_stream
from .compare import Difference, differences, identical
from .examples import copied, expectations_of
from .jobs import known_of, makers_of
from .project import FILE, Pipeline, Project
from .project_settings import project_settings
from .sandbox import forget
from .transformation import (
    NO_STREAM,
    Transformation,
    TransformationError,
    load,
    supported_engine,
)

MOST = 20
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
    for each in examined(project, config, say=say):
        if pipeline in (None, each.slug):
            for name in names_of(each):
                yield validate_one(project, each, name)


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
    return "; ".join([*(each.rstrip(".") for each in trouble[:-1]), *trouble[-1:]]) or None


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
    lines = {each: each.read_text(errors="replace") for each in others}
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
        first = tuple(islice(found, MOST))
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
        from .spark_validation import Native

        run = Native(project, transformation)
        compare = run.differences
    printed, output = "", None
    frames = [copied(each) for each in inputs]
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
