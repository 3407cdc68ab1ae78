"""A job as a function of DataFrames: its declaration, its arguments, and what it returns."""

import atexit
import hashlib
import importlib
import inspect
import io
import os
import shutil
import sys
import sysconfig
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..chunk import ChunkFailed, reason_of
from ..errors import DataflowError, WrongUse, what_installs
from ..model import Plan
from ..storage.folder import DATAID_COLUMN
from ..store.claims import MAX_BATCH_CHUNKS
from ..util.system import import_beside, module_of_file
from ..util.text import did_you_mean, printable
from .evidence import Observed
from .schema import SAME, SCHEMAS, literal, quoted
from .session import in_a_line, is_spark_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


FUNCTION = "dataflow_function"
"""The attribute in which wrappers of a function, such as Dagster assets, keep it."""


class Argument(NamedTuple):
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
    """A function that computes chunks of frames, with its options; calling it calls the function.

    Attributes:
        fn: The function.
        expect: What must hold before a chunk is published.
        batch: Chunks whose rows the function gets in one frame.
        threads: Chunks to compute in parallel.
        schema: What to do if a chunk's columns differ from the last chunk's.

    Raises:
        WrongUse: An option isn't valid, or `batch` and `threads` are both set.

    Example:
        job = SparkJob(revenue, expect={"not_null": ["id"]})
    """

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
            if not isinstance(value, int) or not 1 <= value <= MAX_BATCH_CHUNKS:
                raise WrongUse(
                    f"@spark_job({name}={value!r}) of {self.name}: give a number from 1 to "
                    f"{MAX_BATCH_CHUNKS}."
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

    def arguments(self, plan: Plan) -> dict[str, Argument]:
        """Return what each parameter receives; raises an error that shows how to write it."""
        return arguments(self.fn, plan)


def spark_job(
    fn: Callable[..., Any] | None = None,
    *,
    expect: Mapping[str, Any] | None = None,
    batch: int = 1,
    threads: int = 1,
    schema: str = SAME,
) -> Any:
    """Declare how a function of DataFrames computes its chunks.

    Args:
        fn: The function; omitted when the decorator is called with other arguments.
        expect: What must hold before a chunk is published, as {kind of rule: what}.
        batch: Number of chunks whose rows the function gets in one frame, with a column `dataid`
            that it has to keep. For functions that work row by row, or that group by `dataid`.
        threads: Number of chunks to compute in parallel, each by itself.
        schema: What to do with a chunk whose columns differ from the last chunk's: `same` refuses
            it, `merge` lets columns be added and widened, `any` accepts it.

    Raises:
        WrongUse: An option isn't valid, or `batch` and `threads` are both set.

    Example:
        @spark_job(expect={"not_null": ["id"]}, threads=4)
        def revenue(orders: DataFrame) -> DataFrame:
            return orders.groupBy("id").agg(F.sum("amount").alias("amount"))
    """

    def decorate(function: Callable[..., Any]) -> SparkJob:
        return SparkJob(function, dict(expect or {}), batch, threads, schema)

    return decorate if fn is None else decorate(fn)


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
        type_name(parameter) in ("DataFrame", "SparkSession")
        and _package(parameter.annotation) == "pyspark"
        for parameter in parameters
    )


def arguments(fn: Callable[..., Any], plan: Plan) -> dict[str, Argument]:
    """Return what each parameter receives: by annotation, by name, or as the only one left."""
    inputs = list(plan.reads)
    by_name = {_plain(name): name for name in reversed(inputs)} | {
        datasetid: datasetid for datasetid in inputs
    }
    found: dict[str, Argument] = {}
    unknown = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = parameter.name
        what = _BY_TYPE.get(type_name(parameter))
        if what is None and name not in by_name and type_name(parameter) != "DataFrame":
            what = _BY_NAME.get(name)
        if what:
            found[name] = Argument(what)
        elif name in by_name or _plain(name) in by_name:
            found[name] = Argument(FRAME, by_name.get(name) or by_name[_plain(name)])
        elif parameter.default is parameter.empty:
            unknown.append(name)
    left = [datasetid for datasetid in inputs if Argument(FRAME, datasetid) not in found.values()]
    if len(unknown) == 1 and len(left) == 1:
        found[unknown.pop()] = Argument(FRAME, left[0])
    if unknown:
        known = ", ".join(map(printable, inputs)) or "none"
        raise WrongUse(
            f"{getattr(fn, '__name__', fn)} has a parameter {unknown[0]!r}, but job {plan.jobid!r} "
            f"reads no dataset of that name (it reads: {known}). Name the parameter after a "
            "dataset, or chunk, spark, inputs or context."
        )
    return found


def type_name(parameter: inspect.Parameter) -> str:
    """Return the last name of a parameter's annotation."""
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")


def _package(kind: Any) -> str:
    """Return the package of a type; one given as a string is Spark's."""
    return "pyspark" if isinstance(kind, str) else kind.__module__.partition(".")[0]


