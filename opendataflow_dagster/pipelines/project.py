"""A project folder, described by its `project.yml`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..config.settings import BUILT_IN, PROJECT, Settings, load_settings
from ..errors import DataflowError, NoDatabase, Refused, WrongUse
from ..flow.file import not_yaml, refuse_many_values
from ..store import open_from
from ..store.store import Store
from ..util.text import did_you_mean

FILE = PROJECT
SPARK_ENGINE, LOCAL = ENGINES = "spark", "local"
"""What runs a project's transformations: Spark, or for pandas, processes without Java."""

WORK_FOLDER = ".dataflow/work"
"""The folder within a project for frames on their way between the steps of a run."""

INSTALL = "Run: pip install 'opendataflow-dagster[pipelines]'"


class ProjectError(DataflowError):
    """A project's declaration isn't valid; the message begins with the file and the line."""


class Pipeline(NamedTuple):
    """One pipeline of a project, as declared."""

    slug: str
    sources: tuple[str, ...]
    destination: str | None
    transformations: tuple[str, ...]
    extra: Mapping[str, Any]
    """Unknown keys, unchanged."""
    line: int
    trouble: str | None = None
    """What is wrong with its declaration: it can't run, but the others can."""


class Project(NamedTuple):
    """A folder of pipelines."""

    root: Path
    name: str
    pipelines: tuple[Pipeline, ...]
    extra: Mapping[str, Any]
    engine: str = SPARK_ENGINE

    def pipeline(self, slug: str) -> Pipeline:
        """Return the pipeline called `slug`, or raise Refused with the known names."""
        for pipeline in self.pipelines:
            if pipeline.slug == slug:
                return pipeline
        known = ", ".join(pipeline.slug for pipeline in self.pipelines)
        like = did_you_mean(slug, [pipeline.slug for pipeline in self.pipelines])
        raise Refused(
            f"There is no pipeline {slug!r} in {self.root / FILE}. It has: {known}{like}",
            code="NOT_REGISTERED",
        )

    def on(self, engine: str | None) -> "Project":
        """Return the project with another engine, if one is given."""
        return self._replace(engine=engine) if engine else self

    def transformation_file(self, slug: str, name: str) -> Path:
        return self.root / "pipelines" / slug / f"{name}.py"

    def source_file(self, source: str) -> Path:
        return self.root / "sources" / f"{source}.csv"


def find_project(given: str | Path | None = None) -> Path:
    """Return the folder of a project: `given`, else this folder or the nearest one above it."""
    if given is not None:
        folder = Path(given)
        folder = folder.parent if folder.name == FILE else folder
        if not (folder / FILE).is_file():
            raise WrongUse(
                f"{str(folder)!r} has no {FILE}. Name a project's folder, or run: odf new PROJECT"
            )
        return folder.resolve()
    if found := nearest_project():
        return found
    raise WrongUse(
        f"There is no {FILE} in this folder or above it. Use --project DIR, or run: odf new PROJECT"
    )


def nearest_project() -> Path | None:
    """Return this folder, or the nearest one above it, that is a project."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / FILE).is_file()), None)


def read_project(root: Path) -> Project:
    """Read `root/project.yml`; errors of a single pipeline become its `trouble`."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise DataflowError(f"Reading {FILE} needs PyYAML, which is missing. {INSTALL}") from error

    root = root.resolve()
    file = root / FILE
    loader, node = None, None
    try:
        loader = yaml.SafeLoader(file.read_bytes())
        node = loader.get_single_node()
        refuse_many_values(node, file.name, ProjectError)
        read = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ProjectError(not_yaml(error, file.name)) from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(read, dict):
        raise ProjectError(f"{_at(file, 1)} must have the key `pipelines`: a list.")
    listed = read.get("pipelines")
    if not isinstance(listed, list) or not listed:
        line = _line_of_key(node, "pipelines") or 1
        raise ProjectError(
            f"{_at(file, line)} must have `pipelines`: a list, with a `slug` and "
            "`transformations` in each."
        )
    lines = _lines_of(node, "pipelines")
    found: list[Pipeline] = []
    for declared, (line, inner) in zip(listed, lines, strict=True):
        pipeline = _pipeline(declared, file, line, inner)
        if any(pipeline.slug == other.slug for other in found):
            raise ProjectError(f"{_at(file, line)}: two pipelines are called {pipeline.slug!r}.")
        found.append(pipeline)
    engine = read.get("engine", SPARK_ENGINE)
    if engine not in ENGINES:
        line = _line_of_key(node, "engine") or 1
        raise ProjectError(f"{_at(file, line)}: `engine` must be spark or local, not {engine!r}.")
    known = ("name", "pipelines", "engine")
    extra = {key: value for key, value in read.items() if key not in known}
    name = read.get("name")
    name = root.name if name is None else str(name)
    return Project(root, name, tuple(found), extra, engine)


