"""`odf init`, `load`, `dump`, `doctor`, `new`: create the tables or a project, and check all."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from ..config.settings import Settings, load_settings, private_folder, redact
from ..errors import CredentialError, DataflowError, WrongUse
from ..explain.self_check import Check, examine_database
from ..flow.file import schema_text
from ..flow.flow import FILE, Flow
from ..store import open_from
from ..util.text import printable, typed
from ..util.times import zone_called
from .output import as_json, count_of, fill_queues, show, store_of


@click.command()
@click.option(
    "--plan", is_flag=True, help="Print the SQL that would run, for a DBA, and change nothing."
)
@click.pass_context
def init(ctx: click.Context, plan: bool) -> None:
    """Create the tables, or upgrade them.

    Tables of an earlier version, or of the Java original, are upgraded in place and keep every
    row. Tables of a newer version aren't changed.

    \b
    Example: odf init
    Example: odf init --plan > upgrade.sql
    """
    store = store_of(ctx, making=True)
    if plan:
        from ..store.upgrade import plan as planned

        found, script = planned(store.db)
        click.echo(script, nl=False)
        if not script and found.version == store.version:
            click.echo(f"Nothing to do: the tables are of version {found.version}.", err=True)
    else:
        found = store.init(fill=False)
        if found.version <= store.version:
            fill_queues(store)
        if found.version <= store.version:
            following = "Next: `odf dataset add`, `odf job add`."
            click.echo(f"The tables are ready in {store.db.where}. {following}", err=True)
    if found.version > store.version:
        click.echo(
            f"The tables are of version {found.version}, newer than this program "
            f"({store.version}), which works with them: nothing was changed.",
            err=True,
        )


@click.command()
@click.argument("folder")
@click.pass_context
def load(ctx: click.Context, folder: str) -> None:
    """Load the tables dataset, job and datastatus from CSV files.

    FOLDER holds dataset.csv, job.csv and datastatus.csv, as written by `odf dump`, or by H2's
    CSVWRITE from the tables of the Java original. Either all rows are loaded or none. Rows that
    already exist are skipped; a row that exists with other values is refused.

    \b
    Example: odf init && odf load /tmp/h2
    """
    from ..store.csv_dump import load as add

    for table, rows in add(store_of(ctx), folder).items():
        click.echo(f"{table}: {count_of(rows, 'new row')}", err=True)


@click.command()
@click.argument("folder")
@click.pass_context
def dump(ctx: click.Context, folder: str) -> None:
    """Save the tables dataset, job and datastatus as CSV files.

    `odf load` and H2 can read the files. History, claims, dials and items aren't saved. Passwords
    stay encrypted; the Java original can't decrypt those that `odf` encrypted.

    \b
    Example: odf dump /tmp/tables
    """
    from ..store.csv_dump import dump as write

    for table, rows in write(store_of(ctx), folder).items():
        click.echo(f"{table}.csv: {count_of(rows, 'row')}", err=True)


COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option(
    "--deep", is_flag=True, help="Compare the whole queue with the statuses, however long it takes."
)
@as_json
@click.pass_context
def doctor(ctx: click.Context, deep: bool, as_json: bool) -> None:
    """Check the installation, the configuration and the database.

    Checks Python, Java, Spark, the configuration, the database and its tables, the passkey, the
    clock, permissions and, where it is used, Dagster. Exits with 1 if a check fails. Never shows
    secrets.

    \b
    Example: odf doctor
    Example: odf doctor --json
    """
    found = []
    for check in _examine(ctx.find_root().obj, deep):
        found.append(check)
        if not as_json:
            click.echo(line(check))
            sys.stdout.flush()
    if as_json:
        show([check._asdict() for check in found], as_json=True)
    if any(check.result == "fail" for check in found):
        ctx.exit(1)


def _examine(config: str | None, deep: bool) -> Iterator[Check]:
    """The machine first, then what is configured on it."""
    from ..spark.settings import examine_spark
    from .flow import examine_flow

    checks = examine(config, deep=deep)
    yield next(checks)
    try:
        settings = load_settings(config)
    except DataflowError:  # `examine` says it too
        settings = None
    yield from examine_spark(settings)
    yield from _examine_dagster()
    yield from checks
    yield from examine_flow(config)


def _examine_dagster() -> Iterator[Check]:
    """Whether Dagster has what the grid uses of it, where it is used: its import takes a second."""
    if find_spec("dagster") is None:
        return
    if not os.environ.get("DAGSTER_HOME") and not uses_dagster(Path.cwd()):
        return
    from ..dagster.internals import INSTALL_COMMAND, what_is_lost

    if lost := what_is_lost():
        yield Check("dagster", "warn", lost, INSTALL_COMMAND)
    else:
        found = f"Dagster {version('dagster')}, with all that the grid uses"
        yield Check("dagster", "ok", found)


def line(check: Check) -> str:
    """One check on one line."""
    result = click.style(f"{check.result:<5}", fg=COLOURS[check.result])
    detail = " ".join(check.detail.split())
    return f"{result}{check.check:<14} {detail}" + (f" → {check.action}" if check.action else "")


def examine(
    config: str | None, environ: Mapping[str, str] = os.environ, *, deep: bool = False
) -> Iterator[Check]:
    """Each check in turn; what can't be looked at since an earlier one failed is left out."""
    yield _python()
    settings = None
    try:
        settings = load_settings(config, environ)
    except DataflowError as error:
        yield Check("configuration", "fail", str(error))
    if settings is None:
        return
    yield _configuration(settings)
    if settings.timezone:
        yield _timezone(settings.timezone)
    if settings.url.startswith("sqlite:///"):
        yield _folder(settings)
    yield from _passkey(settings, environ)
    store = None
    try:
        store = open_from(settings, dict(environ))
    except DataflowError as error:
        yield Check("database", "fail", str(error))
    if store is None:
        return
    try:
        yield from examine_database(store, environ, deep)
    finally:
        store.close()


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 - not everybody installs by pip
        return Check(
            "python", "fail", f"Python {version} is too old", "Install Python 3.11 or newer"
        )
    return Check("python", "ok", f"Python {version}")


