"""One transformation: a file with a function `run`, loaded unchanged and called."""

import ast
import inspect
import json
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from ..errors import DataflowError
from ..util.text import printable
from .project import INSTALL, LOCAL, Project
from .sandbox import INSTALLED, Prints, signals, surroundings

NO_STREAM: Any = object()


class TransformationError(DataflowError):
    """A transformation can't be loaded, or it failed."""

    def __init__(self, message: str, *, trace: str = "", printed: str = "") -> None:
        super().__init__(message)
        self.trace = trace
        self.printed = printed


class Shape(NamedTuple):
    """The parameters of a `run`."""

    least: int
    most: int | None
    """None: any number of frames."""
    stream: bool
    needs_stream: bool


class Transformation(NamedTuple):
    """A loaded transformation, called in its project's surroundings."""

    root: Path
    pipeline: str
    name: str
    path: Path
    module: ModuleType
    shape: Shape
    printed: str
    """What the file printed while it was loaded."""

    def __call__(self, frames: Sequence[Any], stream: Any = NO_STREAM) -> tuple[Any, str]:
        """Call `run` with as many of `frames` as it takes; return its result and what it printed.

        The frames aren't copied: `run` may change them.
        """
        returned, printed = self.call(frames, stream)
        return _checked_frame(returned, printed), printed

    def call(self, frames: Sequence[Any], stream: Any = NO_STREAM) -> tuple[Any, str]:
        """Return whatever `run` returns, and what it printed."""
        given = frames if self.shape.most is None else frames[: self.shape.most]
        if len(given) < self.shape.least:
            raise TransformationError(
                f"`run` takes {_frames(self.shape.least)}, but there "
                f"{'is' if len(given) == 1 else 'are'} {len(given)}."
            )
        keywords: Mapping[str, Any] = {}
        if stream is not NO_STREAM:
            if not self.shape.stream:
                raise TransformationError(
                    "`run` has no parameter `stream` for the item. Add it as the last one."
                )
            keywords = {"stream": stream}
        elif self.shape.needs_stream:
            raise TransformationError(
                "`run` needs a `stream`, but there is none. Write `stream=None`, or give samples."
            )
        with _users_code(self.root) as prints:
            returned = self.module.run(*given, **keywords)
        if inspect.iscoroutine(returned):
            returned.close()  # otherwise Python warns about it
            raise TransformationError(
                "`run` is `async`, but nothing awaits it. Write a plain `def run`, which may "
                "call `asyncio.run`.",
                printed=prints.text,
            )
        return returned, prints.text


def supported_engine(project: Project, slug: str, name: str) -> str:
    """Return the engine of a transformation; one that the project's engine can't run is refused."""
    path = project.transformation_file(slug, name)
    engine = engine_of(path)
    if engine == PANDAS_ON_SPARK:
        raise TransformationError(
            f"{path.relative_to(project.root)}: `run` takes pyspark.pandas.DataFrame, and "
            "pandas-on-Spark isn't supported any more. Annotate its first parameter as "
            "pandas.DataFrame or as pyspark.sql.DataFrame."
        )
    if engine == SPARK and project.engine == LOCAL:
        raise TransformationError(
            f"{path.relative_to(project.root)}: `run` takes pyspark.sql.DataFrame, but the local "
            "engine runs only transformations of pandas. Annotate its first parameter as "
            "pandas.DataFrame, or run the project on Spark, which is the default engine: leave out "
            "`engine: local` and --engine local."
        )
    return engine


def load(project: Project, slug: str, name: str) -> Transformation:
    """Load a transformation's file, byte for byte."""
    path = project.transformation_file(slug, name)
    shown = path.relative_to(project.root)
    if not path.is_file():
        raise TransformationError(f"{shown} doesn't exist, but project.yml names it.")
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise DataflowError(f"Transformations need pandas, which is missing. {INSTALL}") from error

    module = ModuleType(f"pipelines.{slug}.{name}")
    module.__file__ = str(path)
    module.__package__ = f"pipelines.{slug}"
    # Existing files may rely on these three: the original's server imports them for its files.
    module.__dict__.update(inspect=inspect, json=json, pd=pandas)
    with _users_code(project.root) as prints:
        sys.modules[module.__name__] = module
        try:
            exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            sys.modules.pop(module.__name__, None)
            raise
    run = module.__dict__.get("run")
    if run is None:
        raise TransformationError(f"{shown} has no function `run`.", printed=prints.text)
    if not callable(run):
        raise TransformationError(f"`run` of {shown} isn't a function.", printed=prints.text)
    return Transformation(project.root, slug, name, path, module, _shape(run, shown), prints.text)


