"""`odf sql` and `odf dml`: the keys to the kingdom."""

import click

from ..store.adhoc_sql import change, select
from ..store.operations import person
from .output import as_json, show, store_of


@click.command(
    epilog="Example: odf sql \"select dataid, status from datastatus where jobid = 'loadbob'\""
)
@click.argument("statement", metavar="SELECT")
@as_json
@click.pass_context
def sql(ctx: click.Context, statement: str, as_json: bool) -> None:
    """Print the rows of a query. It runs in a transaction that can't change anything."""
    show(select(store_of(ctx), statement), as_json=as_json, empty="No rows.")


@click.command(
    epilog="Example: odf dml \"update datastatus set status = 'RESUBMIT' where dataid = '2'\""
)
@click.argument("statement", metavar="STATEMENT")
@click.pass_context
def dml(ctx: click.Context, statement: str) -> None:
    """Change rows by a statement of your own, in one transaction; history tells that it was you."""
    click.echo(f"{change(store_of(ctx), statement, who=person())} rows affected")
