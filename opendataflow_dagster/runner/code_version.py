"""Which code made a chunk: the git commit of its folder, and a hash of the script's own files."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_SCRIPT_BYTES = 1_000_000
"""Size beyond which a file counts as a program that was installed, not as a script."""

HASH_LETTERS = COMMIT_LETTERS = 12


class CodeVersion:
    """The version of a script, looked up when it is asked for, and again when the script changes.

    Args:
        argv: The script and its arguments. Those of them that are files belong to the code:
            of `python3 load.py` the second word.
        environ: Its PATH tells where a script without a slash is.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        self._argv, self._path = argv, environ.get("PATH", os.defpath)
        self._text: str | None = None
        self._stamps: list[tuple[str, int, int]] | None = None

    def text(self) -> str | None:
        """`git:COMMIT file:HASH`, as much of it as is known; None if nothing is."""
        files = self._files()
        # A worker runs for weeks, and the file may be replaced under it.
        if (stamps := [stamp for _, stamp in files]) != self._stamps:
            self._text, self._stamps = code_of([file for file, _ in files]), stamps
        return self._text

    def _files(self) -> list[tuple[str, tuple[str, int, int]]]:
        found = []
        for number, word in enumerate(self._argv):
            path = self._in_path(word) if number == 0 and os.sep not in word else word
            try:
                status = os.stat(path)
            except (OSError, ValueError):
                continue
            if status.st_size <= MAX_SCRIPT_BYTES and os.path.isfile(path):
                found.append((path, (path, status.st_mtime_ns, status.st_size)))
        return found

    def _in_path(self, name: str) -> str:
        for folder in self._path.split(os.pathsep):
            if os.access(path := os.path.join(folder, name), os.X_OK):
                return path
        return name


def code_of(files: Sequence[str]) -> str | None:
    """The version of code that is in some files: the commit of the first one's folder, and a hash.

    The hash tells a file that was changed without a commit. Programs of the machine, such as an
    interpreter, belong to no job's code.
    """
    digest, folder = _blake2b(), ""
    for file in files:
        try:
            with open(file, "rb") as opened:
                text = opened.read(MAX_SCRIPT_BYTES)
        except OSError:
            return None
        if b"\0" not in text[:1024]:
            digest.update(text)
            folder = folder or os.path.dirname(os.path.realpath(file))
    if not folder:
        return None
    commit = git_commit(folder)
    return (f"git:{commit} " if commit else "") + f"file:{digest.hexdigest()[:HASH_LETTERS]}"


def code_of_function(fn: Callable[..., Any]) -> str | None:
    """The version of the file that a function is in, as it is now: ask when it is loaded."""
    import inspect

    try:
        file = inspect.getsourcefile(inspect.unwrap(fn))
    except TypeError:  # a callable object, or a function of C
        return None
    return code_of([file] if file else [])


def git_commit(folder: str) -> str | None:
    """The commit that is checked out where a folder is, read from git's files; None without git.

    Calling git would take longer than many a script.
    """
    try:
        while not os.path.exists(git := os.path.join(folder, ".git")):
            if folder == (folder := os.path.dirname(folder)):
                return None
        if os.path.isfile(git):  # a worktree, or a submodule
            git = os.path.join(folder, _line(git).removeprefix("gitdir: "))
        head = _line(os.path.join(git, "HEAD"))
        if head.startswith("ref: "):
            head = _commit_of(git, head.removeprefix("ref: "))
    except OSError:
        return None
    return head[:COMMIT_LETTERS] or None


def _blake2b() -> Any:
    try:
        from _blake2 import blake2b  # type: ignore[import-not-found]
    except ImportError:
        from hashlib import blake2b  # which loads OpenSSL: longer than all else here
    return blake2b()


def _commit_of(git: str, ref: str) -> str:
    common = git
    if os.path.exists(shared := os.path.join(git, "commondir")):
        common = os.path.join(git, _line(shared))
    for folder in (git, common):
        if os.path.exists(path := os.path.join(folder, ref)):
            return _line(path)
    with open(os.path.join(common, "packed-refs")) as file:
        for line in file:
            commit, _, name = line.rstrip().partition(" ")
            if name == ref:
                return commit
    return ""


def _line(path: str) -> str:
    with open(path) as file:
        return file.readline().strip()
