"""`odf history` and `odf runs`: every change of a status or registration, steps of pipelines."""

import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import click

from ..errors import WrongUse
from ..store.history import (
    LISTED_ROWS,
    Event,
    end_of_log,
    events_after,
    in_time,
    registrations,
    unread,
    whole_history,
    whole_runs,
    words_of,
)
from ..store.history import clean as clean_steps
from ..store.history import history as past
from ..store.history import steps as steps_of
from ..store.operations import refuse_unknown_job, refuse_unknown_name
from ..store.store import Store
from ..util.text import printable
from ..util.times import parse_time
from .app import DATASET, JOB
from .output import (
    as_json,
    count_of,
    in_pager,
    json_text,
    knowing_pipelines,
    most_of,
    read_word,
    refuse_unknown_pipeline,
    show,
    show_first,
    shown_rows,
    store_of,
)

POLL_SECONDS = 1.0

WARN_SECONDS = 60.0
"""Seconds between two warnings that changes can't be read yet."""

CHANGES_SHOWN = 100
"""Changes of a status that are listed by default."""

WHOLE_RUN = "(the run)"
"""Stands for the transformation of a step that is none."""


class HistoryGroup(click.Group):
    """A command that takes a job's name, and has one word that isn't a job's: `clean`."""

    allow_interspersed_args = True

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] and args[0] in self.commands:
            name = f"{info_name} {args[0]}"
            return self.commands[args[0]].make_context(name, args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Command.parse_args(self, ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, ctx)

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)


