"""`odf init`, `load`, `dump` and `doctor`: create the tables, fill and copy them, check all."""

import sys
from collections.abc import Iterator

import click

from ..config.settings import load_settings
from ..doctor import Check, examine
from ..errors import DataflowError
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
    from ..spark.java import examine_spark

    checks = examine(config, deep=deep)
    yield next(checks)
    try:
        settings = load_settings(config)
    except DataflowError:  # `examine` says it too
        settings = None
    yield from examine_spark(settings)
    yield from checks


def line(check: Check) -> str:
    """One check on one line."""
    result = click.style(f"{check.result:<5}", fg=COLOURS[check.result])
    detail = " ".join(check.detail.split())
    return f"{result}{check.check:<14} {detail}" + (f" → {check.action}" if check.action else "")
