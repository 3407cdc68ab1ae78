"""`odf doctor`: what works, what is missing, what to run."""

import sys
from collections.abc import Iterator

import click

from ..config.settings import load_settings
from ..doctor import Check, examine
from ..errors import DataflowError
from .output import as_json, show

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(epilog="Example: odf doctor --json")
@click.option(
    "--deep", is_flag=True, help="Compare the queue with the statuses, however many there are."
)
@as_json
@click.pass_context
def doctor(ctx: click.Context, deep: bool, as_json: bool) -> None:
    """Check Python, Java, Spark, configuration, database, tables, passkey, clock and permissions.

    Exits with 1 if anything fails. Secrets are never shown.
    """
    found = []
    for check in _examine(ctx.find_root().obj, deep):
        found.append(check)
        if not as_json:
            click.echo(line(check))
            sys.stdout.flush()
    if as_json:
        show([check._asdict() for check in found], as_json=True)
    if any(check.result == "fail" for check in found):
        ctx.exit(1)


def _examine(config: str | None, deep: bool) -> Iterator[Check]:
    """The machine first, then what is configured on it."""
    from ..spark.java import examine_spark

    checks = examine(config, deep=deep)
    yield next(checks)
    try:
        settings = load_settings(config)
    except DataflowError:  # `examine` says it too
        settings = None
    yield from examine_spark(settings)
    yield from checks


def line(check: Check) -> str:
    """One check on one line."""
    result = click.style(f"{check.result:<5}", fg=COLOURS[check.result])
    detail = " ".join(check.detail.split())
    return f"{result}{check.check:<14} {detail}" + (f" → {check.action}" if check.action else "")