def _configuration(settings: Settings) -> Check:
    keys = printable(", ".join(sorted(settings.values))) or "no keys"
    where = settings.path or "no properties file"
    return Check(
        "configuration", "ok", f"{where}: {keys}; url {redact(settings.url)} from {settings.origin}"
    )


def _timezone(name: str) -> Check:
    try:
        zone_called(name)
    except DataflowError as error:
        return Check("timezone", "fail", str(error))
    return Check("timezone", "ok", name)


def _folder(settings: Settings) -> Check:
    path = settings.url.removeprefix("sqlite:///")
    folder = os.path.dirname(path) or "."
    there = folder
    while not os.path.exists(there):
        there = os.path.dirname(there) or "."
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "folder",
            "fail",
            f"{there} isn't writable, so SQLite can't keep {path}",
            f"Make {there} writable",
        )
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return Check("folder", "fail", f"{path} isn't writable", f"Make {path} writable")
    ours = private_folder(os.path.abspath(path))
    shown = [
        folder_path
        for folder_path in (ours, os.path.abspath(path))
        if ours and folder_path and _is_shown(folder_path)
    ]
    if shown:
        return Check(
            "folder",
            "warn",
            f"other users can read {' and '.join(shown)}",
            f"chmod go= {typed(*shown)}",
        )
    return Check(
        "folder", "ok", f"{folder} is writable" if there == folder else f"{folder} can be created"
    )


def _is_shown(path: str) -> bool:
    return os.path.exists(path) and os.stat(path).st_mode & 0o077 != 0