@contextmanager
def _users_code(root: Path) -> Iterator[Prints]:
    """Run the user's code in its project's surroundings; its exceptions are its own failure.

    Except for an interruption, which a signal handler raises in the middle of it.
    """
    prints = Prints()
    with surroundings(root), signals() as came:
        try:
            with prints.taken():
                yield prints
        except BaseException as error:
            if came() and not isinstance(error, Exception | SystemExit):
                raise
            raise _failed(error, root, prints.text) from error


def _shape(run: Any, shown: Path) -> Shape:
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(run).parameters.values())
    except (TypeError, ValueError):
        return Shape(0, None, True, False)
    placed = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    by_place = [p for p in parameters if p.kind in placed]
    names = [p.name for p in by_place]
    if "stream" in names[:-1]:
        raise TransformationError(
            f"`stream` isn't the last parameter of `run` in {shown}. Move it to the end."
        )
    frames = [p for p in by_place if p.name != "stream"]
    stream = next((p for p in parameters if p.name == "stream"), None)
    if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        most = None
    else:
        most = len(frames)
    least = sum(p.default is kinds.empty for p in frames)
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    needs = stream is not None and stream.default is kinds.empty
    return Shape(least, most, stream is not None or takes_any, needs)


def _checked_frame(returned: Any, printed: str) -> Any:
    import pandas

    if returned is None:
        raise TransformationError("`run` returns nothing. End it with: return df", printed=printed)
    if not isinstance(returned, pandas.DataFrame):
        raise TransformationError(
            f"`run` returns a {type(returned).__name__}, not a DataFrame.", printed=printed
        )
    return returned


def _failed(error: BaseException, root: Path, printed: str) -> TransformationError:
    """The error in one line, with the place in the user's file and a traceback from there."""
    top = _first_of(error.__traceback__, root)
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({_short(error.filename, root)}:{error.lineno})"
    else:
        own = [entry for entry in traceback.extract_tb(top) if _under(entry.filename, root)]
        if own:
            where = f" ({_short(own[-1].filename, root)}:{own[-1].lineno})"
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    line = next(
        (line_of_error for line_of_error in said.splitlines() if line_of_error.strip()), ""
    ).strip()
    message = f"{type(error).__name__}{': ' if line else ''}{printable(line)}{where}"
    return TransformationError(message, trace=_trace(error, root), printed=printed)


def _trace(error: BaseException, root: Path, depth: int = 5) -> str:
    """The traceback from the user's file on, with those causes that were in user code, too."""
    top = _first_of(error.__traceback__, root)
    trace = "".join(traceback.format_exception(type(error), error, top, chain=False))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or not depth or _first_of(cause.__traceback__, root) is None:
        return trace
    return f"{_trace(cause, root, depth - 1)}\nThen:\n\n{trace}"


def _first_of(trace: TracebackType | None, root: Path) -> TracebackType | None:
    while trace is not None and not _under(trace.tb_frame.f_code.co_filename, root):
        trace = trace.tb_next
    return trace


def _under(file: str, root: Path) -> bool:
    """Whether a file is the user's: our package, or an environment, may be in the project too."""
    path = Path(file)
    if not path.is_relative_to(root) or Path(__file__).parent in path.parents:
        return False
    return not INSTALLED & set(path.relative_to(root).parts)


def _short(file: str, root: Path) -> str:
    return str(Path(file).relative_to(root)) if Path(file).is_relative_to(root) else file


def _frames(number: int) -> str:
    return f"{number} frame{'' if number == 1 else 's'}"


# What the parameters of a `run` require, read without executing its file: an engine, or items.


