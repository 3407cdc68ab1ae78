"""A project that goes on being edited while it is served."""

import os
import time
from pathlib import Path
from threading import Lock

from ..errors import DataflowError
from ..model import Plan, Say
from ..store.store import Store
from ..util.text import first_line, typed
from .jobs import register, takes_items
from .project import FILE, Pipeline, Project, read_project

AGAIN = 30.0
"""Seconds after which the pipelines are registered again, in case somebody has removed one."""


class Current:
    """A project as it is now: its pipelines that take items, registered as jobs.

    An edit that can't be read leaves the project as it was, and is said once. With a `folder`, the
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
        """The pipelines that take no items, and what tells why: anybody may read this."""
        self._lock = Lock()
        self._seen: object = None
        self._said = ""
        self._due = 0.0

    def refresh(self) -> None:
        """Read again what has changed on disk; raises what the database does."""
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
                self._say(f"The project stays as it was: {first_line(error)}")
            self._said, self._seen, self._due = str(error), seen, time.monotonic() + AGAIN
            return
        taking, others = {}, {}
        for each in code.pipelines:
            if each.trouble:
                others[each.slug] = "can't run as it is declared: see `odf validate`."
            elif takes_items(code, each):
                taking[each.slug] = each
            else:
                others[each.slug] = f"takes no items: see `odf token {typed(each.slug)}`."
        with self._lock:
            self.project, self.code = code._replace(root=self.project.root), code
            self.plans, self.taking, self.others = plans, taking, others
        self._said, self._seen, self._due = "", seen, time.monotonic() + AGAIN

    def serving(self, slug: str) -> tuple[Pipeline | None, Project]:
        """A pipeline that takes items, if there is one, and the project with its code."""
        with self._lock:
            return self.taking.get(slug), self.code

    def _look(self, root: Path) -> list[tuple[str, int, int]]:
        """What tells that the project's declaration, or one of its transformations, has changed."""
        project = self.code._replace(root=root)
        files = [root / FILE]
        for each in project.pipelines:
            files += [project.transformation_file(each.slug, name) for name in each.transformations]
        found = []
        for file in files:
            try:
                about = os.stat(file)
            except OSError:
                found.append((str(file), 0, 0))
            else:
                found.append((str(file), about.st_mtime_ns, about.st_size))
        return found