def _passkey(settings: Settings, environ: Mapping[str, str]) -> Iterator[Check]:
    from ..config.credentials import PROPERTIES, decrypt, find_passkey, is_weak, passkey_source

    try:
        key = find_passkey(environ)
        if key is None:
            needed = (
                "which `encrypted` needs" if settings.encrypted else "and the properties need none"
            )
            result = "fail" if settings.encrypted else "ok"
            action = "Set PASSKEY or PASSKEY_FILE" if settings.encrypted else ""
            yield Check("passkey", result, f"none is set, {needed}", action)
            return
        if settings.encrypted:
            decrypt(settings.encrypted, key, purpose=PROPERTIES)
    except CredentialError as error:
        yield Check("passkey", "fail", str(error), "odf encrypt")
        return
    if settings.encrypted and is_weak(settings.encrypted):
        detail = "it decrypts `encrypted`, which is in an older, weaker form"
        yield Check("passkey", "warn", detail, "odf rotate")
        return
    also = ", and decrypts `encrypted`" if settings.encrypted else ""
    yield Check("passkey", "ok", f"it comes from {passkey_source(environ)}{also}")


# `odf new`: a folder with a flow that runs at once, or what an existing project lacks of one.


TEMPLATES = Path(__file__).parent / "new_project"
"""A folder for each kind, and `common` for those with a flow.yml. `dot_` stands for a dot."""

SCRIPTS, PYTHON, SPARK, DAGSTER, PIPELINE = "scripts", "python", "spark", "dagster", "pipeline"
EXTRAS = {SCRIPTS: "", PYTHON: "", SPARK: "[spark]", DAGSTER: "[dagster]", PIPELINE: "[pipelines]"}
"""What each kind needs of the package besides its core."""

NEXT = {
    SCRIPTS: "odf apply",
    PYTHON: "odf apply",
    SPARK: "odf apply",
    DAGSTER: "odf apply",
    PIPELINE: "odf validate && odf pipeline run clean_contacts",
}

SAMPLES = ("data/", "jobs/", "tests/", "jobs.py", "flow_jobs.py", "README.md")
"""What belongs to the flow of the template; a folder that has a flow.yml gets none of it."""

SCHEMA = "flow.schema.json"
WORKFLOW = Path(".github", "workflows", "flow.yml")
TESTING = "      - run: python -m pytest\n"
"""The step of the workflow that runs the tests."""

IGNORED = ".dataflow/"

READ_FILES = 2_000
"""Python files of an existing project that are searched for its use of Dagster."""

HOOK = '''"""What Dagster loads of flow.yml. No database is read for it."""

from pathlib import Path

from opendataflow_dagster import build_definitions

defs = build_definitions(flow=Path(__file__).resolve().parents[{depth}] / "flow.yml")
'''


class AddedFiles(NamedTuple):
    """What has been written into a folder, what was there already, and what is left to do."""

    written: list[Path]
    there: list[Path]
    todo: list[str]


@click.command()
@click.argument("project")
@click.option(
    "--kind",
    type=click.Choice(list(EXTRAS)),
    help="What runs the jobs: scripts, Python functions, Spark functions, Dagster, or pipelines of "
    "tested transformations. Default: pipeline; in a Dagster project, dagster.",
)
def new(project: str, kind: str | None) -> None:
    """Create a project with a small flow that runs.

    The folder PROJECT gets jobs, sample data, tests, a CI workflow, and a README with the commands
    to type. `odf new .` adds the missing files to the current folder and changes no existing file.

    \b
    Example: odf new shop --kind scripts && cd shop && odf apply
    Example: odf new shop && cd shop && odf validate
    Example: odf new . --kind dagster
    """
    if not project.strip():
        raise WrongUse("The project has no name. Name its folder, as in: odf new shop")
    folder = Path(project)
    is_here = folder.is_dir() and folder.resolve() == Path.cwd().resolve()
    if kind is None:
        kind = DAGSTER if is_here and uses_dagster(folder) else PIPELINE
    if kind == PIPELINE:
        added = new_pipelines(folder)
    else:
        if not is_here:
            refuse_filled(folder, kind)
        added = add_files(folder, kind)
    for note in added.todo:
        click.echo(note, err=True)
    if is_here:
        _tell_added(folder, added, NEXT[kind])
        return
    there = f"./{project}" if project.startswith("-") else project
    files = count_of(len(added.written), "file")
    click.echo(
        f"{printable(project)} has {files}. Next: {typed('cd', there)} && {NEXT[kind]}", err=True
    )


