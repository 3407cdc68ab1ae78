"""What a transformation's file expects: inputs, stream samples, and the output."""

from collections.abc import Mapping
from copy import deepcopy
from types import ModuleType
from typing import Any, NamedTuple

from .transformation import TransformationError


class Expectations(NamedTuple):
    """Frames that are the caller's own: changing them changes nothing in the file's module."""

    inputs: list[Any]
    output: Any
    samples: list[Any] | None
    """Items to replay one by one; None if the file has no `stream`."""


def expectations_of(module: ModuleType) -> Expectations:
    """Read a file's expectations, in any form that they may have."""
    inputs = _read(module, ("expected_inputs", "expected_input"))
    if not inputs:
        raise TransformationError("`expected_inputs` is empty: there is nothing to run on.")
    outputs = _read(module, ("expected_output",))
    if len(outputs) > 1:
        raise TransformationError(
            f"`expected_output` has {len(outputs)} frames, but `run` returns one."
        )
    return Expectations(inputs, outputs[0] if outputs else _frame([], ""), _samples(module))


def copied(frame: Any) -> Any:
    """A copy that shares nothing, not even the lists in its cells."""
    import pandas

    made = frame.copy(deep=True)
    for place, kind in enumerate(made.dtypes):
        if str(kind) == "object":
            cells = [deepcopy(each) for each in made.iloc[:, place]]
            made.isetitem(place, pandas.Series(cells, index=made.index, dtype=object))
    return made


def _read(module: ModuleType, names: tuple[str, ...]) -> list[Any]:
    for name in names:
        given = module.__dict__.get(name)
        if given is not None:
            return [_frame(each, name) for each in _listed(given, name)]
    raise TransformationError(f"`{names[0]}` is missing: without it nothing is tested.")


def _listed(given: Any, name: str) -> list[Any]:
    """One element per frame."""
    import pandas

    if isinstance(given, pandas.DataFrame | Mapping):
        return [given]
    if not isinstance(given, list | tuple):
        raise TransformationError(
            f"`{name}` is a {type(given).__name__}, not a list of dicts or a DataFrame."
        )
    if given and all(isinstance(each, Mapping) for each in given):
        return [given]
    return list(given)


def _frame(given: Any, name: str) -> Any:
    import pandas

    if isinstance(given, pandas.DataFrame):
        return copied(given)
    if isinstance(given, Mapping):
        # An early form: one row of values, or columns of values.
        flat = not any(isinstance(each, list | tuple | pandas.Series) for each in given.values())
        given = [given] if flat else given
    elif not isinstance(given, list | tuple) or not all(isinstance(x, Mapping) for x in given):
        raise TransformationError(
            f"`{name}` must hold lists of dicts, or DataFrames, not {type(given).__name__}."
        )
    else:
        given = list(given)
    try:
        return pandas.DataFrame(deepcopy(given))
    except (TypeError, ValueError) as error:
        raise TransformationError(f"`{name}` isn't a table: {error}.") from error


def _samples(module: ModuleType) -> list[Any] | None:
    import pandas

    given = module.__dict__.get("stream")
    if given is None:
        return None
    if isinstance(given, list | tuple) and given and not isinstance(given[0], Mapping):
        given = given[0]  # a list with one list, or with one DataFrame
    if isinstance(given, pandas.DataFrame):
        given = given.to_dict("records")
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list | tuple) or not all(isinstance(x, Mapping) for x in given):
        raise TransformationError("`stream` must be a list of dicts, one for each item.")
    return [dict(deepcopy(each)) for each in given]
