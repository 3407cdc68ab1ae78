"""`odf init`: create or upgrade the tables."""

import click

from .output import store_of


@click.command()
@click.pass_context
def init(ctx: click.Context) -> None:
    """Create the tables, or upgrade those of the original in place; every row is kept."""
    store = store_of(ctx, making=True)
    store.init()
    click.echo(
        f"The tables are ready in {store.db.where}. Next: `odf dataset add`, `odf job add`.",
        err=True,
    )
