"""A job as a function of DataFrames: what it takes, what it promises, how its chunks are made."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import WrongUse
from ..model import Plan
from ..store.job_policy import MOST_AT_ONCE
from ..util.text import printable

SAME, MERGE, ANY = "same", "merge", "any"
SCHEMAS = (SAME, MERGE, ANY)

FUNCTION = "dataflow_function"
"""Where something that was made of a function, such as assets of Dagster, keeps it."""


class Given(NamedTuple):
    """An argument of a job's function: the chunk, the session, the context, or a frame."""

    what: str
    datasetid: str = ""


CHUNK, SESSION, CONTEXT, INPUTS, FRAME = "chunk", "spark", "context", "inputs", "frame"
_BY_NAME = {CHUNK: CHUNK, SESSION: SESSION, CONTEXT: CONTEXT, INPUTS: INPUTS}
_BY_TYPE = {
    "Chunk": CHUNK,
    "SparkSession": SESSION,
    "AssetExecutionContext": CONTEXT,
    "OpExecutionContext": CONTEXT,
}


@dataclass(frozen=True)
class SparkJob:
    """A function that makes a chunk of frames, and how; calling it calls the function."""

    fn: Callable[..., Any]
    expect: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    threads: int = 1
    schema: str = SAME

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise WrongUse(
                f"A {type(self.fn).__name__} can't be a job: give @spark_job a function."
            )
        for name, value in (("batch", self.batch), ("threads", self.threads)):
            if not isinstance(value, int) or not 1 <= value <= MOST_AT_ONCE:
                raise WrongUse(
                    f"@spark_job({name}={value!r}) of {self.name}: give a number from 1 to "
                    f"{MOST_AT_ONCE}."
                )
        if self.batch > 1 and self.threads > 1:
            raise WrongUse(
                f"@spark_job of {self.name} has both batch and threads. Choose batch for small "
                "chunks, threads for larger ones."
            )
        if self.schema not in SCHEMAS:
            raise WrongUse(
                f"@spark_job(schema={self.schema!r}) of {self.name}: choose from "
                f"{', '.join(SCHEMAS)}."
            )

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self.fn(*args, **more)

    def arguments(self, plan: Plan) -> dict[str, Given]:
        """Parameter → what it is given; raises what says how to write it right."""
        return arguments(self.fn, plan)


def spark_job(
    fn: Callable[..., Any] | None = None,
    *,
    expect: Mapping[str, Any] | None = None,
    batch: int = 1,
    threads: int = 1,
    schema: str = SAME,
) -> Any:
    """Say how the chunks of a function of DataFrames are made.

    `expect` is what has to hold before a chunk is published. With `batch`, the function is given
    the frames of up to so many chunks at once, told apart by a column `dataid`, which it keeps:
    right for functions that work row by row, or that group by it. With `threads`, so many chunks
    are computed at once, each by itself. `schema` says what becomes of a chunk whose columns differ
    from the last chunk's: `same` refuses it, `merge` lets columns be added and widened, `any` asks
    nothing.
    """

    def made(function: Callable[..., Any]) -> SparkJob:
        return SparkJob(function, dict(expect or {}), batch, threads, schema)

    return made if fn is None else made(fn)


def as_spark_job(obj: Any) -> SparkJob:
    return obj if isinstance(obj, SparkJob) else SparkJob(obj)


def is_spark_function(obj: Any) -> bool:
    """Whether a function is one of DataFrames: it says so, or its parameters do."""
    if isinstance(obj, SparkJob):
        return True
    try:
        parameters = inspect.signature(obj).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        type_name(each) in ("DataFrame", "SparkSession") and _package(each) == "pyspark"
        for each in parameters
    )


def arguments(fn: Callable[..., Any], plan: Plan) -> dict[str, Given]:
    """Parameter → what it is given: by its annotation, by its name, or as the only one left."""
    inputs = list(plan.reads)
    by_name = {_plain(each): each for each in reversed(inputs)} | {each: each for each in inputs}
    found: dict[str, Given] = {}
    unknown = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = parameter.name
        what = _BY_TYPE.get(type_name(parameter))
        if what is None and name not in by_name and type_name(parameter) != "DataFrame":
            what = _BY_NAME.get(name)
        if what:
            found[name] = Given(what)
        elif name in by_name or _plain(name) in by_name:
            found[name] = Given(FRAME, by_name.get(name) or by_name[_plain(name)])
        elif parameter.default is parameter.empty:
            unknown.append(name)
    left = [each for each in inputs if Given(FRAME, each) not in found.values()]
    if len(unknown) == 1 and len(left) == 1:
        found[unknown.pop()] = Given(FRAME, left[0])
    if unknown:
        known = ", ".join(map(printable, inputs)) or "none"
        raise WrongUse(
            f"{getattr(fn, '__name__', fn)} has a parameter {unknown[0]!r}, and job {plan.jobid!r} "
            f"reads no such dataset (it reads: {known}). Call it like a dataset, or one of chunk, "
            "spark, inputs, context."
        )
    return found


def type_name(parameter: inspect.Parameter) -> str:
    """What a parameter is annotated as, by its last name."""
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")


def _package(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    return "pyspark" if isinstance(kind, str) else kind.__module__.partition(".")[0]


def _plain(name: str) -> str:
    """A dataset's id as a parameter may be called."""
    return "".join(each if each.isalnum() else "_" for each in name).lower()
