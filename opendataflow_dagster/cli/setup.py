"""`odf init`: create or upgrade the tables."""

import click

from .output import store_of


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
        from ..dataflow.upgrade import plan as planned

        found, script = planned(store.db)
        click.echo(script, nl=False)
        if not script and found.version == store.version:
            click.echo(f"Nothing to do: the tables are of version {found.version}.", err=True)
    else:
        found = store.init()
        if found.version <= store.version:
            following = "Next: `odf dataset add`, `odf job add`."
            click.echo(f"The tables are ready in {store.db.where}. {following}", err=True)
    if found.version > store.version:
        click.echo(
            f"The tables are of version {found.version}, newer than this program "
            f"({store.version}), which works with them: nothing was changed.",
            err=True,
        )
