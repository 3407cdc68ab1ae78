"""One transformation: a file with a function `run`, loaded as it is, and called."""

import inspect
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from ..errors import DataflowError
from ..util.text import printable
from .annotation import PANDAS_ON_SPARK, engine_of
from .captured_output import Prints
from .interruption import signals
from .project import INSTALL, Project
from .sandbox import INSTALLED, surroundings

NO_STREAM: Any = object()


class TransformationError(DataflowError):
    """A transformation can't be loaded, or has failed."""

    def __init__(self, message: str, *, trace: str = "", printed: str = "") -> None:
        super().__init__(message)
        self.trace = trace
        self.printed = printed


class Shape(NamedTuple):
    """What a `run` takes."""

    least: int
    most: int | None
    """None: any number of frames."""
    stream: bool
    needs_stream: bool


class Transformation(NamedTuple):
    """A loaded transformation, to be called in its project's surroundings."""

    root: Path
    pipeline: str
    name: str
    path: Path
    module: ModuleType
    shape: Shape
    printed: str
    """What the file printed when it was loaded."""

    def __call__(self, frames: Sequence[Any], stream: Any = NO_STREAM) -> tuple[Any, str]:
        """The DataFrame that `run` makes of as many of `frames` as it takes, and what it printed.

        The frames are handed over as they are: `run` may change them.
        """
        made, printed = self.call(frames, stream)
        return _frame(made, printed), printed

    def call(self, frames: Sequence[Any], stream: Any = NO_STREAM) -> tuple[Any, str]:
        """What `run` returns, whatever it is, and what it printed."""
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
                "`run` needs a `stream`, and there is none. Write `stream=None`, or give samples."
            )
        with _users_code(self.root) as prints:
            made = self.module.run(*given, **keywords)
        if inspect.iscoroutine(made):
            made.close()  # else Python warns of it
            raise TransformationError(
                "`run` is `async`, and nothing awaits it. Write a plain `def run`, which may "
                "call `asyncio.run`.",
                printed=prints.text,
            )
        return made, prints.text


def supported_engine(project: Project, slug: str, name: str) -> str:
    """The engine of a transformation; one that isn't supported any more is refused."""
    path = project.transformation_file(slug, name)
    engine = engine_of(path)
    if engine == PANDAS_ON_SPARK:
        raise TransformationError(
            f"{path.relative_to(project.root)}: `run` takes pyspark.pandas.DataFrame, and "
            "pandas-on-Spark isn't supported any more. Annotate its first parameter as "
            "pandas.DataFrame or as pyspark.sql.DataFrame."
        )
    return engine


def load(project: Project, slug: str, name: str) -> Transformation:
    """Load a transformation's file, byte for byte as it is."""
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
    # Existing files may rely on these three: the original's server imports them in their place.
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
    """Let the user's code run in its project's surroundings; what it raises is its failure.

    Except for an interruption, which the handler of a signal raises in the middle of it.
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


def _frame(made: Any, printed: str) -> Any:
    import pandas

    if made is None:
        raise TransformationError("`run` returns nothing. End it with: return df", printed=printed)
    if not isinstance(made, pandas.DataFrame):
        raise TransformationError(
            f"`run` returns a {type(made).__name__}, not a DataFrame.", printed=printed
        )
    return made


def _failed(error: BaseException, root: Path, printed: str) -> TransformationError:
    """The error in one line, with the place in the user's file and a traceback from there."""
    top = _first_of(error.__traceback__, root)
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({_short(error.filename, root)}:{error.lineno})"
    else:
        own = [each for each in traceback.extract_tb(top) if _under(each.filename, root)]
        if own:
            where = f" ({_short(own[-1].filename, root)}:{own[-1].lineno})"
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    line = next((each for each in said.splitlines() if each.strip()), "").strip()
    message = f"{type(error).__name__}{': ' if line else ''}{printable(line)}{where}"
    return TransformationError(message, trace=_trace(error, root), printed=printed)


def _trace(error: BaseException, root: Path, depth: int = 5) -> str:
    """The traceback from the user's file on; of its causes, those that the user's code had too."""
    top = _first_of(error.__traceback__, root)
    told = "".join(traceback.format_exception(type(error), error, top, chain=False))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or not depth or _first_of(cause.__traceback__, root) is None:
        return told
    return f"{_trace(cause, root, depth - 1)}\nThen:\n\n{told}"


def _first_of(trace: TracebackType | None, root: Path) -> TracebackType | None:
    while trace is not None and not _under(trace.tb_frame.f_code.co_filename, root):
        trace = trace.tb_next
    return trace


def _under(file: str, root: Path) -> bool:
    """Whether a file is the user's: our package, or an environment, may lie in the project too."""
    path = Path(file)
    if not path.is_relative_to(root) or Path(__file__).parent in path.parents:
        return False
    return not INSTALLED & set(path.relative_to(root).parts)


def _short(file: str, root: Path) -> str:
    return str(Path(file).relative_to(root)) if Path(file).is_relative_to(root) else file


def _frames(number: int) -> str:
    return f"{number} frame{'' if number == 1 else 's'}"