def _pipeline(declared: Any, file: Path, line: int, lines: Mapping[str, int]) -> Pipeline:
    slug = _name(declared.get("slug")) if isinstance(declared, dict) else None
    if slug is None:
        raise ProjectError(
            f"{_at(file, line)}: a pipeline needs a `slug`, a plain name like clean_orders."
        )
    trouble: list[str] = []

    def wrong(key: str, what: str) -> None:
        trouble.append(f"{_at(file, lines.get(key, line))}: {what}")

    def names(key: str, suffix: str, *, path: bool = False) -> tuple[str, ...]:
        given = declared.get(key)
        if given is None:
            return ()
        if not isinstance(given, list):
            wrong(key, f"`{key}` must be a list of names, not {given!r}.")
            return ()
        read = [_name(value, suffix, path=path) for value in given]
        for value, name in zip(given, read, strict=True):
            if name is None:
                wrong(key, f"{value!r} isn't a valid name in {key}.")
        return tuple(name for name in read if name is not None)

    sources = names("sources", ".csv", path=True)
    transformations = names("transformations", ".py")
    if not transformations and not trouble:
        wrong("transformations", f"pipeline {slug!r} has no `transformations`.")
    destination = declared.get("destination")
    if isinstance(destination, list):
        wrong("destination", "`destination` is a list, but must be one name.")
        destination = None
    elif destination is not None and _name(destination, path=True) is None:
        wrong("destination", f"`destination` must be a name, not {destination!r}.")
        destination = None
    known = ("slug", "sources", "destination", "transformations")
    extra = {key: value for key, value in declared.items() if key not in known}
    return Pipeline(
        slug,
        sources,
        None if destination is None else str(destination),
        transformations,
        extra,
        line,
        trouble[0] if trouble else None,
    )


def _name(given: Any, suffix: str = "", *, path: bool = False) -> str | None:
    """Return a name without its suffix; None if it isn't one, or would lead out of its folder."""
    if isinstance(given, bool) or not isinstance(given, str | int):
        return None
    name = str(given).removesuffix(suffix)
    parts = name.split("/") if path else [name]
    if any(part in ("", ".", "..") or "/" in part or "\\" in part for part in parts):
        return None
    return name if name.isprintable() else None


def _at(file: Path, line: int) -> str:
    return f"{file.name}:{line}"


def _line_of_key(node: Any, key: str) -> int | None:
    return next((k.start_mark.line + 1 for k, _ in node.value if k.value == key), None)


def _lines_of(node: Any, key: str) -> list[tuple[int, dict[str, int]]]:
    """Return the line of each object of the list at `key`, and the lines of its keys."""
    # If a key is repeated, the last one counts, as in YAML.
    listed = [value for k, value in node.value if k.value == key][-1]
    return [
        (
            entry.start_mark.line + 1,
            {k.value: k.start_mark.line + 1 for k, _ in entry.value if isinstance(k.value, str)}
            if entry.id == "mapping"
            else {},
        )
        for entry in listed.value
    ]


# --- its tables: as configured, else beside its project.yml ---


def project_settings(root: Path, config: str | None = None) -> Settings:
    """Return the settings for a project, whatever folder its commands are typed in."""
    return load_settings(config, home=root)


def open_project(settings: Settings) -> Store:
    """Return a project's store; for the embedded default, create or upgrade its tables if needed.

    Elsewhere the tables are shared with other people, so that takes an `odf init`.
    """
    store = open_from(settings)
    if settings.origin == BUILT_IN:
        try:
            store.db.insist(lambda: store.db.run("pipelines.tables"))
        except NoDatabase:
            store.init()
    return store


# --- `odf new`: a small project that validates ---


TEMPLATE = Path(__file__).parent / "new_project"


def new_project(folder: Path) -> list[Path]:
    """Turn `folder` into a project, and return its files; a folder with content is refused."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise WrongUse(f"{str(folder)!r} is a file. Name a folder that doesn't exist yet.")
    if folder.is_dir() and any(folder.iterdir()):
        raise WrongUse(f"{str(folder)!r} isn't empty. Name a folder that doesn't exist yet.")
    # A JSON string is valid YAML, whatever the folder's name.
    texts = {
        path.relative_to(TEMPLATE): path.read_text(encoding="utf-8").replace(
            '"PROJECT"', json.dumps(folder.resolve().name)
        )
        for path in sorted(TEMPLATE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    texts[Path(".gitignore")] = "__pycache__/\noutput/\n.dataflow/\n"
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return [folder / path for path in texts]
