"""The served project: a copy of its last valid code, kept while its files change.

Each version is a folder with a copy of the code; everything else is linked to the project. A newer
version is first loaded in a process of its own. The link `folder` names the current version, for
the server and its worker, so that readers always see a complete version.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from ..errors import DataflowError
from ..model import Plan, Say
from ..store.store import Store
from ..util.text import first_line, typed
from .jobs import register, takes_items
from .project import FILE, Pipeline, Project, read_project
from .sandbox import LINK
from .task_data import DATA_FOLDERS, Listing, listing
from .transformation import (
    PANDAS,
    TransformationError,
    engine_of,
    load,
    supported_engine,
    takes_stream,
)

QUIET_SECONDS = 1.0
"""Seconds without a change after which a deployment counts as complete."""

RETRY_SECONDS = 5.0
"""Seconds after which a version without a verdict is tried again, even if nothing changes."""

CHECK_SECONDS = 60.0
"""Seconds that the files of a version may take to load."""

RELOAD_SECONDS = 60.0
"""Seconds after which a refused version is loaded again: a package may be installed by then."""

MAX_VERSIONS = 10
"""Versions that are kept: a running batch finishes with the code that it started with."""

PREFIX = "odf-serve-"

Faults = dict[str, str]
"""File → why it can't be loaded, in a line that begins with the place."""


