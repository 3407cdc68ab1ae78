"""`odf serve` and `odf token`: items over HTTP, the worker that consumes them, who may send."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import Refused, WrongUse
from ..store import items
from ..store.store import Store
from ..util.text import printable, typed
from .fast_run import narrator
from .output import refuse_unknown_pipeline, store_of

if TYPE_CHECKING:
    import socket

    from ..config.settings import Settings
    from ..pipelines.project import Project


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _finite(_: click.Context, __: click.Parameter, rate: float) -> float:
    if not math.isfinite(rate):
        raise click.BadParameter(f"{rate} is no number of items.")
    return rate


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port; 0: any that is free.",
)
@click.option(
    "--project", "folder", metavar="DIR", help="The project's folder; else this one, or one above."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=1000.0,
    show_default=True,
    metavar="N",
    callback=_finite,
    help="Items a second that each pipeline takes.",
)
@click.option("--no-worker", is_flag=True, help="Take items, and let another server consume them.")
@click.option("--as-worker", metavar="DIR", hidden=True)
@click.pass_context
def serve(
    ctx: click.Context,
    host: str,
    port: int,
    folder: str | None,
    rate: float,
    no_worker: bool,
    as_worker: str | None,
) -> None:
    """Take items for a project's pipelines over HTTP, and consume them.

    POST /stream/PIPELINE takes a JSON object, or an array of them, and answers 202 once they are
    durable; GET /status/PIPELINE/DATAID reports the status of one. A pipeline takes items if one
    of its transformations has a parameter `stream`, and once `odf token PIPELINE` has created a
    token. /docs, /openapi.json, /health and /metrics have the details. It listens on this machine
    alone, unless --host says otherwise. On Ctrl-C or TERM it finishes its items or gives them back.

    \b
    Example: odf serve --project shop
    Example: odf serve --host 0.0.0.0 --port 80 --rate 200
    """
    from ..pipelines.project import find_project, project_settings, read_project

    config = ctx.find_root().obj
    if as_worker and folder:
        ctx.exit(_work(project_settings(Path(folder), config), Path(folder), Path(as_worker)))
    project = read_project(find_project(folder))
    settings = project_settings(project.root, config)
    line = None if no_worker else _worker_line(project, config)
    ctx.exit(_serve(settings, project, host, port, rate, line))


def _serve(
    settings: "Settings",
    project: "Project",
    host: str,
    port: int,
    rate: float,
    line: list[str] | None,
) -> int:
    from ..pipelines.deployment import Current, Deploys
    from ..pipelines.project import LOCAL, open_project
    from ..pipelines.run import refuse_master
    from ..pipelines.worker import runs_here
    from ..server import Limits, make_app
    from ..server.http_server import make_server
    from ..server.supervisor import WorkerProcess

    say = narrator(sys.stderr)
    if project.engine == LOCAL:
        refuse_master(settings)
    store = open_project(settings)
    Current(store, project, say=say).refresh()  # without its tables it doesn't begin to listen
    listening = _bound(host, port)
    address = f"http://{_shown(host)}:{listening.getsockname()[1]}"
    deploys = Deploys(project, local=runs_here(settings), say=say)
    worker = None
    if line:
        worker = WorkerProcess([*line, "--as-worker", str(deploys.folder)], say=say)
    limits = Limits(rate=rate)
    app = make_app(store, project, limits=limits, worker=worker, deploys=deploys, say=say)
    server = make_server(app, limits)
    say(f"{printable(project.name)} takes items at {address}/docs")
    if host not in LOOPBACK:
        say("Whoever reaches this address can send items with a token; it speaks plain HTTP")
    # uvicorn sends itself the signal again once it has ended: to a supervisor, TERM ends it well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run([listening])
    finally:
        store.close()
        deploys.close()
    return 0 if server.started else 1


def _work(settings: "Settings", root: Path, folder: Path) -> int:
    from ..pipelines.deployment import hold
    from ..pipelines.project import read_project
    from ..pipelines.worker import serve_items

    hold(folder.parent)
    project = read_project(folder)._replace(root=root)
    return serve_items(settings, project, folder, say=narrator(sys.stderr))


def _worker_line(project: "Project", config: str | None) -> list[str]:
    # -P: a file of the project's folder must not be taken for a module of ours.
    words = [sys.executable, "-P", "-m", "opendataflow_dagster.cli"]
    words += ["--config", os.path.abspath(config)] if config else []
    return [*words, "serve", "--project", str(project.root)]


def _bound(host: str, port: int) -> "socket.socket":
    import socket

    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise WrongUse(
            f"Can't listen at {printable(host)}, port {port}: {error.strerror}. "
            "Choose others by --host and --port."
        ) from None
    return listening


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@click.command()
@click.argument("slug")
@click.option(
    "--drop", is_flag=True, help="Remove the token: nobody can send items to the pipeline then."
)
@click.option(
    "--project", "folder", metavar="DIR", help="The project's folder; else this one, or one above."
)
@click.pass_context
def token(ctx: click.Context, slug: str, drop: bool, folder: str | None) -> None:
    """Create the token that clients need to send items to a pipeline, and print it once.

    Until it has a token, a pipeline takes no items. A new token replaces the old one
    at once. Only its hash is kept.

    \b
    Example: odf token orders > orders.token
    Example: odf token orders --drop
    """
    store = _token_store(ctx, slug, folder, drop)
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


def _token_store(ctx: click.Context, slug: str, folder: str | None, drop: bool) -> Store:
    """The store that `odf serve` would use; a pipeline that takes no items is refused a token."""
    from ..pipelines.jobs import takes_items, why_no_items
    from ..pipelines.project import (
        find_project,
        nearest_project,
        open_project,
        project_settings,
        read_project,
    )

    root = find_project(folder) if folder else nearest_project()
    if root is None:
        store = store_of(ctx)
        if not drop:
            refuse_unknown_pipeline(store, slug)
        return store
    if not drop:
        project = read_project(root)
        pipeline = project.pipeline(slug)
        if not takes_items(project, pipeline):
            raise WrongUse(
                printable(
                    f"Pipeline {slug!r} takes no items, so it needs no token: "
                    f"{why_no_items(project, pipeline)}."
                )
            )
    store = open_project(project_settings(root, ctx.find_root().obj))
    ctx.call_on_close(store.close)
    return store
