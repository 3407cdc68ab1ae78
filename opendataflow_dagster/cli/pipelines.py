"""`odf validate`, `pipeline`, `serve`, `token`: projects of pipelines, and items over HTTP."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import NoDatabase, Refused, WrongUse
from ..model import FAILED
from ..runner.run import Outcome
from ..store import items
from ..store.store import Store
from ..util.text import printable, typed
from .fast_run import exit_code, narrated, narrator
from .output import as_json, refuse_unknown_pipeline, show, store_of

if TYPE_CHECKING:
    import socket

    from ..config.settings import Settings
    from ..pipelines.jobs import Known
    from ..pipelines.project import Project


of_project = click.option(
    "--project",
    "folder",
    metavar="DIR",
    help="The project's folder. Default: the current folder or one above it.",
)

by_engine = click.option(
    "--engine",
    type=click.Choice(["spark", "local"]),
    help="Run transformations on Spark, or those of pandas in a process without Java. "
    "Default: `engine` in project.yml.",
)


@click.command()
@click.argument("pipeline", required=False)
@of_project
@by_engine
@click.option("--junit", metavar="FILE", help="Also write a JUnit XML report to FILE, for CI.")
@as_json
@click.pass_context
def validate(
    ctx: click.Context,
    pipeline: str | None,
    folder: str | None,
    engine: str | None,
    junit: str | None,
    as_json: bool,
) -> None:
    """Test each transformation against its expected output.

    Runs each transformation of a project on its expected inputs. A transformation fails if its
    output differs from the expected output, if it returns nothing or its own input, or if its file
    has no `run` or no expectations. A pipeline fails if a source is missing, or if a transformation
    in its folder isn't listed. Exits with 1 if any fails.

    \b
    Example: odf validate
    Example: odf validate clean_orders --project shop --junit report.xml
    """
    from ..pipelines import validate as validation
    from ..pipelines.project import find_project, read_project

    project = read_project(find_project(folder)).on(engine)
    verdicts = []
    say = narrator(sys.stderr)
    for verdict in validation.validate(project, pipeline, ctx.find_root().obj, say=say):
        verdicts.append(verdict)
        if as_json:
            continue
        click.echo(printable(validation.line_of(verdict)))
        if not verdict.passed:
            for line in validation.details_of(verdict):
                click.echo(f"        {printable(line)}")
    if as_json:
        show([validation.object_of(verdict) for verdict in verdicts], as_json=True)
    if junit:
        validation.write_junit(verdicts, Path(junit))
    click.echo(validation.summary_of(verdicts), err=True)
    if not all(verdict.passed for verdict in verdicts):
        ctx.exit(1)


@click.group()
def pipeline() -> None:
    """Run and list the pipelines of a project.

    \b
    Example: odf pipeline run clean_contacts
    """


@pipeline.command("run")
@click.argument("slug", required=False)
@click.option(
    "--stream", metavar="FILE", help="Run once for each row of this CSV file, as an item."
)
@click.option(
    "--all",
    "all_chunks",
    is_flag=True,
    help="Run until nothing is left. Without SLUG: all pipelines, upstream first.",
)
@click.option("--strict", is_flag=True, help="Exit with 3 if there is nothing to do.")
@of_project
@by_engine
@click.pass_context
def run_(
    ctx: click.Context,
    slug: str | None,
    stream: str | None,
    all_chunks: bool,
    strict: bool,
    folder: str | None,
    engine: str | None,
) -> None:
    """Run a pipeline, and write its destination.

    Each run is a chunk of the destination, with a status and a history, and can be resubmitted. It
    also writes output/SLUG.csv.

    Resubmitted runs come first. Otherwise, a pipeline without upstream pipelines starts a new run.
    A pipeline that reads another's output waits for it and uses the same dataid. If its sources
    have no dataid in common, it starts a new run and reads their latest output.

    With --stream, the sources are read once, and the output for one item is the first input for the
    next. With --engine local, or `engine: local` in project.yml, pandas transformations run without
    Spark and Java, with the same results.

    \b
    Example: odf pipeline run clean_contacts
    Example: odf pipeline run --all
    Example: odf pipeline run signups --stream new.csv --project shop
    """
    from ..pipelines.project import find_project, open_project, project_settings, read_project
    from ..pipelines.run import run_project

    if stream is not None and all_chunks:
        raise click.UsageError(
            "Use --all without --stream: a --stream file always runs to its end."
        )
    project = read_project(find_project(folder)).on(engine)
    if slug is None and not all_chunks:
        known = ", ".join(pipeline.slug for pipeline in project.pipelines)
        raise click.UsageError(f"Name a pipeline, or --all for all of them. Its pipelines: {known}")
    if slug is not None:
        project.pipeline(slug)
    settings = project_settings(project.root, ctx.find_root().obj)
    store = open_project(settings)
    try:
        if slug is None:
            outcome, say = Outcome(0), narrator(sys.stderr)
            for name, result in run_project(store, project, settings, say=say, environ=os.environ):
                if result.failed:
                    _print_place(store, project, name, result.failed)
                outcome = outcome.and_then(result)
        else:
            file = None if stream is None else Path(stream)
            outcome = _run_one(store, project, slug, settings, file, all_chunks)
    finally:
        store.close()
    ctx.exit(exit_code(outcome, strict=strict))


def _run_one(
    store: "Store",
    project: "Project",
    slug: str,
    settings: "Settings",
    stream_file: Path | None,
    all_chunks: bool,
) -> Outcome:
    from ..pipelines.run import run_pipeline

    with narrated(store, slug, all_chunks) as (_, say):
        outcome = run_pipeline(
            store,
            project,
            slug,
            settings,
            say=say,
            environ=os.environ,
            stream_file=stream_file,
            all_chunks=all_chunks,
        )
    if outcome.failed:
        _print_place(store, project, slug, outcome.failed)
    return outcome


@pipeline.command("list")
@of_project
@as_json
@click.pass_context
def list_(ctx: click.Context, folder: str | None, as_json: bool) -> None:
    """List the pipelines of a project.

    Shows what each pipeline waits for, its sources, transformations and destination.

    \b
    Example: odf pipeline list
    """
    from ..pipelines.jobs import plans_of, takes_items
    from ..pipelines.project import find_project, project_settings, read_project

    project = read_project(find_project(folder))
    plans = plans_of(project, _known(project_settings(project.root, ctx.find_root().obj), project))

    def listed(names: tuple[str, ...]) -> Any:
        return list(names) if as_json else ", ".join(names)

    rows = [
        {
            "pipeline": pipeline.slug,
            "waits_for": listed(plans[pipeline.slug].inputs),
            "sources": listed(pipeline.sources),
            "transformations": listed(pipeline.transformations),
            "destination": plans[pipeline.slug].outputs[0],
            "items": takes_items(project, pipeline)
            if as_json or takes_items(project, pipeline)
            else None,
            "trouble": pipeline.trouble,
        }
        for pipeline in project.pipelines
    ]
    show(rows, as_json=as_json)


def _known(settings: "Settings", project: "Project") -> "Known":
    """Return what the tables know about the project's datasets; nothing without tables."""
    from ..pipelines.jobs import Known, known_of
    from ..store import open_from

    store = open_from(settings)
    try:
        return known_of(store, {pipeline.slug for pipeline in project.pipelines})
    except NoDatabase:
        return Known()
    finally:
        store.close()