PANDAS, SPARK = "pandas", "spark"
PANDAS_ON_SPARK = "pandas-on-spark"
"""An annotation that we recognize only to refuse it: it once selected an engine of its own."""

STARRED = {"pandas", "pyspark.pandas", "pyspark.sql"}
"""The modules that bring a DataFrame by `import *`."""


def engine_of(file: Path | str | ModuleType) -> str:
    """Return the engine that the first parameter of `run` names; the file isn't executed.

    If that is unclear, it is pandas: for a file with an error, or a `run` defined in another file.
    """
    path = getattr(file, "__file__", None) if isinstance(file, ModuleType) else file
    tree = _parsed(Path(path or ""))
    run = tree and _function(tree.body, "run", tree.body)
    if tree is None or not isinstance(run, ast.arguments):
        return PANDAS
    first, *_ = [*run.posonlyargs, *run.args, run.vararg, None]
    if first is None or first.annotation is None:
        return PANDAS
    return _engine(first.annotation, _names(tree)) or PANDAS


def takes_stream(file: Path, root: Path, name: str = "run", depth: int = 20) -> bool | None:
    """Whether `run` in a project's file has a parameter `stream`; None: unreadable.

    If another file of the project defines the function, that file is read.
    """
    tree = _parsed(file)
    found = tree and _function(tree.body, name, tree.body)
    if isinstance(found, Imported):
        there = found.file(file, root)
        return takes_stream(there, root, found.name, depth - 1) if there and depth else None
    if found is None:
        return None
    named = [*found.posonlyargs, *found.args, *found.kwonlyargs]
    return any(argument.arg == "stream" for argument in named)


class Imported(NamedTuple):
    """A function that another module defines."""

    module: str
    level: int
    name: str

    def file(self, by: Path, root: Path) -> Path | None:
        """Return the module's file, if it belongs to the project."""
        base = by.parents[self.level - 1] if self.level else root
        place = base.joinpath(*self.module.split(".")) if self.module else base
        for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if path.is_file() and path.is_relative_to(root):
                return path
        return None


