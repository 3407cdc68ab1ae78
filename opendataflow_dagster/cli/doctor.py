"""`odf doctor`: what works, what is missing, what to run."""

import sys

import click

from ..dataflow.checkup import Check, examine
from .output import as_json, show

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(epilog="Example: odf doctor --json")
@click.option(
    "--deep", is_flag=True, help="Compare the queue with the statuses, however many there are."
)
@as_json
@click.pass_context
def doctor(ctx: click.Context, deep: bool, as_json: bool) -> None:
    """Check Python, Java, configuration, database, tables, passkey, clock and permissions.

    Exits with 1 if anything fails. Secrets are never shown.
    """
    found = []
    for check in examine(ctx.find_root().obj, deep=deep):
        found.append(check)
        if not as_json:
            click.echo(line(check))
            sys.stdout.flush()
    if as_json:
        show([check._asdict() for check in found], as_json=True)
    if any(check.result == "fail" for check in found):
        ctx.exit(1)


def line(check: Check) -> str:
    """One check on one line."""
    result = click.style(f"{check.result:<5}", fg=COLOURS[check.result])
    detail = " ".join(check.detail.split())
    return f"{result}{check.check:<14} {detail}" + (f" → {check.action}" if check.action else "")