def _print_place(store: "Store", project: "Project", slug: str, failed: int) -> None:
    """Print the commands that show why a run failed, and that run it again."""
    from ..store.history import runs
    from ..store.items import cleaned_away

    say, named = narrator(sys.stderr), typed(slug)
    # Other commands look for the tables in the folder where they are typed.
    there = "" if Path.cwd() == project.root else f"cd {typed(str(project.root))} && "
    say(f"What failed: {there}odf history --pipeline {named}")
    ended = runs(store, jobid=slug, limit=failed)
    last = [row["dataid"] for row in ended if row["status"] == FAILED]
    if not last:  # on HOLD, for a reason that says what to run
        return
    if len(last) == failed and cleaned_away(store, slug, last).issuperset(last):
        say("Post it again: its payload was cleaned away.")
        return
    if failed == 1 and last:
        again = f"odf resubmit {named} {typed(last[0])} && odf pipeline run {named}"
    else:
        again = f"odf resubmit {named} --failed && odf pipeline run {named} --all"
    say(f"Once it is repaired: {there}{again}")


# `odf serve` and `odf token`: items over HTTP, the worker that consumes them, who may send.


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _finite(_: click.Context, __: click.Parameter, rate: float) -> float:
    if not math.isfinite(rate):
        raise click.BadParameter(f"{rate} isn't a number of items.")
    return rate


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port; 0 takes any free port.",
)
@click.option(
    "--project",
    "folder",
    metavar="DIR",
    help="The project's folder. Default: the current folder or one above it.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=1000.0,
    show_default=True,
    metavar="N",
    callback=_finite,
    help="Items per second that each pipeline accepts.",
)
@click.option("--no-worker", is_flag=True, help="Only accept items: another server processes them.")
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
    """Accept items for pipelines over HTTP, and process them.

    POST /stream/PIPELINE takes a JSON object, or an array of them, and answers 202 once they are
    durable. GET /status/PIPELINE/DATAID returns the status of an item. /docs, /openapi.json,
    /health and /metrics have the details.

    A pipeline accepts items if one of its transformations has a parameter `stream`, and if `odf
    token PIPELINE` has created a token. The server listens on this machine only, unless you give
    --host. On Ctrl-C or TERM, it finishes its items or gives them back.

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
    from ..server.http_server import WorkerProcess, make_server

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
        say("Anyone who reaches this address can send items with a token, over plain HTTP")
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
            "Choose another with --host or --port."
        ) from None
    return listening


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@click.command()
@click.argument("slug")
@click.option(
    "--drop", is_flag=True, help="Remove the token, so that the pipeline accepts no items."
)
@click.option(
    "--project",
    "folder",
    metavar="DIR",
    help="The project's folder. Default: the current folder or one above it.",
)
@click.pass_context
def token(ctx: click.Context, slug: str, drop: bool, folder: str | None) -> None:
    """Create the token that clients need to send items.

    The token is printed once; only its hash is kept. Without a token, a pipeline accepts no items.
    A new token replaces the old one at once.

    \b
    Example: odf token orders > orders.token
    Example: odf token orders --drop
    """
    store = _token_store(ctx, slug, folder, drop)
    if drop:
        if not items.drop_token(store, slug):
            raise Refused(
                f"Pipeline {slug!r} has no token, so it accepts no items. "
                f"To create one, run: odf token {typed(slug)}",
                code="NO_TOKEN",
            )
        click.echo(f"Pipeline {slug!r} accepts no items any more.", err=True)
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
    """The store that `odf serve` would use; a pipeline that accepts no items is refused a token."""
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
                    f"Pipeline {slug!r} accepts no items, so it needs no token: "
                    f"{why_no_items(project, pipeline)}."
                )
            )
    store = open_project(project_settings(root, ctx.find_root().obj))
    ctx.call_on_close(store.close)
    return store
