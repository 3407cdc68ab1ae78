"""`odf status`, `why`, `drift` and `sql`: the state of chunks, and its reasons."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from ..errors import Refused, WrongUse
from ..explain.answers import Reason
from ..explain.explain import ADVICE, Explanation, explain
from ..model import ABSENT, FAILED, HOLD, PENDING, READY, RESUBMIT, RUNNING, Status
from ..storage.presence import Drift, drift_of_data, look_at, shown_word
from ..store.catalog import Catalog, read_catalog
from ..store.history import LISTED_ROWS
from ..store.item_folding import folds
from ..store.operations import (
    refuse_unknown_name,
    select_rows,
)
from ..store.overview import DATE, SAMPLED_ABOVE_CHUNKS, Strip, failures, running, summary
from ..store.overview import grid as squares
from ..store.overview import status as chunk_rows
from ..store.store import Store
from ..util.system import import_beside
from ..util.text import printable, typed
from ..util.times import parse_time, shown
from .app import ANY, DATASET, JOB
from .output import (
    SCREEN_ROWS,
    as_json,
    count_of,
    in_colour,
    in_pager,
    knowing_pipelines,
    limits,
    most_of,
    pipeline_here,
    read_word,
    show,
    show_first,
    shown_rows,
    some_of,
    store_of,
    wrapped,
)

if TYPE_CHECKING:
    from ..dagster.translator import DataflowTranslator


MORE_HINT = "--limit or --all shows more, --status FAILED and --since fewer"

STATUS_SQUARES = {
    READY: ("■", "green", "R", "READY"),
    RUNNING: ("■", "blue", ">", "RUNNING"),
    FAILED: ("■", "red", "F", "FAILED"),
    RESUBMIT: ("■", "yellow", "S", "RESUBMIT"),
    HOLD: ("■", "magenta", "H", "HOLD"),
    PENDING: ("□", "white", "P", "PENDING"),
    ABSENT: ("□", "cyan", ".", "may be claimed"),
}
STATUS_SQUARES |= {
    status: ("■", "red", status[0], status.value)
    for status in Status
    if status not in STATUS_SQUARES
}
"""How each status is drawn: a coloured square, or a letter. One without its own is red."""


@click.command()
@click.argument("name", required=False, type=ANY, metavar="[JOB/DATASET]")
@click.option("--grid", is_flag=True, help="Draw a square for each chunk, even without a terminal.")
@click.option(
    "--running",
    "only_running",
    is_flag=True,
    help="List the claims: who runs what, and when the lease ends.",
)
@click.option(
    "--failed",
    "only_failed",
    is_flag=True,
    help="List the FAILED chunks, the latest first: since when, and why.",
)
@click.option(
    "--counts", "only_counts", is_flag=True, help="Show only the counts; also with --json."
)
@click.option(
    "--status", "words", multiple=True, metavar="STATUS", help="Only chunks of this status."
)
@click.option("--since", metavar="TIME", help="Only chunks that changed since, such as 2026-03-01.")
@limits
@as_json
@click.pass_context
@in_pager
def status(
    ctx: click.Context,
    name: str | None,
    grid: bool,
    only_running: bool,
    only_failed: bool,
    only_counts: bool,
    words: tuple[str, ...],
    since: str | None,
    limit: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show the chunks of each job by status.

    Without a name, the chunks are counted; with the name of a job or a dataset, they are listed.
    --json lists them too, unless you add --counts, --failed or --running.

    On a terminal, a coloured square for each chunk comes above the counts. Above 100,000 chunks,
    the squares show a sample that has every chunk of a rare status.

    A list is in natural order, 9 before 10. In a list of more than 1,000 chunks, shorter ids come
    first.

    \b
    Example: odf status
    Example: odf status loadbob --status FAILED
    Example: odf status --grid
    """
    store = store_of(ctx)
    most = most_of(limit, everything, as_json)
    if only_failed:
        if words or grid or only_running or only_counts:
            raise WrongUse("Use --failed with --since, --limit, --all and --json only.")
        _list_failures(store, name, since, most, as_json)
        return
    chosen = bool(words or since)
    if chosen and (grid or only_running or only_counts):
        raise WrongUse(
            "--status and --since list chunks: use them without --grid, --running, --counts."
        )
    listed = chosen or everything or limit is not None or name is not None
    lists = not (only_counts or only_running) and (as_json or (listed and not grid))
    if lists:
        _list_chunks(store, name, words, since, most, as_json)
        return
    if name is not None:  # a listing refuses a name itself, if it finds no chunks of it
        with knowing_pipelines(store, name):
            refuse_unknown_name(store, name)
    if only_running:
        show_first(running(store, name), most, as_json=as_json, empty="Nothing is running.")
    elif as_json:
        show(summary(store, name), as_json=True)
    else:
        _show_counts(store, name, grid, only_counts)