class Deploys:
    """The versions of a project, and the last valid one among them.

    Faults that were there from the beginning keep no version from being served: only new faults do.
    With `local=False`, transformations of pandas run elsewhere, with the packages there: here they
    are only parsed.
    """

    def __init__(self, project: Project, *, local: bool = True, say: Say) -> None:
        self._root, self._local, self._say = project.root, local, say
        _remove_leftovers()
        self._home = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self._lock = hold(self._home)
        self.folder = self._home / "current"
        self.refused = ""
        """Why the project's current files aren't served."""
        self._count = 0
        self._faults: Faults | None = None
        """The faults of the served version; None: not checked yet."""
        self._judged = self._seen = self._files()
        self._since = self._due = time.monotonic()
        self._take(self._copied())

    def close(self) -> None:
        """Remove all versions."""
        shutil.rmtree(self._home, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def refresh(self, accept: Callable[[Project], object]) -> None:
        """Serve the current files if they are valid and `accept` doesn't refuse them.

        It refuses by a DataflowError; after any other error, the version is tried again.
        """
        now, found = time.monotonic(), self._files()
        if found != self._seen:
            self._seen, self._since = found, now
        if found == self._judged and not (self.refused and now >= self._due):
            return
        if now - self._since < QUIET_SECONDS:
            return
        self._since = now + RETRY_SECONDS  # unless it gets a verdict
        version, why = None, ""
        try:
            try:
                version = self._copied()
                if self._files() != found:
                    return
                if not (why := self._why_not(version)):
                    accept(read_project(version))
            except DataflowError as error:
                why = first_line(error)
            if self._files() != found:
                return
            self._judged, self._due = found, time.monotonic() + RELOAD_SECONDS
            if why or version is None:
                if why != self.refused:
                    self._say(f"The project stays unchanged: {why}")
                self.refused = why
                return
            self._take(version)
            if self.refused:
                self._say("The project's files are valid again, and served")
            self.refused, version = "", None
        finally:
            if version is not None:
                shutil.rmtree(version.parent, ignore_errors=True)

    def _files(self) -> Sequence[object]:
        """Return what changes with the code; for other files, when one is added or removed."""
        return [file if _is_code(file[0]) else file[0] for file in listing(self._root)]

    def _why_not(self, version: Path) -> str:
        """Return the first fault that the previous version doesn't have; "" if there is none."""
        faults = check(version, self._local)
        if faults and self._faults is None:
            self._faults = check(self.folder.resolve(), self._local)
        known = self._faults or {}
        new = [why for file, why in faults.items() if file not in known]
        if not new:
            self._faults = faults
        return new[0] if new else ""

    def _copied(self) -> Path:
        """Return a folder with a copy of the current code, named like the project."""
        self._count += 1
        version = self._home / str(self._count) / self._root.name
        try:
            version.parent.mkdir()
            _copy(self._root, listing(self._root), version)
        except OSError as error:
            shutil.rmtree(version.parent, ignore_errors=True)
            raise DataflowError(
                f"The project's code can't be copied to {self._home}: {error.strerror}. Make room "
                "there, or set TMPDIR to another folder."
            ) from None
        return version

    def _take(self, version: Path) -> None:
        link = self._home / "next"
        os.symlink(version, link)
        os.replace(link, self.folder)
        old = sorted(int(folder.name) for folder in self._home.iterdir() if folder.name.isdigit())
        for number in old[:-MAX_VERSIONS]:
            shutil.rmtree(self._home / str(number), ignore_errors=True)


def hold(folder: Path) -> int:
    """Lock the folder of versions for as long as this process lives.

    So other servers can tell it from the leftovers of a killed one, and systemd doesn't delete it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def check(version: Path, local: bool) -> Faults:
    """Return what can't be loaded of a version, found by a process of its own that it may crash."""
    answers = version.parent / "answers"
    words = [sys.executable, "-P", "-m", __name__, str(version), str(answers), str(int(local))]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        ended = f"the process that loads it ended with code {process.wait(CHECK_SECONDS)}"
    except subprocess.TimeoutExpired:
        ended = f"it didn't load within {CHECK_SECONDS:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    faults: Faults = {}
    file: str | None = FILE
    with suppress(FileNotFoundError), answers.open(encoding="utf-8") as lines:
        for line in lines:
            file, why = json.loads(line)
            if why:
                faults[file or FILE] = why
    if file is not None:
        faults[file] = f"{file}: {ended}"
    return faults


def _tell(version: Path, answers: Path, local: bool) -> None:
    """Write each file before it is loaded, and each fault; at the end, an end mark."""
    with answers.open("w", encoding="utf-8", buffering=1) as lines:
        for file, why in _loaded(version, local):
            lines.write(json.dumps([file, why]) + "\n")
        lines.write(json.dumps([None, ""]) + "\n")


def _loaded(version: Path, local: bool) -> Iterator[tuple[str, str]]:
    """Yield each file before it is loaded, and again with what is wrong with it."""
    for file, _, _ in listing(version):
        if file.endswith(".py") and (why := _parse(version, file)):
            yield file, why
    try:
        project = read_project(version)
    except FileNotFoundError:
        yield FILE, f"{FILE} doesn't exist."
        return
    except (DataflowError, OSError) as error:
        yield FILE, first_line(error)
        return
    for pipeline in project.pipelines:
        if pipeline.trouble:
            yield f"{FILE} {pipeline.slug}", pipeline.trouble
            continue
        paths = {
            name: project.transformation_file(pipeline.slug, name)
            for name in pipeline.transformations
        }
        # A file that ends before its `run` shows that only when it is loaded.
        takes = any(takes_stream(path, version) is not False for path in paths.values())
        for name, path in paths.items():
            file = str(path.relative_to(version))
            here = takes and (local or engine_of(path) != PANDAS)
            if here or not path.is_file():
                yield file, ""
                try:
                    supported_engine(project, pipeline.slug, name)
                    load(project, pipeline.slug, name)
                except TransformationError as error:
                    yield file, _with_place(file, str(error))


def _parse(version: Path, file: str) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile((version / file).read_bytes(), file, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{file}:{error.lineno}: {type(error).__name__}: {error.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"{file}: {type(error).__name__}: {error}"
    return ""


def _with_place(file: str, message: str) -> str:
    """Move the place of a message, in parentheses at its end, to the front."""
    if found := re.fullmatch(r"(.*) \((\S.*:\d+)\)", message):
        return f"{found[2]}: {found[1]}"
    return message if message.startswith(file) else f"{file}: {message}"


def _is_code(file: str) -> bool:
    return file == FILE or file.endswith(".py")


def _copy(root: Path, files: Listing, version: Path) -> None:
    """Copy the code; link everything else, so that it stays where it is in the project."""
    code = {file for file, _, _ in files if _is_code(file)}
    folders = {""}
    for file in code:
        folders.update(str(folder) for folder in Path(file).parents if folder.name)
    for above in sorted(folders):
        (version / above).mkdir()
        with suppress(FileNotFoundError):
            for name in os.listdir(root / above):
                file = os.path.join(above, name)
                if file in folders or name == "__pycache__":
                    continue
                if file in code:
                    with suppress(FileNotFoundError, PermissionError):
                        shutil.copy2(root / file, version / file)
                        continue
                os.symlink(root / file, version / file)
    for name in DATA_FOLDERS:
        if not os.path.lexists(version / name):
            os.symlink(root / name, version / name)
    os.symlink(root, version / LINK)


def _remove_leftovers() -> None:
    """Remove the versions of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            about = folder.stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < RELOAD_SECONDS:
                continue  # another server's, or just created and not locked yet
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


if __name__ == "__main__":
    os.nice(5)
    signal.alarm(int(CHECK_SECONDS) + 5)  # in case the server is killed meanwhile
    _tell(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
    os._exit(0)  # threads that the project's code started don't matter


# --- a project that is edited while it is served ---


REREGISTER_SECONDS = 30.0
"""Seconds after which the pipelines are registered again, in case somebody removed one."""


class Current:
    """The current project: its pipelines that accept items, registered as jobs.

    An invalid edit leaves the project unchanged, and is reported once. With a `folder`, the
    project's code is read there, and its data in the project.
    """

    def __init__(
        self, store: Store, project: Project, *, say: Say, folder: Path | None = None
    ) -> None:
        self.store, self.project, self._say = store, project, say
        self.code = project
        """The project whose folder has the code."""
        self._folder = folder or project.root
        self.plans: dict[str, Plan] = {}
        self.taking: dict[str, Pipeline] = {}
        self.others: dict[str, str] = {}
        """The pipelines that take no items, and the command that explains why; not a secret."""
        self._lock = Lock()
        self._seen: object = None
        self._said = ""
        self._due = 0.0

    def refresh(self) -> None:
        """Read again what has changed on disk; database errors are raised."""
        root = self._folder.resolve()
        seen = self._look(root)
        if seen == self._seen and time.monotonic() < self._due:
            return
        try:
            code = read_project(root)
            plans = register(self.store, code)
        except DataflowError as error:
            if self.store.db.trouble(error) or not self.plans:
                raise
            if self._said != str(error):
                self._say(f"The project stays unchanged: {first_line(error)}")
            self._said, self._seen, self._due = (
                str(error),
                seen,
                time.monotonic() + REREGISTER_SECONDS,
            )
            return
        taking, others = {}, {}
        for pipeline in code.pipelines:
            if pipeline.trouble:
                others[pipeline.slug] = "can't run as declared: see `odf validate`."
            elif takes_items(code, pipeline):
                taking[pipeline.slug] = pipeline
            else:
                others[pipeline.slug] = f"takes no items: see `odf token {typed(pipeline.slug)}`."
        with self._lock:
            self.project, self.code = code._replace(root=self.project.root), code
            self.plans, self.taking, self.others = plans, taking, others
        self._said, self._seen, self._due = "", seen, time.monotonic() + REREGISTER_SECONDS

    def serving(self, slug: str) -> tuple[Pipeline | None, Project]:
        """Return a pipeline that accepts items, if it exists, and the project with its code."""
        with self._lock:
            return self.taking.get(slug), self.code

    def _look(self, root: Path) -> list[tuple[str, int, int]]:
        """Return what changes when the project's declaration or a transformation does."""
        project = self.code._replace(root=root)
        files = [root / FILE]
        for pipeline in project.pipelines:
            files += [
                project.transformation_file(pipeline.slug, name)
                for name in pipeline.transformations
            ]
        found = []
        for file in files:
            try:
                about = os.stat(file)
            except OSError:
                found.append((str(file), 0, 0))
            else:
                found.append((str(file), about.st_mtime_ns, about.st_size))
        return found
