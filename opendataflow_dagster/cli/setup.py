"""`odf init`, `load`, `dump` and `doctor`: create the tables, fill and copy them, check all."""

import os
import sys
from collections.abc import Iterator, Mapping

import click

from ..config.settings import Settings, load_settings, private_folder, redact
from ..errors import CredentialError, DataflowError
from ..explain.self_check import Check, examine_database
from ..store import open_from
from ..util.text import printable, typed
from ..util.times import zone_called
from .output import as_json, count_of, show, store_of
from .progress import fill_queues


@click.command(epilog="Example: odf init --plan > upgrade.sql")
@click.option(
    "--plan", is_flag=True, help="Print the SQL that would run, for a DBA, and change nothing."
)
@click.pass_context
def init(ctx: click.Context, plan: bool) -> None:
    """Create the tables, or upgrade older ones and those of the original in place.

    Every row is kept. Newer tables are left as they are.
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


@click.command(epilog="Example: odf init && odf load /tmp/h2")
@click.argument("folder")
@click.pass_context
def load(ctx: click.Context, folder: str) -> None:
    """Add the rows of dataset.csv, job.csv and datastatus.csv in FOLDER, all of them or none.

    They are what H2's CSVWRITE makes of the original's tables, or `odf dump`. Rows that are here
    already are left; one that is here with other values is refused.
    """
    from ..store.csv_dump import load as add

    for table, rows in add(store_of(ctx), folder).items():
        click.echo(f"{table}: {count_of(rows, 'new row')}", err=True)


@click.command(epilog="Example: odf dump /tmp/tables")
@click.argument("folder")
@click.pass_context
def dump(ctx: click.Context, folder: str) -> None:
    """Write the tables dataset, job and datastatus into FOLDER as CSV files, for `odf load` or H2.

    History, claims, dials and items stay here. Passwords stay encrypted; those that `odf` has
    encrypted can't be read by the original.
    """
    from ..store.csv_dump import dump as write

    for table, rows in write(store_of(ctx), folder).items():
        click.echo(f"{table}.csv: {count_of(rows, 'row')}", err=True)


COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(epilog="Example: odf doctor --json")
@click.option(
    "--deep", is_flag=True, help="Compare the queue with the statuses, however many there are."
)
@as_json
@click.pass_context
def doctor(ctx: click.Context, deep: bool, as_json: bool) -> None:
    """Check Python, Java, Spark, configuration, database, tables, passkey, clock and permissions.

    Exits with 1 if anything fails. Secrets are never shown.
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
    yield from checks
    yield from examine_flow(config)


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
        "folder", "ok", f"{folder} is writable" if there == folder else f"{folder} can be made"
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
