"""What a person moves (`odf ready`, `resubmit`, `hold` …), and what `clean`, `compact` tidy up."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from ..errors import DataflowError, Refused, WrongUse
from ..location import SQLITE, Folder, ObjectStore, Table, chunk_place
from ..model import HOLD, RESUBMIT, RUNNING, check_id, read_status
from ..storage import cleanup
from ..storage.cleanup import BACK, POINTER, Leftover, Remove
from ..store import operations
from ..store.moves import person
from ..store.operations import change_rows, refuse_unknown_job, unknown_dataset
from ..store.store import Store, is_registered
from ..util.text import typed
from ..util.times import parse_duration, parse_time
from .app import DATASET, JOB
from .fast_run import EXIT_IDLE, complain
from .output import (
    as_json,
    count_of,
    knowing_pipelines,
    most_of,
    show,
    show_first,
    some_of,
    store_of,
)

PLANNED_CHUNKS = 10_000
"""Chunks that failed or are stale and that a plan looks at, unless it is for a program."""

_plan = click.option("--plan", is_flag=True, help="Show what would change, and change nothing.")
_reason = click.option("--reason", metavar="TEXT", help="The reason to record in the history.")
_strict = click.option("--strict", is_flag=True, help="Exit with 3 if there is nothing to do.")


@click.command()
@click.argument("datasetid", type=DATASET)
@click.argument("dataids", nargs=-1, required=True, metavar="DATAID...")
@click.option("--new", is_flag=True, help="Accept an unknown dataset.")
@_reason
@_plan
@_strict
@as_json
@click.pass_context
def ready(
    ctx: click.Context,
    datasetid: str,
    dataids: tuple[str, ...],
    new: bool,
    reason: str | None,
    plan: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Mark chunks that were produced elsewhere as READY.

    Jobs that read them can then run. A dataset that isn't registered, has no chunks, and isn't
    used by any job needs --new: its name may be misspelled.

    \b
    Example: odf ready bobin 2026-03-01 2026-03-02
    """
    store = store_of(ctx)
    moved = operations.ready(store, datasetid, dataids, new=new, plan=plan, why=reason)
    if not is_registered(store, datasetid):
        click.echo(
            f"Note: dataset {datasetid!r} isn't registered, so jobs get no variables for it. "
            f"To register it, run: odf dataset add {typed(datasetid)}",
            err=True,
        )
    _report_moves(ctx, moved, "READY", "already READY", plan, strict, as_json)