@click.command(cls=HistoryGroup, invoke_without_command=True)
@click.argument("job", required=False, type=JOB)
@click.argument("dataid", required=False)
@click.option(
    "--job",
    "named_job",
    type=JOB,
    metavar="ID",
    help="The same as JOB, for a job that is named `clean`.",
)
@click.option(
    "--pipeline", metavar="SLUG", help="Show the steps of the pipeline's runs, newest first."
)
@click.option(
    "--dataset",
    type=DATASET,
    metavar="ID",
    help="Only changes of this dataset and its registration.",
)
@click.option(
    "--policy", type=JOB, metavar="JOB", help="Show the changes of a job's dials and registration."
)
@click.option(
    "--since", metavar="TIME", help="Only changes since a time, such as 2026-03-01T14:30."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"Rows to show: {CHANGES_SHOWN} by default; with --pipeline, {LISTED_ROWS} runs.",
)
@click.option(
    "--status", "words", multiple=True, metavar="STATUS", help="Only changes to this status."
)
@click.option("--all", "everything", is_flag=True, help="Show all changes.")
@click.option("--follow", is_flag=True, help="Keep showing changes as they happen, until Ctrl-C.")
@as_json
@click.pass_context
@in_pager
def history(
    ctx: click.Context,
    job: str | None,
    dataid: str | None,
    named_job: str | None,
    pipeline: str | None,
    dataset: str | None,
    policy: str | None,
    since: str | None,
    limit: int | None,
    words: tuple[str, ...],
    everything: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Show every change of status: when, who and why.

    The latest change comes last. For the change of a registration, the column locktype says what
    changed: the dataset, the dials, IN or OUT for what a job reads or writes, or the name of one of
    its variables. Only a digest of a password is kept.

    With --follow and --json, each change is one line with a JSON object.

    With --pipeline, you see what each transformation did and why a run failed; with the run's
    DATAID, also everything that was printed.

    \b
    Example: odf history loadbob 2026-03-01
    Example: odf history --dataset bobout --since 2026-03-01
    Example: odf history --pipeline clean_contacts --limit 5
    """
    if pipeline is not None:
        if named_job or dataid or dataset or policy or since or follow or words or everything:
            raise WrongUse("Use --pipeline only with DATAID, --limit and --json.")
        _show_steps(ctx, pipeline, job, limit or LISTED_ROWS, as_json)
        return
    if named_job is not None:
        if job is not None and dataid is not None:
            raise WrongUse("The job is given twice. Use JOB or --job, not both.")
        job, dataid = named_job, job
    if everything and (follow or limit):
        raise WrongUse("Use one of --all, --limit and --follow.")
    statuses = [read_word(word) for word in words]
    store = store_of(ctx)
    start = parse_time(store, since) if since else None
    if policy is not None:
        if job or dataset or follow or statuses:
            raise WrongUse("Use --policy only with --since, --limit, --all and --json.")
        changes = registrations(store, jobid=policy, since=start)
        if not changes:
            refuse_unknown_job(store, policy)
        _show_events(changes if everything else changes[-(limit or CHANGES_SHOWN) :], as_json)
        return
    selection = _Selection(job, dataid, dataset, start, statuses)
    if follow:
        _follow(store, selection, limit or CHANGES_SHOWN, as_json)
    elif everything:
        _newest(store, selection, 1)  # refuses an unknown name
        events = whole_history(store, **selection.ids(), since=start, statuses=statuses)
        _show_events(in_time(_registration_changes(store, selection), events), as_json)
    else:
        most = limit or CHANGES_SHOWN
        events = _newest(store, selection, most)
        changes = _registration_changes(store, selection)
        _show_events(list(in_time(changes, events))[-most:], as_json)


class _Selection(NamedTuple):
    """Which changes to show; None is any."""

    job: str | None
    dataid: str | None
    dataset: str | None
    since: datetime | None
    statuses: Sequence[str]

    def ids(self) -> dict[str, str | None]:
        return {"jobid": self.job, "dataid": self.dataid, "datasetid": self.dataset}

    def includes(self, event: Event) -> bool:
        if self.statuses and event.status_after not in words_of(self.statuses):
            return False
        return all(getattr(event, key) == value for key, value in self.ids().items() if value)


def _newest(store: Store, selection: _Selection, limit: int) -> list[Event]:
    """The last changes; if there are none, an unknown job or dataset is refused."""
    events = past(
        store,
        **selection.ids(),
        since=selection.since,
        statuses=selection.statuses,
        limit=limit,
    )
    if not events and selection.job is not None:
        with knowing_pipelines(store, selection.job):
            refuse_unknown_job(store, selection.job)
    if not events and selection.dataset is not None:
        refuse_unknown_name(store, selection.dataset)
    return events


def _registration_changes(store: Store, selection: _Selection) -> list[Event]:
    """The changes of a dataset's registration, if changes of the whole dataset are wanted."""
    if selection.dataset is None or selection.job or selection.dataid or selection.statuses:
        return []
    return registrations(store, datasetid=selection.dataset, since=selection.since)


def _follow(store: Store, selection: _Selection, limit: int, as_json: bool) -> NoReturn:
    """Print the last changes, then others as they come, until Ctrl-C."""
    # The cursor first: a change that comes between the two is read twice and printed once. The
    # other way round, it would be lost.
    cursor: str | None = end_of_log(store)
    newest = _newest(store, selection, limit)
    for event in newest:
        _print_event(event, as_json=as_json)
    printed = {event.seq for event in newest}
    warn_at = 0.0
    while True:
        events, cursor = events_after(store, cursor)
        for event in events:
            if event.seq not in printed and selection.includes(event):
                _print_event(event, as_json=as_json)
        if not events:
            if time.monotonic() > warn_at and (late := unread(store)):
                click.echo(late, err=True)
                warn_at = time.monotonic() + WARN_SECONDS
            time.sleep(POLL_SECONDS)


def _show_events(events: Iterable[Event], as_json: bool) -> None:
    left_out: set[str] = set()
    if not as_json:  # to a person, `who` tells of the execution what there is to say
        is_without_code = isinstance(events, list) and not any(event.code for event in events)
        left_out = {"execution", "code"} if is_without_code else {"execution"}
    rows: Iterable[dict[str, Any]] = (
        {key: value for key, value in event._asdict().items() if key not in left_out}
        for event in events
    )
    if not as_json and sys.stdout.isatty():
        rows = map(_for_a_screen, rows)
    show_first(rows, None, as_json=as_json, empty="No changes are recorded.")


@history.command("clean")
@click.option("--pipeline", metavar="SLUG", help="Only data of this pipeline.")
@click.option("--days-old", type=float, metavar="N", help="Only data that is older than N days.")
@click.option("--plan", is_flag=True, help="Count what would be removed, and change nothing.")
@as_json
@click.pass_context
def history_clean(
    ctx: click.Context, pipeline: str | None, days_old: float | None, plan: bool, as_json: bool
) -> None:
    """Remove the output of pipelines' steps, and payloads of READY items.

    Statuses and their history stay, so everything that could run still can. The steps of current
    runs stay, and so do items that failed, wait or are held.

    An idempotency key is kept until its items are removed, and for a day at least.

    \b
    Example: odf history clean --days-old 30 --plan
    Example: odf history clean --pipeline orders
    """
    store = store_of(ctx)
    done = clean_steps(store, pipeline, days_old, plan)
    if pipeline is not None and not any(done):
        _refuse_typo(store, pipeline)
    if as_json:
        show([{"pipeline": pipeline} | done._asdict()], as_json=True)
    verb = "would be removed" if plan else "removed"
    click.echo(
        f"{count_of(done.steps, 'step')}, {count_of(done.items, 'payload')} and "
        f"{count_of(done.keys, 'key')} {verb}.",
        err=True,
    )


def _refuse_typo(store: Store, slug: str) -> None:
    """Refuse a name that no pipeline has, unless some of its runs or items are left."""
    left = steps_of(store, slug, limit=1) or list(whole_runs(store, jobid=slug, limit=1))
    if not left and not any(clean_steps(store, slug, plan=True)):
        refuse_unknown_pipeline(store, slug)


def _print_event(event: Event, *, as_json: bool) -> None:
    """Print one change as it comes."""
    [row] = shown_rows([event._asdict()], as_json=as_json)
    if as_json:
        print(json_text(row), flush=True)
        return
    by = " ".join(str(row[key]) for key in ("who", "why") if row[key])
    chunk = f"{row['datasetid']}/{row['dataid']}"
    words = (row["at"], row["jobid"], row["locktype"], chunk, _change(row), by)
    print(printable("  ".join(map(str, words))), flush=True)


def _for_a_screen(row: dict[str, Any]) -> dict[str, Any]:
    """A change in fewer columns: the whole row goes to pipes and programs."""
    return {
        "at": row["at"],
        "jobid": row["jobid"],
        "lock": row["locktype"],
        "chunk": f"{row['datasetid']}/{row['dataid']}",
        "change": _change(row).replace(" ", ""),
        "by": " ".join(str(row[key]) for key in ("who", "why") if row[key]),
    }


def _change(row: dict[str, Any]) -> str:
    return f"{row['status_before'] or '–'} → {row['status_after'] or '–'}"


def _show_steps(
    ctx: click.Context, pipeline: str, dataid: str | None, limit: int, as_json: bool
) -> None:
    """List a pipeline's steps; of a single chunk also all that they printed."""
    store = store_of(ctx)
    found = steps_of(store, pipeline, dataid, limit)
    if not found:
        refuse_unknown_pipeline(store, pipeline)
    rows = shown_rows(
        [_step(row, as_json, whole=dataid is not None) for row in found], as_json=as_json
    )
    show(rows, as_json=as_json, empty="No run of it is recorded. See `odf pipeline list`.")
    if as_json or dataid is None:
        return
    for row in found:
        for what in ("stdout", "traceback"):
            if row[what]:
                title = f"{row['transformation']}, generation {row['generation']}: {what}"
                print(f"\n--- {printable(title)}")
                print("\n".join(map(printable, row[what].rstrip("\n").split("\n"))))


def _step(row: dict[str, Any], as_json: bool, *, whole: bool) -> dict[str, Any]:
    started, ended = row["started"], row["ended"]
    seconds = round((ended - started).total_seconds(), 3) if started and ended else None
    shown = {
        "dataid": row["dataid"],
        "generation": row["generation"],
        "step": row["step"],
        "transformation": row["transformation"],
        "status": row["status"],
        "started": started,
        "seconds": seconds,
        "rows": row["rows"],
        "reason": row["reason"],
    }
    if row["transformation"] is None and not as_json:
        shown["transformation"] = WHOLE_RUN
    if as_json:
        shown["ended"] = ended
        if whole:
            shown |= {"stdout": row["stdout"], "traceback": row["traceback"]}
    return shown


@click.command()
@click.argument("job", required=False, type=JOB)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Rows to show: {LISTED_ROWS} by default.",
)
@click.option(
    "--status", "words", multiple=True, metavar="STATUS", help="Only outputs of this status."
)
@click.option(
    "--since", metavar="TIME", help="Only outputs that changed since, such as 2026-03-01."
)
@click.option("--all", "everything", is_flag=True, help="Show all outputs.")
@as_json
@click.pass_context
@in_pager
def runs(
    ctx: click.Context,
    job: str | None,
    limit: int | None,
    words: tuple[str, ...],
    since: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show the outputs that changed last, newest first.

    \b
    Example: odf runs
    Example: odf runs loadbob --status FAILED --limit 5
    """
    store = store_of(ctx)
    most = most_of(limit, everything, as_json=False, screen=LISTED_ROWS)
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
    listed = rows if first is None else chain([first], rows)
    chosen = words or since
    empty = "There are no such outputs." if chosen else "Nothing has run yet."
    show_first(listed, None, as_json=as_json, empty=empty)
