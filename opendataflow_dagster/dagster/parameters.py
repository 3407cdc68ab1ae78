"""What a job's function gets besides its chunk: the context, its config and resources."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import dagster as dg

from ..chunk import Chunk
from ..errors import WrongUse

CONTEXT_NAMES = frozenset({"context", "ctx", "_context", "_", "__"})
"""Parameters without annotation that receive the context, if another one is the chunk."""

CONTEXT_TYPES = (dg.AssetExecutionContext, dg.OpExecutionContext)

_RESOURCE_MARK = typing.get_args(dg.ResourceParam[Any])[1:]
"""The metadata that `dg.ResourceParam` adds to a type."""

SIGNATURE = "__signature__"
"""The attribute with which a function shows a different signature."""

RESOURCE_BASES = frozenset(
    {"ConfigurableResourceFactory", "TreatAsResourceParam", "ResourceDefinition"}
)
"""The classes that Dagster accepts as resources; clients of Pipes use a private one."""

ALLOWED = (
    "It may take (chunk: Chunk, context: dg.AssetExecutionContext, config: YourConfig, name: "
    "YourResource): YourConfig is a class of dg.Config, YourResource one of "
    "dg.ConfigurableResource, or dg.ResourceParam[…]. Others need a default."
)


class Given(NamedTuple):
    """The parameters of a function that Dagster fills in, and how the function is called."""

    fn: Callable[..., Any]
    parameters: list[inspect.Parameter]
    """`config`, and resources by their keys: as parameters of the step."""
    context: str | None = None
    """The name of the parameter that receives the context."""
    chunk: str | None = None
    """The name of the parameter that receives the chunk, unless it is the first one."""

    def bind(self, context: Any, values: Mapping[str, Any]) -> Callable[[Chunk], Any]:
        """Return the function with only the chunk left to pass."""
        more = {parameter.name: values[parameter.name] for parameter in self.parameters}
        if self.context:
            more[self.context] = context
        if not (more or self.chunk):
            return self.fn
        if self.chunk:
            return lambda chunk: self.fn(**{str(self.chunk): chunk}, **more)
        return lambda chunk: self.fn(chunk, **more)


def given_to(fn: Callable[..., Any], jobid: str) -> Given:
    """Return what a function of a chunk receives; raises an error that shows how to write it."""
    parameters = _signature(fn)
    if parameters is None:
        return Given(fn, [])
    by_dagster = filled_by_dagster(fn, jobid)
    others = [each for each in parameters if each not in by_dagster]
    context = next((each for each in others if _is_context(each, parameters[0])), None)
    others = [each for each in others if each is not context]
    chunk = next(
        (each for each in others if each.annotation is Chunk or each.name == "chunk"), None
    )
    positional = [each for each in others if each.kind is not each.KEYWORD_ONLY]
    chunk = chunk or next(iter(positional), None)
    if chunk is None or chunk.kind is chunk.VAR_KEYWORD:
        raise WrongUse(f"Function {_name(fn)} of job {jobid!r} takes no chunk. {ALLOWED}")
    for each in others:
        _refuse_unknown(each, chunk, fn, jobid)
    for each in [*by_dagster, *filter(None, [context])]:
        if each.kind is each.POSITIONAL_ONLY:
            raise WrongUse(
                f"Function {_name(fn)} of job {jobid!r} gets {each.name!r} by name. Remove the "
                "slash after that parameter."
            )
    is_first = chunk is parameters[0]
    return Given(fn, by_dagster, context and context.name, None if is_first else chunk.name)


def filled_by_dagster(fn: Callable[..., Any], jobid: str) -> list[inspect.Parameter]:
    """Return the config and the resources among a function's parameters, by annotation."""
    found = []
    for each in _signature(fn) or ():
        is_config = isinstance(each.annotation, type) and issubclass(each.annotation, dg.Config)
        if _is_resource(each.annotation):  # a resource is a Config, too
            found.append(each)
        elif is_config and each.name != "config":
            raise WrongUse(
                f"Parameter {each.name!r} of function {_name(fn)} of job {jobid!r} is a "
                f"{each.annotation.__name__}, which is a dg.Config. Name it `config`."
            )
        elif is_config:
            found.append(each)
    return found


def without(fn: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> Any:
    """Return a function whose signature omits the parameters that `filled` fills in."""
    return filled(fn, dict.fromkeys(each.name for each in parameters))


def filled(fn: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Return a function with some parameters filled in, which its signature doesn't show."""
    if not values:
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **more: Any) -> Any:
        return fn(*args, **values, **more)

    signature = inspect.signature(fn)
    left = [each for name, each in signature.parameters.items() if name not in values]
    setattr(call, SIGNATURE, signature.replace(parameters=left))
    return call


def as_keywords(
    parameters: Iterable[inspect.Parameter], resources: Iterable[str]
) -> list[inspect.Parameter]:
    """Parameters for the step's function, from which Dagster learns its config and resources.

    Dagster wants all resources as parameters, or none.
    """
    wanted = {each.name: each.replace(kind=each.KEYWORD_ONLY) for each in parameters}
    if any(_is_resource(each.annotation) for each in wanted.values()):
        for key in sorted(resources):
            mine = inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, annotation=dg.ResourceParam[Any]
            )
            wanted.setdefault(key, mine)
    return list(wanted.values())


def _signature(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function, with their annotations evaluated if possible."""
    for evaluate in (True, False):
        try:
            return list(inspect.signature(fn, eval_str=evaluate).parameters.values())
        except NameError:  # an annotation that only type checkers import
            continue
        except (TypeError, ValueError):  # a function written in C
            return None
    return None


def _refuse_unknown(
    parameter: inspect.Parameter, chunk: inspect.Parameter, fn: Callable[..., Any], jobid: str
) -> None:
    is_optional = parameter.default is not parameter.empty
    if (
        parameter is chunk
        or is_optional
        or parameter.kind
        in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
    ):
        return
    raise WrongUse(
        f"Function {_name(fn)} of job {jobid!r} has a parameter {parameter.name!r} that "
        f"nothing provides. {ALLOWED}"
    )


def _is_context(parameter: inspect.Parameter, first: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        is_named = parameter.name in CONTEXT_NAMES
        return is_named and (parameter is not first or parameter.name == "context")
    names = {each.__name__ for each in CONTEXT_TYPES}
    by_text = isinstance(annotation, str) and annotation.rpartition(".")[2] in names
    return by_text or annotation in CONTEXT_TYPES


def _is_resource(annotation: Any) -> bool:
    """Whether Dagster accepts a parameter with this annotation as a resource."""
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[1:] == _RESOURCE_MARK
    kind = typing.get_origin(annotation) or annotation
    bases = {base.__name__ for base in kind.__mro__} if isinstance(kind, type) else set()
    return not bases.isdisjoint(RESOURCE_BASES)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