def _list_chunks(
    store: Store,
    name: str | None,
    words: Sequence[str],
    since: str | None,
    most: int | None,
    as_json: bool,
) -> None:
    """List chunks one by one."""
    rows = chunk_rows(
        store,
        name,
        statuses=[read_word(word) for word in words],
        since=parse_time(store, since) if since else None,
        limit=most and most + 1,
    )
    whose = "There are" if name is None else f"{name!r} has"
    empty = f"{whose} no such chunks." if words or since else f"{whose} no chunks yet."
    with knowing_pipelines(store, name or ""):
        show_first(rows, most, as_json=as_json, empty=empty, more=MORE_HINT)
    for fold in folds(store, name):
        click.echo(f"Not listed: {fold}.", err=True)


def _list_failures(
    store: Store, name: str | None, since: str | None, most: int | None, as_json: bool
) -> None:
    """List the chunks that failed, one by one."""
    if name is not None:
        with knowing_pipelines(store, name):
            refuse_unknown_name(store, name)
    moment = parse_time(store, since) if since else None
    rows = failures(store, name, since=moment, limit=most and most + 1)
    more = "--limit or --all shows more, --since fewer"
    show_first(rows, most, as_json=as_json, empty="Nothing has failed.", more=more)


def _show_counts(store: Store, name: str | None, grid: bool, only_counts: bool) -> None:
    """Show the chunks of each job by status; on a terminal also as squares, and what is running."""
    counts = summary(store, name)
    chunks = sum(row[word.lower()] for row in counts for word in STATUS_SQUARES if word) + sum(
        row["claimable"] for row in counts
    )
    if grid or (sys.stdout.isatty() and 0 < chunks <= SAMPLED_ABOVE_CHUNKS and not only_counts):
        draw(squares(store, name))
    elif sys.stdout.isatty() and chunks:
        click.echo(f"{chunks:,} chunks: `odf status --grid` draws them.", err=True)
    show(counts, as_json=False, empty=_next_step())
    if sys.stdout.isatty() and (live := running(store, name)):
        click.echo("\nrunning")
        more = "`odf status --running` shows more"
        show_first(live, LISTED_ROWS, as_json=False, empty="", more=more)


