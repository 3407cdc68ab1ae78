"""The disks that items need: whether one of them is full."""

import os
import tempfile
from pathlib import Path

from ..model import Say
from ..store.store import Store

LEAST = 1024 * 1024
"""Free bytes under which a disk is full."""

DATABASE, PROJECT, TEMPORARY = "database", "project", "temporary files"


class Disks:
    """The folders of the tables, of the project with its results, and of what is on its way."""

    def __init__(self, store: Store, root: Path, say: Say) -> None:
        self._folders = {PROJECT: str(root), TEMPORARY: tempfile.gettempdir()}
        if file := store.db.path:  # else the database is on a server
            self._folders = {DATABASE: os.path.dirname(os.path.abspath(file)), **self._folders}
        self._say, self._said = say, list[str]()

    def full(self) -> list[str]:
        """Which of them have no room."""
        found = [name for name, folder in self._folders.items() if _is_full(folder)]
        for name in found:
            if name not in self._said:
                self._say(f"The disk of {self._folders[name]} is full ({name}): make room there")
        self._said = found
        return found


def _is_full(folder: str) -> bool:
    try:
        told = os.statvfs(folder)
    except OSError:
        return False
    return told.f_bavail * told.f_frsize < LEAST or (told.f_files > 0 and told.f_favail == 0)
