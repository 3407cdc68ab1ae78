"""`odf status` and `odf runs`: how things stand."""

import shutil
import sys
from collections.abc import Sequence
from itertools import chain

import click

from ..errors import WrongUse
from ..model import ABSENT, FAILED, HOLD, PENDING, READY, RESUBMIT, RUNNING
from ..store.history import NEWEST, whole_runs
from ..store.item_folding import folds
from ..store.overview import MANY, Strip, running, summary
from ..store.overview import grid as squares
from ..store.overview import status as rows_of
from ..store.refusals import refuse_unknown_job, refuse_unknown_name
from ..util.times import parse_time
from .output import (
    as_json,
    in_colour,
    knowing_pipelines,
    limits,
    most_of,
    read_word,
    show,
    show_first,
    store_of,
)

MORE = "--limit or --all shows more, --status FAILED and --since fewer"

LOOKS = {
    READY: ("■", "green", "R", "READY"),
    RUNNING: ("■", "blue", ">", "RUNNING"),
    FAILED: ("■", "red", "F", "FAILED"),
    RESUBMIT: ("■", "yellow", "S", "RESUBMIT"),
    HOLD: ("■", "magenta", "H", "HOLD"),
    PENDING: ("□", "white", "P", "PENDING"),
    ABSENT: ("□", "cyan", ".", "may be claimed"),
}
"""How each status is drawn: a coloured square, or a letter."""


@click.command(epilog="Example: odf status loadbob --json")
@click.argument("name", required=False, metavar="[JOB/DATASET]")
@click.option(
    "--grid", is_flag=True, help="Draw a square for each chunk, also where it isn't a terminal."
)
@click.option(
    "--running", "only_running", is_flag=True, help="List who runs what, and until when they may."
)
@click.option("--counts", "only_counts", is_flag=True, help="Only the counts, also as JSON.")
@click.option(
    "--status", "words", multiple=True, metavar="STATUS", help="Only chunks of this status."
)
@click.option("--since", metavar="TIME", help="Only chunks that changed since, like 2026-03-01.")
@limits()
@as_json
@click.pass_context
def status(
    ctx: click.Context,
    name: str | None,
    grid: bool,
    only_running: bool,
    only_counts: bool,
    words: tuple[str, ...],
    since: str | None,
    limit: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show how many chunks of each job are in which status; with a name, its chunks one by one.

    With --json, the chunks one by one, unless it is for --counts or --running.

    On a terminal, a coloured square for each chunk, in natural order, comes with the counts. Above
    100,000 chunks a sample is drawn, with every chunk of a rare status.

    Of more than 1,000 chunks, those with shorter ids come first.
    """
    store = store_of(ctx)
    most = most_of(limit, everything, as_json)
    chosen = bool(words or since)
    if chosen and (grid or only_running or only_counts):
        raise WrongUse("--status and --since list chunks: leave --grid, --running, --counts out.")
    listed = chosen or everything or limit is not None or name is not None
    lists = not (only_counts or only_running) and (as_json or (listed and not grid))
    if name is not None and not lists:  # a listing refuses a name of which it finds nothing
        with knowing_pipelines(store, name):
            refuse_unknown_name(store, name)
    if only_running:
        show_first(running(store, name), most, as_json=as_json, empty="Nothing is running.")
        return
    if lists:
        rows = rows_of(
            store,
            name,
            statuses=[read_word(word) for word in words],
            since=parse_time(store, since) if since else None,
            limit=most and most + 1,
        )
        whose = "There are" if name is None else f"{name!r} has"
        empty = f"{whose} no such chunks." if chosen else f"{whose} no chunks yet."
        with knowing_pipelines(store, name or ""):
            show_first(rows, most, as_json=as_json, empty=empty, more=MORE)
        for fold in folds(store, name):
            click.echo(f"Not listed: {fold}.", err=True)
        return
    counts = summary(store, name)
    if as_json:
        show(counts, as_json=True)
        return
    chunks = sum(row[word.lower()] for row in counts for word in LOOKS if word) + sum(
        row["claimable"] for row in counts
    )
    if grid or (sys.stdout.isatty() and 0 < chunks <= MANY and not only_counts):
        draw(squares(store, name))
    elif sys.stdout.isatty() and chunks:
        click.echo(f"{chunks:,} chunks: `odf status --grid` draws them.", err=True)
    show(counts, as_json=False, empty=_next())
    if sys.stdout.isatty() and (live := running(store, name)):
        click.echo("\nrunning")
        more = "`odf status --running` shows more"
        show_first(live, NEWEST, as_json=False, empty="", more=more)


@click.command(epilog="Example: odf runs loadbob --status FAILED --limit 5")
@click.argument("job", required=False)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help=f"Rows to show: {NEWEST} unless told."
)
@click.option(
    "--status", "words", multiple=True, metavar="STATUS", help="Only outputs of this status."
)
@click.option("--since", metavar="TIME", help="Only outputs that changed since, like 2026-03-01.")
@click.option("--all", "everything", is_flag=True, help="Show all outputs, as they are read.")
@as_json
@click.pass_context
def runs(
    ctx: click.Context,
    job: str | None,
    limit: int | None,
    words: tuple[str, ...],
    since: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show the outputs that changed last, the newest first."""
    store = store_of(ctx)
    most = most_of(limit, everything, as_json=False, screen=NEWEST)
    rows = whole_runs(
        store,
        jobid=job,
        statuses=[read_word(word) for word in words],
        since=parse_time(store, since) if since else None,
        limit=most,
    )
    first = next(rows, None)
    if job is not None and first is None:
        with knowing_pipelines(store, job):
            refuse_unknown_job(store, job)
    found = rows if first is None else chain([first], rows)
    chosen = words or since
    empty = "There are no such outputs." if chosen else "Nothing has run yet."
    show_first(found, None, as_json=as_json, empty=empty)


def draw(strips: Sequence[Strip], width: int | None = None) -> None:
    """Draw a strip for each output of each job, and what the colours or letters mean."""
    colours = in_colour()
    width = width or shutil.get_terminal_size().columns
    for strip in strips:
        each = f", {strip.each} to a square" if strip.each > 1 else ""
        title = f"{strip.jobid} → {strip.datasetid}: {strip.chunks} chunks{each}"
        click.echo(click.style(title, bold=True) if colours else title)
        for at in range(0, len(strip.squares), width - 2):
            line = strip.squares[at : at + width - 2]
            drawn = "".join(_square(word, colours) for word in line).rstrip()
            click.echo("  " + drawn, color=colours)
    used = {word for strip in strips for word in strip.squares if word is not None}
    if used:
        legend = "   ".join(
            f"{_square(word, colours)} {LOOKS[word][3]}" for word in LOOKS if word in used
        )
        click.echo(legend + "\n", color=colours)


def _next() -> str:
    from ..pipelines.project import nearest_project

    if nearest_project():
        return "Nothing has run yet. Next: `odf pipeline list`, `odf pipeline run`."
    return "No jobs yet. Next: `odf dataset add`, `odf job add`."


def _square(word: str | None, colours: bool) -> str:
    if word is None:
        return " "
    square, colour, letter, _ = LOOKS[word]
    return click.style(square, fg=colour) if colours else letter