def draw(strips: Sequence[Strip], width: int | None = None) -> None:
    """Draw a strip for each output of each job, and what the colours or letters mean.

    Strips of the same chunks are drawn below one another, with their dataids above the squares.
    """
    colours = in_colour()
    width = width or shutil.get_terminal_size().columns
    titles = [_title(strip) for strip in strips]
    margin = min(max(map(len, titles), default=0), width // 2)
    columns = width - margin - 2
    for starts, block in groupby(zip(titles, strips, strict=True), key=lambda item: item[1].starts):
        drawn = list(block)
        squares = max(len(strip.squares) for _, strip in drawn)
        for at in range(0, squares, columns):
            if axis := _axis(starts[at : at + columns], columns):
                click.echo(" " * (margin + 2) + axis)
            for title, strip in drawn:
                line = "".join(_square(word, colours) for word in strip.squares[at : at + columns])
                name = f"{strip.jobid} → {strip.datasetid}" if at else title
                shown = (
                    click.style(f"{name:<{margin}}", bold=True) if colours else f"{name:<{margin}}"
                )
                if len(name) > margin:
                    click.echo(shown, color=colours)
                    shown = " " * margin
                click.echo(f"{shown}  {line}".rstrip(), color=colours)
    used = {word for strip in strips for word in strip.squares if word is not None}
    if used:
        legend = "   ".join(
            f"{_square(word, colours)} {STATUS_SQUARES[word][3]}"
            for word in STATUS_SQUARES
            if word in used
        )
        click.echo(legend + "\n", color=colours)


def _title(strip: Strip) -> str:
    """What a strip shows: `load → b: 31 chunks`, and how many stand for one square."""
    scale = f", {strip.each} per square" if strip.each > 1 else ""
    return f"{strip.jobid} → {strip.datasetid}: {count_of(strip.chunks, 'chunk')}{scale}"


def _axis(starts: Sequence[str], columns: int) -> str:
    """Dataids, each above its square: the first, those that begin a month, and some between."""
    axis, last = "", 0
    for at, dataid in enumerate(starts):
        end = at + len(dataid)
        following = starts[min(end + 1, len(starts) - 1)]
        if DATE.match(dataid) and dataid[:7] == starts[at - 1][:7]:
            is_tick = at - last >= AXIS_SQUARES and dataid[:7] == following[:7]
        else:
            is_tick = bool(DATE.match(dataid)) or at - last >= AXIS_SQUARES
        is_short = len(dataid) <= AXIS_SQUARES
        if is_short and (at == 0 or (is_tick and at >= len(axis) + 2 and end <= columns)):
            axis, last = axis.ljust(at) + printable(dataid), at
    return axis


def _next_step() -> str:
    from ..pipelines.project import nearest_project

    if nearest_project():
        return "Nothing has run yet. Next: `odf pipeline list`, `odf pipeline run`."
    return "No jobs yet. Next: `odf dataset add`, `odf job add`."


def _square(word: str | None, colours: bool) -> str:
    if word is None:
        return " "
    square, colour, letter, _ = STATUS_SQUARES[word]
    return click.style(square, fg=colour) if colours else letter


AXIS_SQUARES = 14
"""Squares between two dataids above them, and letters of the longest that is shown there."""

ANSWER_WORDS = {True: "yes", False: "no", None: "unknown"}


@click.command()
@click.argument("job", type=JOB)
@click.argument("dataid", required=False)
@click.option(
    "--at", metavar="TIME", help="Explain a moment in the past, such as 2026-03-01T14:30."
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Check all chunks of the job, even if there are more than 100,000.",
)
@as_json
@click.pass_context
@in_pager
def why(
    ctx: click.Context,
    job: str,
    dataid: str | None,
    at: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Explain why a chunk may or may not run, and what to do.

    Answers five questions: is the data ready, is it the right data, is it in its location, is it
    validated, and is it safe to run? Without DATAID, explains the whole job.

    \b
    Example: odf why loadbob
    Example: odf why loadbob 2026-03-01
    Example: odf why loadbob 2026-03-01 --at 2026-03-02T09:00
    """
    store = store_of(ctx)
    moment = parse_time(store, at) if at else None
    explanation = explain(store, job, dataid, moment, everything=everything, look=look_at)
    if explanation.code == "NOT_REGISTERED" and pipeline_here(store, job):
        reason = Reason(
            explanation.code, f"Pipeline {job!r} hasn't run yet", f"odf pipeline run {typed(job)}"
        )
        explanation = explanation._replace(reasons=[reason])
    if as_json:
        show([_as_object(explanation)], as_json=True)
    else:
        _print_explanation(explanation)
    if explanation.code == "NOT_REGISTERED":
        ctx.exit(Refused.exit_code)


def _print_explanation(explanation: Explanation) -> None:
    """Print an explanation for a person."""
    name = printable(
        explanation.jobid
        if explanation.dataid is None
        else f"{explanation.jobid} {explanation.dataid}"
    )
    verb, has = ("could", "had") if explanation.at else ("may", "has")
    when = f" at {shown(explanation.at)}" if explanation.at else ""
    blocks = [reason for reason in explanation.reasons if reason.code not in ADVICE]
    if explanation.may_run:
        look = " But look first:" if len(blocks) < len(explanation.reasons) else ""
        click.echo(f"{name} {verb} run{when}.{look}")
    elif (
        explanation.dataid is None
        and explanation.next_chunk is None
        and blocks
        and blocks[0].code != "NOT_REGISTERED"
    ):
        click.echo(f"{name} {has} nothing to run{when}: {explanation.code}")
    else:
        click.echo(f"{name} {verb} not run{when}: {explanation.code}")
    if explanation.next_chunk is not None and explanation.dataid is None:
        click.echo(
            f"  {count_of(explanation.counts.get('', 1), 'chunk')} may be claimed; "
            f"the next is {explanation.next_chunk!r}"
        )
    for reason in explanation.reasons:
        click.echo(wrapped(f"  {reason.code}: {printable(reason.text)}", 4))
        if reason.action and not explanation.at:
            click.echo(f"    → {reason.action}")
    if explanation.answers:
        click.echo()
    for answer in explanation.answers:
        label = f"{answer.question + '?':<12} {ANSWER_WORDS[answer.ok]:<8} "
        click.echo(wrapped(label + printable(answer.text), len(label)))
    for note in explanation.notes:
        click.echo(note, err=True)


def _as_object(explanation: Explanation) -> dict[str, Any]:
    """An explanation for programs."""
    return {
        "jobid": explanation.jobid,
        "dataid": explanation.dataid,
        "at": explanation.at and explanation.at.isoformat(),
        "may_run": explanation.may_run,
        "code": explanation.code or None,
        "action": explanation.action or None,
        "next_chunk": explanation.next_chunk,
        "counts": {code or "CLAIMABLE": chunks for code, chunks in explanation.counts.items()},
        "reasons": [reason._asdict() for reason in explanation.reasons],
        "answers": {
            answer.question.replace(" ", "_"): {
                "ok": answer.ok,
                "text": answer.text,
                "rows": shown_rows(answer.rows, as_json=True),
            }
            for answer in explanation.answers
        },
        "notes": explanation.notes,
    }


@click.command()
@click.argument("dataset", required=False, type=DATASET)
@click.option("--repair", is_flag=True, help="Correct Dagster's grid to match the tables.")
@click.option(
    "--no-dagster", is_flag=True, help="Compare only the tables with the data on this machine."
)
@click.option(
    "--translator",
    metavar="MODULE:CLASS",
    envvar="DATAFLOW_TRANSLATOR",
    help="Your DataflowTranslator, if your code location has one.",
)
@click.option(
    "--status",
    "words",
    multiple=True,
    metavar="STATUS",
    help="Only chunks of this status in the tables.",
)
@click.option("--since", metavar="TIME", help="Only chunks that changed since, such as 2026-03-01.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Differences to show: {SCREEN_ROWS} by default, all with --json.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Compare all chunks, even of datasets with more than 100,000, and show all differences.",
)
@as_json
@click.pass_context
@in_pager
def drift(
    ctx: click.Context,
    dataset: str | None,
    repair: bool,
    no_dagster: bool,
    translator: str | None,
    words: tuple[str, ...],
    since: str | None,
    limit: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Compare the tables with Dagster's grid and with the data.

    DAGSTER_HOME names the Dagster instance. Exits with 1 if anything differs.

    In a dataset with more than 100,000 chunks, the 10,000 that changed last are compared, each
    with its recorded location. --all compares all chunks and lists their folder.

    --repair changes Dagster's grid, never the tables or the data. If data is missing, you get the
    command that produces it again.

    \b
    Example: odf drift bobout
    Example: odf drift --no-dagster --json
    """
    store = store_of(ctx)
    most = most_of(limit, everything, as_json)
    statuses = [shown_word(read_word(word)) for word in words]
    start = parse_time(store, since) if since else None

    with ExitStack() as stack:
        instance = names = None
        if not no_dagster:
            names = _translator(translator)
            instance = stack.enter_context(_dagster_instance())
        elif repair:
            raise WrongUse("--repair corrects Dagster's grid: use it without --no-dagster.")
        if repair:
            _repair(store, instance, names)
        catalog = read_catalog(store)
        some = some_of(store, [dataset] if dataset else catalog.domains, everything)
        if instance is None:
            found = drift_of_data(store, catalog, dataset, some)
        else:
            found = _compare(store, instance, names, dataset, some, catalog)
        if statuses:
            found = (difference for difference in found if difference.tables in statuses)
        if start:
            found = _changed(store, catalog, found, start)
        _report(ctx, found, most, as_json)


def _dagster_instance() -> Any:
    if not os.environ.get("DAGSTER_HOME"):
        raise WrongUse(
            "DAGSTER_HOME isn't set, so there is no Dagster to compare with. Set it to the folder "
            "of your dagster.yaml, or use --no-dagster."
        )
    # By name: cli/ works without Dagster, and a contract of import-linter watches that.
    return import_module("dagster").DagsterInstance.get()


def _compare(
    store: Store,
    instance: Any,
    names: "DataflowTranslator | None",
    dataset: str | None,
    some: dict[str, list[str]],
    catalog: Catalog,
) -> Iterable[Drift]:
    from ..dagster.drift import drift
    from ..dagster.internals import degraded
    from ..dagster.reconcile import open_mirror

    if lost := degraded():
        click.echo(lost, err=True)
    return drift(store, open_mirror(instance), names, datasetid=dataset, some=some, catalog=catalog)


def _repair(store: Store, instance: Any, names: "DataflowTranslator | None") -> None:
    from ..dagster.reconcile import repair

    done = repair(store, instance, names)
    counts = {
        f"{done.made} shown as READY": done.made,
        f"{done.planned} as running or failed": done.planned,
        f"{done.cleared} as missing": done.cleared,
        count_of(done.keys, "partition key"): done.keys,
        f"{count_of(done.runs, 'run')} outside Dagster": done.runs,
    }
    told = ", ".join(text for text, count in counts.items() if count)
    click.echo(f"{count_of(done.writes, 'correction')}{': ' if told else ''}{told}.", err=True)


def _changed(
    store: Store, catalog: Catalog, found: Iterable[Drift], since: datetime
) -> Iterator[Drift]:
    """The differences of chunks that changed since then."""
    changed: dict[str, set[str]] = {}
    for difference in found:
        name = difference.datasetid
        if name not in catalog.datasets:  # a key of a whole domain
            continue
        if name not in changed:
            rows = chunk_rows(store, name, since=since)
            changed[name] = {row["dataid"] for row in rows if row["datasetid"] == name}
        if difference.dataid in changed[name]:
            yield difference


def _report(ctx: click.Context, found: Iterable[Drift], most: int | None, as_json: bool) -> None:
    """Show the first differences, and count the rest as they come."""
    differences = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal differences
        for difference in found:
            differences += 1
            yield difference._asdict()

    remaining = rows()
    show_first(remaining, most, as_json=as_json, empty="No drift.", more=MORE_HINT)
    for _ in remaining:  # only to count them
        pass
    if differences:
        if not as_json:
            click.echo(f"{count_of(differences, 'difference')}.", err=True)
        ctx.exit(1)


def _translator(name: str | None) -> "DataflowTranslator | None":
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    import_beside(os.getcwd())
    try:
        return getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise WrongUse(f"--translator {name}: {error}. Give it as MODULE:CLASS.") from None


@click.command()
@click.argument("statement", metavar="SELECT")
@as_json
@click.pass_context
@in_pager
def sql(ctx: click.Context, statement: str, as_json: bool) -> None:
    """Run a query and print its rows.

    The query runs in a read-only transaction.

    \b
    Example: odf sql "select * from datastatus where jobid = 'loadbob'"
    """
    show(select_rows(store_of(ctx), statement), as_json=as_json, empty="No rows.")
