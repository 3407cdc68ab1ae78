"""A pytest plugin: the transformations of a project.yml, as tests.

It does nothing unless a project is named: `pytest shop/project.yml`, `--dataflow-project shop`.
pytest imports this in every run wherever we are installed, so everything else is imported later.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .project import Pipeline, Project

FILE = "project.yml"
NAMED = pytest.StashKey[set[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("opendataflow").addoption(
        "--dataflow-project",
        action="append",
        default=[],
        metavar="DIR",
        help="Also run the transformations of DIR/project.yml as tests; may be repeated.",
    )


def pytest_configure(config: pytest.Config) -> None:
    for given in config.getoption("--dataflow-project") or []:
        from ..errors import DataflowError
        from .project import find_project

        try:
            config.args.append(str(find_project(config.invocation_params.dir / given) / FILE))
        except DataflowError as error:
            raise pytest.UsageError(str(error)) from None
    words = [word.partition("::")[0] for word in config.args]
    # Not by the session's initial paths: pytest drops a path inside another one.
    config.stash[NAMED] = {
        (config.invocation_params.dir / word).resolve() for word in words if word.endswith(FILE)
    }


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "ProjectFile | None":
    # Other tools have files of this name: only a file named on the command line is ours.
    if file_path.name == FILE and file_path.resolve() in parent.config.stash[NAMED]:
        return ProjectFile.from_parent(parent, path=file_path)
    return None


class ProjectFile(pytest.File):
    """A project.yml."""

    def collect(self) -> Iterator["PipelineNode"]:
        from ..errors import DataflowError
        from .project import read_project
        from .sandbox import forget
        from .validate import examined

        try:
            project = read_project(self.path.parent.resolve())
        except DataflowError as error:
            raise self.CollectError(str(error)) from None
        forget(project.root)
        for pipeline in examined(project):
            yield PipelineNode.from_parent(
                self, name=pipeline.slug, project=project, pipeline=pipeline
            )


class PipelineNode(pytest.Collector):
    """One of the project's pipelines."""

    def __init__(self, *, project: "Project", pipeline: "Pipeline", **other: Any) -> None:
        super().__init__(**other)
        self.project, self.pipeline = project, pipeline

    def collect(self) -> Iterator["TransformationItem"]:
        from .validate import names_of

        for name in names_of(self.pipeline):
            yield TransformationItem.from_parent(
                self,
                name=name or "declaration",
                project=self.project,
                pipeline=self.pipeline,
                transformation=name,
            )


class Failed(Exception):
    """A transformation's output differs from its file's expectation."""


class TransformationItem(pytest.Item):
    """One transformation, run on its expected inputs."""

    def __init__(
        self, *, project: "Project", pipeline: "Pipeline", transformation: str | None, **other: Any
    ) -> None:
        super().__init__(**other)
        self.project, self.pipeline, self.transformation = project, pipeline, transformation

    def runtest(self) -> None:
        from .validate import validate_one

        verdict = validate_one(self.project, self.pipeline, self.transformation)
        print(verdict.printed, end="")
        if not verdict.passed:
            more = [str(difference) for difference in verdict.differences[1:]]
            raise Failed("\n".join(filter(None, [verdict.message, *more, verdict.traceback])))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        title = f"{self.pipeline.slug}.{self.name}"
        if self.transformation is None:
            return self.path, self.pipeline.line - 1, title
        path = self.project.transformation_file(self.pipeline.slug, self.transformation)
        return path, None, title