def _plain(name: str) -> str:
    """Return a dataset's id as a parameter may be named."""
    return "".join(letter if letter.isalnum() else "_" for letter in name).lower()


# --- loading a function by its name, and sending its modules to the executors ---


MAX_SENT_BYTES = 32 * 2**20
"""Bytes of Python files to send; of a larger folder, only files that are already imported."""

UNSENT_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


def load_job(named: str, begin: Callable[[], Any] | None = None) -> tuple[SparkJob, str]:
    """Return the job that `module:function` or `path/to/file.py:function` names, and its name.

    `begin` starts a session if the module needs one while it is imported: for `F.col` at its top.
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


def function_in(named: str, folder: str, about: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:FUNCTION` names; of assets, the function behind them.

    Args:
        named: The name, as written.
        folder: The folder that the file's path is relative to.
        about: What contains the name, for error messages.
    """
    file, _, name = named.rpartition(":")
    path = os.path.normpath(os.path.join(folder, file))
    if not os.path.isfile(path):
        raise WrongUse(f"{about} names {named}, but there is no file {path}. Correct its name.")
    try:
        module = importlib.import_module(module_of_file(path))
    except Exception as error:
        cause = what_installs(error) if isinstance(error, ModuleNotFoundError) else None
        text = cause or reason_of(error)
        raise WrongUse(f"{about} names {named}, but that can't be imported: {text}") from error
    found = getattr(module, name, None)
    found = getattr(found, FUNCTION, found)
    if not callable(found):
        like = did_you_mean(name, vars(module)) or "."
        raise WrongUse(f"{about} names {named}, but {path} has no function {name!r}{like}")
    return found


def _function(obj: Any, named: str) -> Any:
    """Return what produces the chunks: of assets, the function behind them."""
    obj = getattr(obj, FUNCTION, obj)
    kind = type(obj)
    if callable(obj) and not inspect.isclass(obj) and _package(kind) != "dagster":
        return obj
    what = "a class" if inspect.isclass(obj) else f"of type {kind.__name__}"
    raise WrongUse(
        f"--spark {named!r} is {what}, not a function. Name a function of DataFrames, or one "
        "decorated with @dataflow_assets."
    )


def _module(module: str, named: str, begin: Callable[[], Any] | None) -> Any:
    """Return a module by its name or its file, with its folder importable."""
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
                f"--spark {named!r} imports {error.name!r}, which isn't installed."
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
    """Whether pyspark raised it for lack of a session: `F.col` merely asserts that there is one."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    asserted = isinstance(error, AssertionError) and f"{os.sep}pyspark{os.sep}" in last
    return asserted or "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error)


def _where(error: BaseException) -> str:
    """Return the user's file and line in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.dirname(__file__))
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<frozen", ours, os.path.dirname(importlib.__file__)))
        and f"{os.sep}site-packages{os.sep}" not in frame.filename
    ]
    last = (theirs or frames)[-1]
    return f"{os.path.relpath(last.filename)}:{last.lineno}"


def send_modules(session: "SparkSession", function: Any) -> None:
    """Let executors import the Python files of a job's folder, and what it imports from others.

    A function of rows (`udf`) goes there by name; its module and helpers are only here. Sending the
    same files again does nothing. Installed packages aren't sent.
    """
    module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or not file or _is_installed(path := Path(file).resolve()):
        return
    depth = 0 if module.__name__ == "__main__" else len(module.__name__.split(".")) - 1
    root = path.parents[depth + (path.name == "__init__.py")]
    folder = root / path.relative_to(root).parts[0] if depth else path.parent
    imported = {
        file
        for loaded in list(sys.modules.values())
        if (file := _file_of(loaded)) and file.is_relative_to(root)
    }
    packed = _zip_of(root, {*_python_files(folder), *imported})
    if len(packed) > MAX_SENT_BYTES:
        packed = _zip_of(root, imported)
    name = f"odf-modules-{hashlib.sha256(packed).hexdigest()[:32]}.zip"
    archive = os.path.join(_outbox(), name)
    if not os.path.exists(archive):
        Path(archive).write_bytes(packed)
    session.addArtifacts(archive, pyfile=True)
    # A classic session would also import from it here, where the files themselves are.
    sys.path[:] = [entry for entry in sys.path if os.path.basename(entry) != name]


def _file_of(module: Any) -> Path | None:
    """Return the Python file of a module that isn't installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return _sent_file(file)


@cache  # checks thousands of modules before each piece of work
def _sent_file(file: str) -> Path | None:
    return None if _is_installed(path := Path(file).resolve()) else path


def _is_installed(path: Path) -> bool:
    """Whether executors have their own copy of a file: Python's, a package's, or ours."""
    ours = Path(__file__).resolve().parents[1]
    stdlib = sysconfig.get_paths()["stdlib"]
    return bool(UNSENT_FOLDERS & set(path.parts)) or any(map(path.is_relative_to, (ours, stdlib)))


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the modules in a folder and in its packages; other folders may hold a million files."""
    for where, folders, names in os.walk(folder):
        found = [Path(where, name) for name in names if name.endswith(".py")]
        is_package = found and "pyvenv.cfg" not in names
        if where != str(folder) and not is_package:
            folders.clear()
            continue
        yield from found
        folders[:] = [
            inner for inner in folders if inner.isidentifier() and inner not in UNSENT_FOLDERS
        ]