def _tell_added(folder: Path, added: AddedFiles, next_command: str) -> None:
    for path in added.written:
        click.echo(f"+ {printable(str(path.relative_to(folder)))}")
    left = f"; {count_of(len(added.there), 'file')} left unchanged" if added.there else ""
    if added.written:
        files = count_of(len(added.written), "file")
        click.echo(f"{files} added{left}. Next: {next_command}", err=True)
    else:
        click.echo(f"Nothing to add{left}.", err=True)


def new_pipelines(folder: Path) -> AddedFiles:
    """Turn a folder into a project with pipelines."""
    from ..pipelines.project import new_project

    files = new_project(folder)
    files += [folder / path for path in _write(folder, template(PIPELINE, folder.resolve().name))]
    return AddedFiles(files, [], [])


def refuse_filled(folder: Path, kind: str) -> None:
    """Refuse to create a project from a file, or in a folder that isn't empty."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise WrongUse(f"{str(folder)!r} is a file. Name a folder that doesn't exist yet.")
    if folder.is_dir() and any(folder.iterdir()):
        raise WrongUse(
            f"{str(folder)!r} isn't empty. Name a folder that doesn't exist yet; or to add what is "
            f"missing there: {typed('cd', str(folder))} && odf new . --kind {kind}"
        )


def add_files(folder: Path, kind: str) -> AddedFiles:
    """Write the files of a kind that a folder lacks; no file that is there is changed."""
    name = folder.resolve().name
    Flow(name)  # refuses what can't be the name of a flow
    files, todo = template(kind, name), []
    if kind == DAGSTER and uses_dagster(folder):
        files, todo = _fit_into_project(folder, files)
    if (folder / FILE).exists():
        files = {path: text for path, text in files.items() if not _is_sample(path)}
        files[WORKFLOW] = without_tests(files[WORKFLOW])
    else:
        _refuse_taken(folder, files)
    there = [path for path in files if os.path.lexists(folder / path)]
    written = _write(folder, {path: text for path, text in files.items() if path not in there})
    ignored = folder / ".gitignore"
    if Path(".gitignore") in there and IGNORED not in ignored.read_text(errors="replace"):
        todo.append(f"Add to .gitignore: {IGNORED}")
    return AddedFiles([folder / path for path in written], there, todo)


def template(kind: str, name: str) -> dict[Path, str]:
    """The files of a kind with their texts, for a flow of this name; flow.yml is the last."""
    files = {}
    for part in (kind,) if kind == PIPELINE else ("common", kind):
        for path in sorted((TEMPLATES / part).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                place = str(path.relative_to(TEMPLATES / part)).replace("dot_", ".")
                files[Path(place)] = path.read_text(encoding="utf-8")
    if kind == DAGSTER:  # not jobs.py: a project of Dagster may have one
        files[Path("flow_jobs.py")] = (TEMPLATES / PYTHON / "jobs.py").read_text(encoding="utf-8")
    requirements = f'"opendataflow-dagster{EXTRAS[kind]}" pytest'
    for path, text in files.items():
        text = text.replace('"PROJECT"', _quoted(name))
        files[path] = text.replace("REQUIREMENTS", requirements)
    if Path(FILE) in files:
        files[Path(SCHEMA)] = schema_text()
        for last in ("pyproject.toml", FILE):  # they name the others: what is killed is begun anew
            files[Path(last)] = files.pop(Path(last))
    return files


def _quoted(name: str) -> str:
    """Quote a name for YAML: as JSON does, but unprintable letters are escaped."""
    text = json.dumps(name, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)


def without_tests(workflow: str) -> str:
    """A workflow without the step that runs the tests."""
    return re.sub(r" *- run: python -m pytest.*\n", "", workflow)


def _is_sample(path: Path) -> bool:
    return str(path).startswith(SAMPLES)


def _refuse_taken(folder: Path, files: Mapping[Path, str]) -> None:
    """Refuse a folder in which a file that flow.yml would name is something else."""
    for path, text in files.items():
        there = folder / path
        if str(path) in files[Path(FILE)] and os.path.lexists(there):
            if there.is_file() and there.read_text(errors="replace") == text:
                continue
            raise WrongUse(
                f"{printable(str(path))} already exists, and the new flow.yml would name "
                "it. Nothing was written. Write a flow.yml yourself, or begin with: odf export > "
                "flow.yml; then run this again."
            )


def _write(folder: Path, files: Mapping[Path, str]) -> list[Path]:
    """Write the missing files and return them; files created meanwhile stay unchanged."""
    written = []
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o777 if text.startswith("#!") else 0o666
        try:
            number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        written.append(path)
    return written


# --- a Dagster project that is there


def uses_dagster(folder: Path) -> bool:
    """Whether a folder is a project of Dagster."""
    if any((folder / name).exists() for name in ("workspace.yaml", "dagster.yaml", "dg.toml")):
        return True
    if {"dagster", "dg"} & _tools(folder).keys():
        return True
    imports = re.compile(r"^\s*(import|from)\s+dagster\b", re.MULTILINE)
    return any(imports.search(text) for text in _python_texts(folder))


def _fit_into_project(folder: Path, files: Mapping[Path, str]) -> tuple[dict[Path, str], list[str]]:
    """The files for a project that has definitions of its own: a module beside them."""
    own = {Path("definitions.py"), Path("pyproject.toml")}
    fitting = {path: text for path, text in files.items() if path not in own}
    # What the tests of the project itself need isn't known.
    testing = TESTING.replace("pytest", "pytest tests/test_flow.py")
    fitting[WORKFLOW] = fitting[WORKFLOW].replace(TESTING, testing)
    if using := [text for text in _python_texts(folder) if "build_definitions(" in text]:
        is_given = any("flow=" in text for text in using)
        return fitting, [] if is_given else ['Give it to your build_definitions: flow="flow.yml".']
    hook, todo = _hook_of(folder)
    return {hook: HOOK.format(depth=len(hook.parts) - 1), **fitting}, todo


def _hook_of(folder: Path) -> tuple[Path, list[str]]:
    """Return the module by which Dagster finds the flow, and what is left to do."""
    module = _tools(folder).get("dg", {}).get("project", {}).get("root_module", "")
    package = str(module).replace(".", "/")
    for place in (Path("src", package, "defs"), Path(package, "defs")):
        if package and (folder / place).is_dir():
            return place / "dataflow.py", []  # `dg` loads all that is in this folder
    return Path("flow_definitions.py"), [
        "In your definitions: dg.Definitions.merge(defs, flow_definitions.defs), "
        "after `import flow_definitions`."
    ]


def _tools(folder: Path) -> dict:
    """The tables below `tool` in a project's pyproject.toml."""
    try:
        return tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def _python_texts(folder: Path) -> Iterator[str]:
    """The texts of a project's Python files, as many as `READ_FILES`."""
    read = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__"))
            and name not in ("venv", "node_modules", "tests")
            and not os.path.exists(os.path.join(path, name, "pyvenv.cfg"))
        ]
        for name in names:
            if name.endswith(".py") and read < READ_FILES:
                read += 1
                try:
                    yield Path(path, name).read_text(errors="replace")
                except OSError as error:
                    click.echo(f"{name} can't be read: {error.strerror}", file=sys.stderr)
