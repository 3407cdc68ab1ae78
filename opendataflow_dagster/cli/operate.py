"""`odf ready`, `resubmit`, `hold`, `release`, `delete-run`, `recover`: what a person moves."""

from collections.abc import Callable, Iterable
from typing import Any

import click

from ..errors import WrongUse
from ..model import HOLD, RESUBMIT, RUNNING, check_id, read_status
from ..store import operations
from ..store.moves import person
from ..store.operations import refuse_unknown_job
from ..util.text import typed
from ..util.times import parse_duration, parse_time
from .fast_run import EXIT_IDLE
from .output import as_json, count_of, knowing_pipelines, most_of, show_first, store_of

PLANNED_CHUNKS = 10_000
"""Chunks that failed or are stale and that a plan looks at, unless it is for a program."""

_plan = click.option("--plan", is_flag=True, help="Say what would change, and change nothing.")
_reason = click.option("--reason", metavar="TEXT", help="Why, for the history.")
_strict = click.option("--strict", is_flag=True, help="Exit with 3 when there was nothing to do.")


@click.command()
@click.argument("datasetid")
@click.argument("dataids", nargs=-1, required=True, metavar="DATAID...")
@click.option("--new", is_flag=True, help="The dataset may be one that nothing is known of.")
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
    """Mark chunks of a dataset as produced outside, so that the jobs that read them may run.

    A dataset that isn't registered, that no job reads or writes and that has no chunks is refused
    without --new: its name may be misspelled.

    \b
    Example: odf ready bobin 2026-03-01 2026-03-02
    """
    store = store_of(ctx)
    moved = operations.ready(store, datasetid, dataids, new=new, plan=plan, why=reason)
    if not operations.is_registered(store, datasetid):
        click.echo(
            f"Note: dataset {datasetid!r} isn't registered, so jobs get no variables of it. "
            f"If that isn't meant: `odf dataset add {typed(datasetid)}`.",
            err=True,
        )
    _report_moves(ctx, moved, "READY", "were READY already", plan, strict, as_json)


@click.command()
@click.argument("jobid", required=False)
@click.argument("dataids", nargs=-1, metavar="[DATAID]...")
@click.option(
    "--failed",
    is_flag=True,
    help="All chunks that failed, or those of the named that did; without a JOBID, of all jobs.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="READY chunks whose inputs were replaced since; without a JOBID, of all jobs.",
)
@click.option(
    "--since", metavar="TIME", help="With --failed: only what failed since, like 2026-03-01."
)
@click.option("--downstream", is_flag=True, help="And what other jobs made of them, and so on.")
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
    """Mark chunks that are READY, FAILED or held to be run again.

    A chunk of a pipeline is refused where the file or table holds the rows of a newer one.

    \b
    Example: odf resubmit loadbob 2026-03-01
    Example: odf resubmit loadbob --failed
    Example: odf resubmit --failed --since 2026-03-01 --plan
    Example: odf resubmit --stale --plan
    Example: odf resubmit loadbob 2026-03-01 --downstream --plan
    """
    if stale and (failed or downstream):
        raise WrongUse(
            "Use --stale alone. What is made of stale chunks is stale when they are made again."
        )
    if since and not failed:
        raise WrongUse("--since is about chunks that failed: use it with --failed.")
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
    _report_moves(ctx, moved, "RESUBMIT", "are to be made already", plan, strict, as_json)


def _chunk_command(function: Callable[..., None]) -> click.Command:
    """A command about named chunks of a job, with what `_hold_or_release` takes."""
    for decorate in (
        click.pass_context,
        as_json,
        _strict,
        _plan,
        _reason,
        click.argument("dataids", nargs=-1, required=True, metavar="DATAID..."),
        click.argument("jobid"),
    ):
        function = decorate(function)
    return click.command()(function)


@_chunk_command
def hold(ctx: click.Context, **given: Any) -> None:
    """Keep a job from making chunks, and others from reading them, until they are released.

    \b
    Example: odf hold loadbob 2026-03-01 --reason "the source is wrong"
    """
    _hold_or_release(ctx, operations.hold, **given)


@_chunk_command
def release(ctx: click.Context, **given: Any) -> None:
    """Make held chunks what they were before they were held.

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
        after, same = "HOLD", "are held already"
    else:
        after, same = "what it was" if moved.chunks == 1 else "what they were", "aren't held"
    _report_moves(ctx, moved, after, same, plan, strict, as_json)


@click.command("delete-run")
@click.argument("jobid")
@click.argument("dataid")
@_reason
@click.pass_context
def delete_run(ctx: click.Context, jobid: str, dataid: str, reason: str | None) -> None:
    """Forget that a job ran a chunk: the job's own rows go, and nobody else's.

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
@click.option("--job", "jobid", metavar="JOB", help="Only this job.")
@click.option(
    "--older-than",
    "age",
    metavar="AGE",
    help="Also send back what is RUNNING without a claim for longer.",
)
@_plan
@_strict
@as_json
@click.pass_context
def recover(
    ctx: click.Context, jobid: str | None, age: str | None, plan: bool, strict: bool, as_json: bool
) -> None:
    """Settle claims whose lease ran out, and grant the retries that are due.

    What is RUNNING without a claim is the Java program's: only you know whether it still lives.
    It is listed, and with --older-than sent back.

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
            f"{count_of(len(running), 'chunk')} RUNNING without a claim. If the program is gone: "
            "`odf recover --older-than 2h`.",
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
    verb = "would become" if plan else "became"
    if moved.cut:
        click.echo(f"Only {PLANNED_CHUNKS:,} chunks are looked at: --json plans for all.", err=True)
    jobs = len({move.jobid for move in moved.moves})
    whose = f" of {jobs} jobs" if jobs > 1 else ""
    click.echo(f"{count_of(moved.chunks, 'chunk')}{whose} {verb} {after}.", err=True)
    if moved.same:
        click.echo(f"{len(moved.same)} {same}: nothing to do.", err=True)
    for row in moved.left[:5]:
        click.echo(
            f"Left: {row.dataid!r} of {row.jobid!r} is {row.status_before}. {_cure(row)}", err=True
        )
    if len(moved.left) > 5:
        click.echo(f"And {len(moved.left) - 5} more were left.", err=True)
    if strict and not moved.moves:
        ctx.exit(EXIT_IDLE)


def _cure(row: operations.Move) -> str:
    chunk = typed(row.jobid, row.dataid)
    if row.status_before == RUNNING:
        return f"When it is done: `odf resubmit {chunk}`."
    if read_status(row.status_before or None) != HOLD:
        return f"Its place holds a newer chunk: `odf resubmit {chunk}` tells which."
    return f"If it isn't needed as it was: `odf resubmit {chunk}`."
