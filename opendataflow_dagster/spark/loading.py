"""A job's function, by the name that a command line gives it."""

import importlib
import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

from ..dataflow.chunk import reason_of
from ..dataflow.errors import DataflowError, WrongUse
from ..dataflow.modules import import_beside, module_of_file
from .jobs import FUNCTION, SparkJob, as_spark_job
from .troubles import in_a_line


def load_job(named: str, begin: Callable[[], Any] | None = None) -> tuple[SparkJob, str]:
    """The job that `module:function` or `path/to/file.py:function` is, and the function's name.

    `begin` starts a session, if the module wants one while it is imported: for `F.col` at its top.
    """
    module, colon, function = named.rpartition(":")
    if not (colon and module and function):
        raise WrongUse(
            f"--spark {named!r} names no function. Write module:function, or path/file.py:function."
        )
    found = _module(module, named, begin)
    if not hasattr(found, function):
        there = [
            name
            for name, value in vars(found).items()
            if callable(value) and not name.startswith("_") and not inspect.isclass(value)
        ]
        raise WrongUse(
            f"{module} has no function {function!r} (it has: {', '.join(sorted(there)) or 'none'})."
        )
    return as_spark_job(_function(getattr(found, function), named)), function


def _function(obj: Any, named: str) -> Any:
    """What makes the chunks: of assets, the function that they were made of."""
    obj = getattr(obj, FUNCTION, obj)
    kind = type(obj)
    if callable(obj) and not inspect.isclass(obj) and _package(kind) != "dagster":
        return obj
    what = "a class" if inspect.isclass(obj) else f"of type {kind.__name__}"
    raise WrongUse(
        f"--spark {named!r} is {what}, not a function. Name a function of DataFrames, or one "
        "below @dataflow_assets."
    )


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _module(module: str, named: str, begin: Callable[[], Any] | None) -> Any:
    """A module by its name, or by its file, with what lies beside it importable."""
    path = os.path.abspath(module)
    is_file = module.endswith(".py") or "/" in module
    if is_file and not os.path.isfile(path):
        raise WrongUse(f"--spark {named!r}: there is no file {path}.")
    try:
        if is_file:
            module = module_of_file(path)
        else:
            import_beside(os.getcwd())
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise WrongUse(
                f"--spark {named!r} imports {error.name!r}, which isn't there."
            ) from None
        raise WrongUse(
            f"--spark {named!r}: there is no module {module!r} here. Run it where the file is, or "
            "write path/file.py:function."
        ) from None
    except SyntaxError as error:
        raise WrongUse(f"--spark {named!r}: {error.msg} in line {error.lineno}.") from None
    except DataflowError:
        raise
    except (Exception, SystemExit) as error:
        if not (begin and _wants_session(error)):
            raise WrongUse(
                f"--spark {named!r} can't be imported: {_where(error)}: "
                f"{in_a_line(error) or reason_of(error)}"
            ) from None
    begin()
    return _module(path if is_file else module, named, None)


def _wants_session(error: BaseException) -> bool:
    """Whether pyspark raised it for want of a session: `F.col` merely asserts that there is one."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    asserted = isinstance(error, AssertionError) and f"{os.sep}pyspark{os.sep}" in last
    return asserted or "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error)


def _where(error: BaseException) -> str:
    """The file and line of the user's in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.dirname(__file__))
    theirs = [
        each
        for each in frames
        if not each.filename.startswith(("<frozen", ours, os.path.dirname(importlib.__file__)))
        and f"{os.sep}site-packages{os.sep}" not in each.filename
    ]
    last = (theirs or frames)[-1]
    return f"{os.path.relpath(last.filename)}:{last.lineno}"
