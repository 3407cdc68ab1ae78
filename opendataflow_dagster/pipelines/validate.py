"""Validating a project: each transformation runs on its expected inputs."""

import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from ..dataflow.errors import DataflowError
from .annotation import PANDAS, engine_of
from .compare import Difference, differences, identical
from .expectations import copied, expectations_of
from .isolation import forget
from .project import Pipeline, Project
from .transformation import NO_STREAM, Transformation, TransformationError, load

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


def validate(project: Project, pipeline: str | None = None) -> Iterator[Verdict]:
    """Validate the project's transformations, or those of one pipeline, as they are declared."""
    forget(project.root)
    for each in project.pipelines if pipeline is None else [project.pipeline(pipeline)]:
        for name in names_of(each):
            yield validate_one(project, each, name)


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
        transformation = load(project, pipeline.slug, name)
        native = engine_of(transformation.path) != PANDAS
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
        from .native import Native

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
