"""A project folder: its `project.yml`, read as it stands."""

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
"""What runs a project's transformations: Spark, or those of pandas a process without Java."""

WORK_FOLDER = ".dataflow/work"
"""Where runs keep, within a project, what is on its way between their steps."""

INSTALL = "Run: pip install 'opendataflow-dagster[pipelines]'"


class ProjectError(DataflowError):
    """What a project says can't be understood; the message begins with the file and its line."""


class Pipeline(NamedTuple):
    """One pipeline of a project, as declared."""

    slug: str
    sources: tuple[str, ...]
    destination: str | None
    transformations: tuple[str, ...]
    extra: Mapping[str, Any]
    """The keys that we don't know, as they are."""
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
        """The pipeline called `slug`, or Refused with the names that there are."""
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
        """The project with another engine, if one is given."""
        return self._replace(engine=engine) if engine else self

    def transformation_file(self, slug: str, name: str) -> Path:
        return self.root / "pipelines" / slug / f"{name}.py"

    def source_file(self, source: str) -> Path:
        return self.root / "sources" / f"{source}.csv"


def find_project(given: str | Path | None = None) -> Path:
    """The folder of a project: `given`, else this folder or the nearest one above it."""
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
    """This folder, or the nearest one above it, that is a project."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / FILE).is_file()), None)


def read_project(root: Path) -> Project:
    """Read `root/project.yml`; what only one pipeline has wrong is that pipeline's `trouble`."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise DataflowError(f"{FILE} is read with PyYAML, which is missing. {INSTALL}") from error

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
        raise ProjectError(f"{_at(file, line)}: `engine` is spark or local, not {engine!r}.")
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
                wrong(key, f"{value!r} isn't the plain name of one of the {key}.")
        return tuple(name for name in read if name is not None)

    sources = names("sources", ".csv", path=True)
    transformations = names("transformations", ".py")
    if not transformations and not trouble:
        wrong("transformations", f"pipeline {slug!r} has no `transformations`.")
    destination = declared.get("destination")
    if isinstance(destination, list):
        wrong("destination", "`destination` is a list, but a pipeline has one. Write one name.")
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
    """A name without its suffix; None if it isn't one, or would lead out of its folder."""
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
    """Of each object of the list at `key`: its line, and the lines of its keys."""
    # The last one counts if a key stands twice, as in what YAML makes of it.
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
    """The settings for a project, from whichever folder its commands are typed."""
    return load_settings(config, home=root)


def open_project(settings: Settings) -> Store:
    """The store of a project; in the embedded default the tables are made, or upgraded, if need be.

    Elsewhere they are other people's too, so that it takes an `odf init`.
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
    """Make `folder` a project, and return its files; a folder that holds anything is refused."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise WrongUse(f"{str(folder)!r} is a file. Name a folder that doesn't exist yet.")
    if folder.is_dir() and any(folder.iterdir()):
        raise WrongUse(f"{str(folder)!r} isn't empty. Name a folder that doesn't exist yet.")
    # JSON's texts are YAML's, whatever the folder is called.
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
