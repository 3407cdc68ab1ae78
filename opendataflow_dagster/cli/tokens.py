"""`odf token`: who may send items to a pipeline."""

import click

from ..dataflow import tokens
from ..dataflow.errors import Refused
from ..dataflow.names import typed
from .output import store_of


@click.command()
@click.argument("slug")
@click.option("--drop", is_flag=True, help="Let nobody send items to it any more.")
@click.option("--project", metavar="DIR", help="The project's folder; else this one, or one above.")
@click.pass_context
def token(ctx: click.Context, slug: str, drop: bool, project: str | None) -> None:
    """Make the token by which items may be sent to a pipeline, and print it, this one time.

    Until it has a token, a pipeline takes no items. A new token takes the place of the one before,
    at once. Only its hash is kept.

    \b
    Example: odf token orders > orders.token
    Example: odf token orders --drop
    """
    store = store_of(ctx, project)
    if drop:
        if not tokens.drop_token(store, slug):
            raise Refused(
                f"Pipeline {slug!r} has no token: it takes no items. "
                f"To let it, run `odf token {typed(slug)}`.",
                code="NO_TOKEN",
            )
        click.echo(f"Pipeline {slug!r} takes no items any more.", err=True)
        return
    again = tokens.has_token(store, slug)
    print(tokens.new_token(store, slug))
    replaced = ", in place of the one before" if again else ""
    click.echo(
        f"That is the token of pipeline {slug!r}{replaced}. Send it as `Authorization: Bearer …`; "
        "it can't be shown again.",
        err=True,
    )