def _zip_of(root: Path, files: Iterable[Path]) -> bytes:
    """Return a zip of files, identical for identical files."""
    names = {file.relative_to(root): file for file in files if file.is_file()}
    # Python before 3.13 finds a package without __init__.py only by an entry for its folder.
    folders = {parent for name in names for parent in name.parents} - {Path()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in sorted(folders):
            archive.writestr(zipfile.ZipInfo(f"{name.as_posix()}/"), b"")
        for name in sorted(names):
            info = zipfile.ZipInfo(name.as_posix())
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, names[name].read_bytes())
    return packed.getvalue()


@cache
def _outbox() -> str:
    """Return a folder from which Spark serves files as long as this process lives."""
    folder, owner = tempfile.mkdtemp(prefix="odf-modules-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a process forked from this one
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


# --- what a function returned ---


_OTHERS = "odf_others"


def outputs_of(job: SparkJob, plan: Plan, returned: Any) -> dict[str, Any]:
    """Return what a function returned, for every dataset: an old chunk would stay otherwise."""
    outputs = plan.outputs
    if not isinstance(returned, Mapping):
        if returned is not None and len(outputs) > 1:
            raise ChunkFailed(
                f"{job.name} returned one {type(returned).__name__} for {len(outputs)} "
                f"datasets. Return a dict: {', '.join(map(repr, outputs))} → DataFrame."
            )
        returned = dict.fromkeys(outputs, returned)
    unknown = sorted(map(str, set(returned) - set(outputs)))
    if unknown:
        raise ChunkFailed(
            f"{job.name} returned {unknown[0]!r}, which job {plan.jobid!r} doesn't "
            f"write. Return a dict: {', '.join(map(repr, outputs))} → DataFrame."
        )
    if missing := [output for output in outputs if returned.get(output) is None]:
        raise ChunkFailed(
            f"{job.name} returned nothing for {', '.join(map(repr, missing))}. Return a DataFrame, "
            "or a Result(…) if it wrote the chunk itself."
        )
    for datasetid, df in returned.items():
        if is_spark_frame(df):
            _check(job, datasetid, df)
    return dict(returned)


def _check(job: SparkJob, datasetid: str, df: "DataFrame") -> None:
    """Refuse a frame with repeated names, or one that doesn't identify the chunks of a batch."""
    columns = df.columns
    is_exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    times = Counter(columns if is_exact else [column.lower() for column in columns])
    if twice := [column for column in columns if times[column if is_exact else column.lower()] > 1]:
        alike = [name for name in twice if name.lower() == twice[0].lower()]
        names = " and ".join(map(repr, dict.fromkeys(alike)))
        raise ChunkFailed(
            f"{job.name} returned several columns {names} for {datasetid!r}. Rename or drop all "
            "but one of them."
        )
    if job.batch > 1 and DATAID_COLUMN not in columns:
        raise ChunkFailed(
            f"{job.name} has batch={job.batch}, but the frame that it returned for "
            f"{datasetid!r} has no column {DATAID_COLUMN!r}. Keep that column, or group by it."
        )


class SingleChunkFrame:
    """The rows that a job with a batch returned for one chunk alone, identified by a column.

    The column is checked in the pass that writes the rows.
    """

    def __init__(self, job: SparkJob, datasetid: str, dataid: str, df: "DataFrame") -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        self._job, self._datasetid, self._dataid, self._df = job, datasetid, dataid, df
        self._is_other = f"not (cast({quoted(DATAID_COLUMN)} as string) <=> {literal(dataid)})"
        observation: Any = Observation()
        seen = df.observe(observation, F.expr(f"count_if({self._is_other}) as {_OTHERS}"))
        self._observed = Observed(seen, observation, "")
        self.frame = seen.drop(DATAID_COLUMN)
        """Return the rows without that column, which is the chunk's directory."""

    def check(self) -> None:
        """Refuse rows of other chunks, once the rows are written."""
        count = self._observed.aggregates().get(_OTHERS)
        if count is None:  # Spark repeated tasks, and doesn't report a count
            count = self._df.where(self._is_other).count()
        if count:
            raise ChunkFailed(
                f"{self._job.name} returned {count} rows for {self._datasetid!r} whose "
                f"{DATAID_COLUMN!r} isn't that of the chunk, {printable(self._dataid)!r}. Keep "
                "that column as it is, or group by it."
            )
