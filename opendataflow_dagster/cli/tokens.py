"""`odf token`: who may send items to a pipeline."""

import click

from ..errors import Refused, WrongUse
from ..store import items
from ..store.store import Store
from ..util.text import printable, typed
from .output import refuse_unknown_pipeline, store_of


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
    store = _store(ctx, slug, project, drop)
    if drop:
        if not items.drop_token(store, slug):
            raise Refused(
                f"Pipeline {slug!r} has no token: it takes no items. "
                f"To let it, run `odf token {typed(slug)}`.",
                code="NO_TOKEN",
            )
        click.echo(f"Pipeline {slug!r} takes no items any more.", err=True)
        return
    again = items.has_token(store, slug)
    print(items.new_token(store, slug))
    replaced = ", in place of the one before" if again else ""
    click.echo(
        f"That is the token of pipeline {slug!r}{replaced}. Send it as `Authorization: Bearer …`; "
        "it can't be shown again.",
        err=True,
    )


def _store(ctx: click.Context, slug: str, project: str | None, drop: bool) -> Store:
    """The store that `odf serve` would use; what couldn't take items has no use for a token."""
    from ..pipelines.jobs import takes_items, why_no_items
    from ..pipelines.project import find_project, nearest_project, read_project
    from ..pipelines.project_settings import open_project, project_settings

    root = find_project(project) if project else nearest_project()
    if root is None:
        store = store_of(ctx)
        if not drop:
            refuse_unknown_pipeline(store, slug)
        return store
    if not drop:
        found = read_project(root)
        pipeline = found.pipeline(slug)
        if not takes_items(found, pipeline):
            raise WrongUse(
                printable(
                    f"Pipeline {slug!r} takes no items, so it needs no token: "
                    f"{why_no_items(found, pipeline)}."
                )
            )
    store = open_project(project_settings(root, ctx.find_root().obj))
    ctx.call_on_close(store.close)
    return store
