"""A job's function: loaded by the name that a command line gives it, and sent to the executors."""

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
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chunk import reason_of
from ..errors import DataflowError, WrongUse
from ..util.import_file import import_beside, module_of_file
from .error_text import in_a_line
from .job import FUNCTION, SparkJob, as_spark_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST = 32 * 2**20
"""Bytes of Python files that are sent; of a larger folder, only those that are imported already."""

NEVER = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


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


def send_modules(session: "SparkSession", function: Any) -> None:
    """Let executors import the Python files of a job's folder, and what it has imported of others.

    A function of rows (`udf`) goes there by its name; its module and helpers are only here. To send
    the same files again does nothing. Installed packages aren't sent.
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
        for each in list(sys.modules.values())
        if (file := _file_of(each)) and file.is_relative_to(root)
    }
    packed = _packed(root, {*_python_files(folder), *imported})
    if len(packed) > MOST:
        packed = _packed(root, imported)
    name = f"odf-modules-{hashlib.sha256(packed).hexdigest()[:32]}.zip"
    archive = os.path.join(_outbox(), name)
    if not os.path.exists(archive):
        Path(archive).write_bytes(packed)
    session.addArtifacts(archive, pyfile=True)
    # A classic session would also import from it here, where the files themselves are.
    sys.path[:] = [each for each in sys.path if os.path.basename(each) != name]


def _file_of(module: Any) -> Path | None:
    """The Python file of a module that isn't installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return None if _is_installed(path := Path(file).resolve()) else path


def _is_installed(path: Path) -> bool:
    """Whether executors have a file of their own: Python's, a package's, or ours."""
    ours = Path(__file__).resolve().parents[1]
    stdlib = sysconfig.get_paths()["stdlib"]
    return bool(NEVER & set(path.parts)) or any(map(path.is_relative_to, (ours, stdlib)))


def _python_files(folder: Path) -> Iterator[Path]:
    """The modules in a folder and in its packages; other folders may hold a million files."""
    for where, folders, names in os.walk(folder):
        found = [Path(where, name) for name in names if name.endswith(".py")]
        is_package = found and "pyvenv.cfg" not in names
        if where != str(folder) and not is_package:
            folders.clear()
            continue
        yield from found
        folders[:] = [each for each in folders if each.isidentifier() and each not in NEVER]


def _packed(root: Path, files: Iterable[Path]) -> bytes:
    """A zip of files, always the same of the same files."""
    names = {file.relative_to(root): file for file in files if file.is_file()}
    # Python before 3.13 finds a package without __init__.py only by an entry of its folder.
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
    """A folder from which Spark serves files as long as this process lives."""
    folder, owner = tempfile.mkdtemp(prefix="odf-modules-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a process that was forked from this one
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