def _parsed(file: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes are reported when it runs
            return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function(
    body: Sequence[ast.stmt], name: str, module: Sequence[ast.stmt], depth: int = 20
) -> ast.arguments | Imported | None:
    """Return the parameters of the function that some statements leave under a name.

    Of two branches, the first that defines it counts; `run = go` has the parameters of `go`.
    """
    if depth == 0:
        return None
    for node in reversed(body):
        found = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node.args
        if isinstance(node, ast.ImportFrom):
            for known in node.names:
                if (known.asname or known.name) == name:
                    return Imported(node.module or "", node.level, known.name)
        if name in _assigned(node) and isinstance(node, ast.Assign | ast.AnnAssign):
            if isinstance(node.value, ast.Name):
                found = _function(module, node.value.id, module, depth - 1)
            elif isinstance(node.value, ast.Lambda):
                return node.value.args
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in _branches(node):
                found = found or _function(inner, name, module, depth - 1)
        if found is not None:
            return found
    return None


def _assigned(node: ast.stmt) -> list[str]:
    """Return the names to which a statement assigns the value on its right."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _branches(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the bodies of an `if`, `try` or `with`, the likeliest first, without dead branches."""
    test = node.test if isinstance(node, ast.If) else None
    named = getattr(test, "id", None) or getattr(test, "attr", None)
    unmet = named == "TYPE_CHECKING" or (test and ast.unparse(test) == "__name__ == '__main__'")
    names = ["orelse"] if unmet else ["finalbody", "body", "orelse"]
    found = [getattr(node, name, []) for name in names]
    return found + [handler.body for handler in getattr(node, "handlers", [])]


def _names(tree: ast.Module) -> dict[str, str | ast.expr]:
    """Return what the names of a file mean: an imported dotted name, or an expression."""
    found: dict[str, str | ast.expr] = {}
    for node in ast.walk(tree):  # imports may be under `if TYPE_CHECKING:`
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                found[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                if name.name != "*":
                    found[name.asname or name.name] = f"{node.module}.{name.name}"
                elif node.module in STARRED:
                    found["DataFrame"] = f"{node.module}.DataFrame"
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
        elif type(node).__name__ == "TypeAlias":  # `type Frame = …` in Python 3.12
            found[node.name.id] = node.value  # pyright: ignore
    return found


def _engine(given: ast.expr, known: dict[str, str | ast.expr], depth: int = 20) -> str | None:
    """Return the engine that an annotation names anywhere, as in `Optional[ps.DataFrame]`."""
    if depth == 0:
        return None
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        try:
            return _engine(ast.parse(given.value.strip(), mode="eval").body, known, depth - 1)
        except (SyntaxError, ValueError):
            return None
    if isinstance(given, ast.Name):
        meant = known.get(given.id)
        if isinstance(meant, ast.expr):
            rest = {name: value for name, value in known.items() if name != given.id}
            return _engine(meant, rest, depth - 1)
    if isinstance(given, ast.Name | ast.Attribute):
        return _of_name(_dotted(given, known))
    for inner in ast.iter_child_nodes(given):
        if isinstance(inner, ast.expr) and (found := _engine(inner, known, depth - 1)):
            return found
    return None


def _dotted(given: ast.expr, known: dict[str, str | ast.expr]) -> str:
    if isinstance(given, ast.Attribute):
        return f"{_dotted(given.value, known)}.{given.attr}"
    meant = known.get(given.id, given.id) if isinstance(given, ast.Name) else ""
    return meant if isinstance(meant, str) else ""


def _of_name(name: str) -> str | None:
    if not name.endswith(".DataFrame"):
        return None
    if name.startswith("pyspark.pandas."):
        return PANDAS_ON_SPARK
    if name.startswith("pyspark.sql."):
        return SPARK
    return PANDAS if name.startswith("pandas.") else None


# What a transformation's file expects: inputs, stream samples, and the output.


class Expectations(NamedTuple):
    """Frames that belong to the caller: changing them changes nothing in the file's module."""

    inputs: list[Any]
    output: Any
    samples: list[Any] | None
    """Items to replay one by one; None if the file has no `stream`."""


def expectations_of(module: ModuleType) -> Expectations:
    """Read a file's expectations, in any of the supported forms."""
    inputs = _read(module, ("expected_inputs", "expected_input"))
    if not inputs:
        raise TransformationError("`expected_inputs` is empty: there is nothing to run with.")
    outputs = _read(module, ("expected_output",))
    if len(outputs) > 1:
        raise TransformationError(
            f"`expected_output` has {len(outputs)} frames, but `run` returns one."
        )
    return Expectations(inputs, outputs[0] if outputs else _frame_of([], ""), _samples(module))


def copied(frame: Any) -> Any:
    """Return a copy that shares nothing, not even the lists in its cells."""
    import pandas

    copied = frame.copy(deep=True)
    for place, kind in enumerate(copied.dtypes):
        if str(kind) == "object":
            cells = [deepcopy(cell) for cell in copied.iloc[:, place]]
            copied.isetitem(place, pandas.Series(cells, index=copied.index, dtype=object))
    return copied


def _read(module: ModuleType, names: tuple[str, ...]) -> list[Any]:
    for name in names:
        given = module.__dict__.get(name)
        if given is not None:
            return [_frame_of(rows, name) for rows in _listed(given, name)]
    raise TransformationError(f"`{names[0]}` is missing: nothing is tested without it.")


def _listed(given: Any, name: str) -> list[Any]:
    """Return one element per frame."""
    import pandas

    if isinstance(given, pandas.DataFrame | Mapping):
        return [given]
    if not isinstance(given, list | tuple):
        raise TransformationError(
            f"`{name}` is a {type(given).__name__}, not a list of dicts or a DataFrame."
        )
    if given and all(isinstance(row, Mapping) for row in given):
        return [given]
    return list(given)


def _frame_of(given: Any, name: str) -> Any:
    import pandas

    if isinstance(given, pandas.DataFrame):
        return copied(given)
    if isinstance(given, Mapping):
        # An early form: one row of values, or columns of values.
        flat = not any(isinstance(value, list | tuple | pandas.Series) for value in given.values())
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
    return [dict(deepcopy(item)) for item in given]