@click.command()
@click.argument("jobid", required=False, type=JOB)
@click.argument("dataids", nargs=-1, metavar="[DATAID]...")
@click.option(
    "--failed",
    is_flag=True,
    help="All FAILED chunks; with DATAID, only those that FAILED. Without JOBID: of all jobs.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="READY chunks whose inputs have been replaced since. Without JOBID: of all jobs.",
)
@click.option(
    "--since",
    metavar="TIME",
    help="With --failed: only chunks that failed since, such as 2026-03-01.",
)
@click.option("--downstream", is_flag=True, help="Also resubmit all chunks downstream.")
@_reason
@_plan
@_strict
@as_json
@click.pass_context
def resubmit(
    ctx: click.Context,
    jobid: str | None,
    dataids: tuple[str, ...],
    failed: bool,
    stale: bool,
    since: str | None,
    downstream: bool,
    reason: str | None,
    plan: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Mark READY, FAILED or held chunks to be run again.

    A pipeline's chunk is refused if its file or table already has the rows of a newer chunk.

    \b
    Example: odf resubmit loadbob 2026-03-01
    Example: odf resubmit loadbob --failed
    Example: odf resubmit --failed --since 2026-03-01 --plan
    Example: odf resubmit --stale --plan
    Example: odf resubmit loadbob 2026-03-01 --downstream --plan
    """
    if stale and (failed or downstream):
        raise WrongUse(
            "Use --stale alone. Chunks downstream become stale when the stale ones have run again."
        )
    if since and not failed:
        raise WrongUse("--since selects chunks that failed: use it with --failed.")
    with knowing_pipelines(store := store_of(ctx), jobid or ""):
        moved = operations.resubmit(
            store,
            jobid,
            dataids,
            failed=failed,
            stale=stale,
            since=parse_time(store, since) if since else None,
            downstream=downstream,
            plan=plan,
            most=None if as_json else PLANNED_CHUNKS,
            why=reason,
        )
    _report_moves(ctx, moved, "RESUBMIT", "already RESUBMIT", plan, strict, as_json)


def _chunk_command(function: Callable[..., None]) -> click.Command:
    """A command about named chunks of a job, with what `_hold_or_release` takes."""
    for decorate in (
        click.pass_context,
        as_json,
        _strict,
        _plan,
        _reason,
        click.argument("dataids", nargs=-1, required=True, metavar="DATAID..."),
        click.argument("jobid", type=JOB),
    ):
        function = decorate(function)
    return click.command()(function)


@_chunk_command
def hold(ctx: click.Context, **given: Any) -> None:
    """Keep chunks from being run or read until you release them.

    \b
    Example: odf hold loadbob 2026-03-01 --reason "the source is wrong"
    """
    _hold_or_release(ctx, operations.hold, **given)


@_chunk_command
def release(ctx: click.Context, **given: Any) -> None:
    """Return held chunks to the status that they had before.

    \b
    Example: odf release loadbob 2026-03-01
    """
    _hold_or_release(ctx, operations.release, **given)


def _hold_or_release(
    ctx: click.Context,
    act: Callable[..., operations.Moved],
    jobid: str,
    dataids: tuple[str, ...],
    reason: str | None,
    plan: bool,
    strict: bool,
    as_json: bool,
) -> None:
    with knowing_pipelines(store := store_of(ctx), jobid):
        moved = act(store, jobid, dataids, plan=plan, why=reason)
    if act is operations.hold:
        after, same = "HOLD", "already on HOLD"
    else:
        after, same = "", "not on HOLD"
    _report_moves(ctx, moved, after, same, plan, strict, as_json)


@click.command("delete-run")
@click.argument("jobid", type=JOB)
@click.argument("dataid")
@_reason
@click.pass_context
def delete_run(ctx: click.Context, jobid: str, dataid: str, reason: str | None) -> None:
    """Delete a job's rows for one chunk, as if it had never run.

    The history stays, and so do the rows of other jobs.

    \b
    Example: odf delete-run loadbob 2026-03-01
    """
    with knowing_pipelines(store := store_of(ctx), jobid):
        gone = operations.delete_run(store, jobid, dataid, why=reason)
    click.echo(
        f"{count_of(gone, 'row')} of job {jobid!r} for chunk {dataid!r} deleted; "
        "the history stays.",
        err=True,
    )


@click.command()
@click.option("--job", "jobid", type=JOB, metavar="JOB", help="Only this job.")
@click.option(
    "--older-than",
    "age",
    metavar="AGE",
    help="Also resubmit what has been RUNNING without a claim for longer than AGE.",
)
@_plan
@_strict
@as_json
@click.pass_context
def recover(
    ctx: click.Context, jobid: str | None, age: str | None, plan: bool, strict: bool, as_json: bool
) -> None:
    """Give back chunks of expired claims, and grant due retries.

    A chunk that is RUNNING without a claim belongs to the Java program, and only you know whether
    that program is still alive. Such chunks are listed; --older-than resubmits them.

    \b
    Example: odf recover
    Example: odf recover --job loadbob --older-than 2h --plan
    """
    if jobid is not None:
        check_id("jobid", jobid)
    seconds = parse_duration(age) if age is not None else None
    store = store_of(ctx)
    if jobid is not None:
        with knowing_pipelines(store, jobid):
            refuse_unknown_job(store, jobid)
    settled = operations.due(store, jobid) if plan else store.recover(jobid, who=person())
    rows = [_chunk(claim.jobid, claim.dataid, claim.status, claim.reason) for claim in settled]
    running: list[dict[str, Any]] = []
    if seconds is None:
        outputs = operations.unclaimed(store, jobid)
        chunks = dict.fromkeys(output[:1] + output[2:5] for output in outputs)
        running = [_chunk(*chunk[:3], f"no claim, since {chunk[3]}") for chunk in chunks]
    else:
        abandoned = operations.recover_abandoned(store, seconds, jobid=jobid, plan=plan)
        chunks = dict.fromkeys((move.jobid, move.dataid) for move in abandoned.moves)
        rows += [_chunk(*chunk, RESUBMIT, f"no claim for more than {age}") for chunk in chunks]

    if rows or running or as_json:
        _show(rows + running, as_json)
    click.echo(f"{count_of(len(rows), 'chunk')} {'to recover' if plan else 'recovered'}.", err=True)
    if running:
        click.echo(
            f"{count_of(len(running), 'chunk')} RUNNING without a claim. If the program is gone, "
            "run: odf recover --older-than 2h",
            err=True,
        )
    if strict and not rows:
        ctx.exit(EXIT_IDLE)


def _chunk(jobid: str, dataid: str, status: str, why: str) -> dict[str, Any]:
    return {"jobid": jobid, "dataid": dataid, "status": status, "why": why}


def _show(rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    most = most_of(None, everything=False, as_json=as_json)
    show_first(rows, most, as_json=as_json, empty="", more="--json lists all")


def _report_moves(
    ctx: click.Context,
    moved: operations.Moved,
    after: str,
    same: str,
    plan: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """List the moves for a program or a plan, and summarize them for a person."""
    if as_json or (plan and moved.moves):
        _show((move._asdict() for move in moved.moves), as_json)
    if after:
        done = f"{'would become' if plan else 'became'} {after}"
    else:
        done = "would be released" if plan else "released"
    if moved.cut:
        click.echo(f"The plan covers only {PLANNED_CHUNKS:,} chunks: --json covers all.", err=True)
    jobs = len({move.jobid for move in moved.moves})
    whose = f" of {jobs} jobs" if jobs > 1 else ""
    if moved.moves or not moved.same:
        click.echo(f"{count_of(moved.chunks, 'chunk')}{whose} {done}.", err=True)
    if moved.same:
        click.echo(f"{count_of(len(moved.same), 'chunk')} {same}: nothing to do.", err=True)
    for row in moved.left[:5]:
        click.echo(
            f"Skipped: {row.dataid!r} of {row.jobid!r} is {row.status_before}. {_cure(row)}",
            err=True,
        )
    if len(moved.left) > 5:
        click.echo(f"Skipped: {len(moved.left) - 5} more.", err=True)
    if strict and not moved.moves:
        ctx.exit(EXIT_IDLE)


def _cure(row: operations.Move) -> str:
    chunk = typed(row.jobid, row.dataid)
    if row.status_before == RUNNING:
        return f"When it has ended, run: odf resubmit {chunk}"
    if read_status(row.status_before or None) != HOLD:
        return f"Its location has a newer chunk. To see which, run: odf resubmit {chunk}"
    return f"To run it again, run: odf resubmit {chunk}"


# `odf clean` and `odf compact`: what lies where chunks are published.


_plan_of_files = click.option(
    "--plan", is_flag=True, help="Show what would be done, and change nothing."
)

_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)I?B?", re.IGNORECASE)


@click.command()
@click.argument("datasets", nargs=-1, type=DATASET, metavar="[DATASET]...")
@click.option(
    "--older-than",
    "age",
    metavar="AGE",
    default="1h",
    show_default=True,
    help="Skip what changed more recently.",
)
@_plan_of_files
@as_json
@click.pass_context
def clean(
    ctx: click.Context, datasets: tuple[str, ...], age: str, plan: bool, as_json: bool
) -> None:
    """Remove what crashed publishes left behind.

    Removes directories, versions and staging tables of claims that have ended, and restores chunks
    that a crash moved aside. Live claims are never touched: if the process of a claim is dead, run
    `odf recover` first.

    \b
    Example: odf clean --plan
    Example: odf clean bobout --older-than 10m
    """
    grace = parse_duration(age)
    store = store_of(ctx)
    rows, failed = [], False
    for datasetid, found in _leftovers(ctx, store, datasets, grace):
        try:
            for row, remove in found:
                if plan or remove():
                    rows.append(row)
        except (DataflowError, OSError) as error:
            failed = True
            complain(DataflowError(f"Can't clean {datasetid!r}: {error}"))
    if plan or as_json:
        show([_leftover_row(row) for row in rows], as_json=as_json, empty="Nothing to clean.")
    kept = [row for row in rows if row.what not in (BACK, POINTER)]
    size = sum(row.bytes or 0 for row in kept)
    verb = "would be removed" if plan else "removed"
    click.echo(f"{count_of(len(kept), 'leftover')} {verb}, {count_of(size, 'byte')}.", err=True)
    if len(kept) < len(rows):
        verb = "would be restored" if plan else "restored"
        click.echo(f"{count_of(len(rows) - len(kept), 'chunk')} {verb}.", err=True)
    if failed:
        ctx.exit(1)


@click.command()
@click.argument("dataset", type=DATASET)
@click.argument("dataids", nargs=-1, metavar="[DATAID]...")
@click.option("--unpack", is_flag=True, help="Give each packed chunk its own directory again.")
@click.option(
    "--target-size",
    "size",
    metavar="SIZE",
    default="128MB",
    show_default=True,
    help="The size of a file to aim for.",
)
@_plan_of_files
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="With --plan: look at all chunks, even of a dataset with more than 100,000.",
)
@as_json
@click.pass_context
def compact(
    ctx: click.Context,
    dataset: str,
    dataids: tuple[str, ...],
    unpack: bool,
    size: str,
    plan: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Merge the many small files of chunks into fewer files.

    Only READY chunks without a claim are rewritten. A reader that has just listed the old files
    fails: run it again.

    Earlier versions packed small chunks into files in the folder `_packs` of the dataset. This
    version still reads packs; the next one won't. --unpack gives each chunk its own directory; run
    `odf clean` afterwards to remove the packs.

    For a dataset with more than 100,000 chunks, --plan looks at the 10,000 that changed last.

    \b
    Example: odf compact bobout --plan
    Example: odf compact bobout 2026-03-01 --target-size 256MB
    Example: odf compact bobout --unpack
    """
    from ..storage import compact as rewrites

    store, target = store_of(ctx), _bytes(size)
    whole = everything or not plan or bool(dataids)
    some = some_of(store, [dataset], whole).get(dataset)
    done = left = 0
    if unpack:
        found = rewrites.unpack(store, dataset, dataids, plan=plan, some=some)
    else:
        found = rewrites.compact(store, dataset, dataids, target=target, plan=plan, some=some)

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal done, left
        for row in found:
            done, left = (done, left + 1) if row.left else (done + 1, left)
            if plan or as_json or row.left:
                yield row._asdict()

    rewritten, most = rows(), most_of(None, everything=False, as_json=as_json)
    show_first(rewritten, most, as_json=as_json, empty="", more="--json lists all")
    for _ in rewritten:  # each step of the loop rewrites a chunk, also one that isn't listed
        pass
    verb = "would be " if plan else ""
    what = "unpacked" if unpack else "compacted"
    click.echo(f"{count_of(done, 'chunk')} {verb}{what}, {left} skipped.", err=True)


def _leftovers(
    ctx: click.Context, store: Store, names: tuple[str, ...], grace: float
) -> Iterator[tuple[str, Iterator[tuple[Leftover, Remove]]]]:
    """What to clean, by dataset; a folder that two datasets share is looked at once."""
    registered = cleanup.registered(store)
    unknown = sorted(set(names) - {datasetid for datasetid, _, _ in registered})
    if unknown:
        raise unknown_dataset(store, unknown[0])
    seen: set[Any] = set()
    for datasetid, columns, encrypted in registered:
        if names and datasetid not in names:
            continue
        try:
            target = chunk_place(datasetid, columns)
        except Refused:
            if names:
                raise
            continue  # such as `today`, which is no place
        place = (
            target._replace(datasetid="", column="")
            if isinstance(target, Table)
            else target._replace(datasetid="", format="")
        )
        if place not in seen:
            seen.add(place)
            yield datasetid, _of(ctx, store, target, encrypted, grace)


def _of(
    ctx: click.Context, store: Store, target: Any, encrypted: str | None, grace: float
) -> Iterator[tuple[Leftover, Remove]]:
    if isinstance(target, Folder):
        yield from cleanup.in_folder(store, target.datasetid, target.root, grace)
    elif isinstance(target, ObjectStore):
        from ..spark.object_store import in_remote

        yield from in_remote(store, target, lambda: _session(ctx), grace)
    elif isinstance(target, Table) and target.dialect != SQLITE:  # which has none
        from ..config.credentials import password_of
        from ..spark.object_store import in_table

        yield from in_table(
            store, target, lambda: password_of(target.datasetid, encrypted), lambda: _session(ctx)
        )


def _session(ctx: click.Context) -> Any:
    from ..config.settings import load_settings
    from ..spark.session import spark_session

    settings = load_settings(ctx.find_root().obj)
    return spark_session(app="odf clean", settings=settings, short=True)


def _leftover_row(row: Leftover) -> dict[str, Any]:
    return row._asdict() | {"age": None if row.age is None else round(row.age)}


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if not found or not int(found[1]):
        raise WrongUse(f"{text!r} isn't a size. Write it like 64MB, 128MB or 1GB.")
    return int(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")


@click.command()
@click.argument("statement", metavar="STATEMENT")
@click.pass_context
def dml(ctx: click.Context, statement: str) -> None:
    """Change rows with an SQL statement of your own.

    It runs in one transaction, and the history records your name.

    \b
    Example: odf dml "update datastatus set status = 'HOLD' where dataid = '2'"
    """
    click.echo(f"{change_rows(store_of(ctx), statement, who=person())} rows affected")
