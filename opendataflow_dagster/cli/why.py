"""`odf why`: the five questions."""

from typing import Any

import click

from ..errors import Refused
from ..explain.explain import ADVICE, Explanation, explain
from ..explain.state import Reason
from ..util.text import printable, typed
from ..util.times import parse_time, shown
from .output import as_json, pipeline_here, show, shown_rows, store_of

WORDS = {True: "yes", False: "no", None: "unknown"}


@click.command(epilog="Example: odf why loadbob 2026-03-01 --at 2026-03-02T09:00")
@click.argument("job")
@click.argument("dataid", required=False)
@click.option(
    "--at", metavar="TIME", help="Answer for a moment in the past, like 2026-03-01T14:30."
)
@click.option(
    "--all", "everything", is_flag=True, help="Judge all chunks of the job, also above 100,000."
)
@as_json
@click.pass_context
def why(
    ctx: click.Context,
    job: str,
    dataid: str | None,
    at: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Tell why a chunk may run or not, and what to do; without DATAID, of the job as a whole.

    Is the data ready, is it the right data, is it where it should be, is it validated, is it safe
    to run?
    """
    store = store_of(ctx)
    moment = parse_time(store, at) if at else None
    found = explain(store, job, dataid, moment, everything=everything, look=True)
    if found.code == "NOT_REGISTERED" and pipeline_here(store, job):
        reason = Reason(
            found.code, f"Pipeline {job!r} hasn't run yet", f"odf pipeline run {typed(job)}"
        )
        found = found._replace(reasons=[reason])
    if as_json:
        show([as_object(found)], as_json=True)
    else:
        tell(found)
    if found.code == "NOT_REGISTERED":
        ctx.exit(Refused.exit_code)


def tell(found: Explanation) -> None:
    """Print an explanation for a person."""
    name = printable(found.jobid if found.dataid is None else f"{found.jobid} {found.dataid}")
    verb, be = ("could", "had been") if found.at else ("may", "is")
    when = f" at {shown(found.at)}" if found.at else ""
    blocks = [reason for reason in found.reasons if reason.code not in ADVICE]
    if found.may_run:
        look = " But look first:" if len(blocks) < len(found.reasons) else ""
        click.echo(f"{name} {verb} run{when}.{look}")
    elif (
        found.dataid is None
        and found.next_chunk is None
        and blocks
        and blocks[0].code != "NOT_REGISTERED"
    ):
        click.echo(f"{name}: nothing {be} to be run{when}: {found.code}")
    else:
        click.echo(f"{name} {verb} not run{when}: {found.code}")
    if found.next_chunk is not None and found.dataid is None:
        click.echo(
            f"  {found.counts.get('', 1)} chunks may be claimed; the next is {found.next_chunk!r}"
        )
    for reason in found.reasons:
        click.echo(f"  {reason.code}: {printable(reason.text)}")
        if reason.action and not found.at:
            click.echo(f"    → {reason.action}")
    if found.answers:
        click.echo()
    for answer in found.answers:
        click.echo(f"{answer.question + '?':<12} {WORDS[answer.ok]:<8} {printable(answer.text)}")
    for note in found.notes:
        click.echo(note, err=True)


def as_object(found: Explanation) -> dict[str, Any]:
    """An explanation for programs."""
    return {
        "jobid": found.jobid,
        "dataid": found.dataid,
        "at": found.at and found.at.isoformat(),
        "may_run": found.may_run,
        "code": found.code or None,
        "action": found.action or None,
        "next_chunk": found.next_chunk,
        "counts": {code or "CLAIMABLE": chunks for code, chunks in found.counts.items()},
        "reasons": [reason._asdict() for reason in found.reasons],
        "answers": {
            answer.question.replace(" ", "_"): {
                "ok": answer.ok,
                "text": answer.text,
                "rows": shown_rows(answer.rows, as_json=True),
            }
            for answer in found.answers
        },
        "notes": found.notes,
    }
