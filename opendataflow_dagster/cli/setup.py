"""`odf init`, `odf load` and `odf dump`: make the tables, fill them, and take them away."""

import click

from .output import count_of, store_of
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
