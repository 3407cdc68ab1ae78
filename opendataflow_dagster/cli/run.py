"""`odf run`, `force`, `start` and `end`: running a job's script, or another language's program."""

import sys

import click

from ..runner.run import force_job, nothing_to_do
from .fast_run import IDLE, RunLine, execute, exit_code, narrator
from .output import json_text, store_of

SCRIPT_LINE = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Everything after the script belongs to the script."""

EXACT = "opendataflow_dagster.exact"
"""In the context: whether `--` stood before the script."""


class RunCommand(click.Command):
    """A command that knows whether `--` stood before its script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        script = len(words) - len(ctx.params["arguments"]) - 1
        ctx.meta[EXACT] = words[script - 1 : script] == ["--"]
        return rest


@click.command(cls=RunCommand, context_settings=SCRIPT_LINE)
@click.option("--job", metavar="ID", help="The job; else the script's name without its extension.")
@click.option("--all", "all_chunks", is_flag=True, help="Run until nothing is left.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, help="So many at once; implies --all."
)
@click.option("--wait", is_flag=True, help="With --all: wait for the end of a pause, too.")
@click.option("--strict", is_flag=True, help="Exit with 3 if there was nothing to do.")
@click.option("--config", metavar="FILE", help="The properties file; else ./dataflow.properties.")
@click.option(
    "--spark", metavar="MODULE:FUNCTION", help="A function of DataFrames, in the place of SCRIPT."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="With --spark: so many chunks in one go, whatever the dial batch_size says; the function "
    "keeps their column `dataid`.",
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]...")
@click.pass_context
def run(
    ctx: click.Context,
    job: str | None,
    all_chunks: bool,
    workers: int,
    wait: bool,
    strict: bool,
    config: str | None,
    spark: str | None,
    batch: int | None,
    script: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Claim the next chunk that is ready, run SCRIPT for it, and settle it.

    Options stand before SCRIPT. An ARG that looks like one of them needs a `--` before it, or
    before SCRIPT.

    The exit code is the script's, or 128+n if it died by signal n. With --spark, a function is
    called instead, of a module here or of a file (path/file.py:function): its frames are the chunks
    of the job's inputs, and what it returns is published. The job is called like the function.
    """
    config = config or ctx.find_root().obj
    if spark is None:
        if script is None:
            raise click.UsageError("Name a SCRIPT, or --spark MODULE:FUNCTION.")
        if batch is not None:
            raise click.UsageError("--batch is for --spark: a script makes one chunk.")
        exact = ctx.meta[EXACT]
        ctx.exit(
            execute(
                RunLine(script, arguments, job, all_chunks, workers, strict, config, wait, exact)
            )
        )
    if script is not None:
        raise click.UsageError(f"Give either --spark or the script {script!r}, not both.")
    from .spark_run import execute_spark

    line = RunLine(spark, (), job, all_chunks or workers > 1, workers, strict, config, wait)
    ctx.exit(execute_spark(line, batch))


@click.command(context_settings=SCRIPT_LINE)
@click.argument("job")
@click.argument("dataid")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]...")
@click.pass_context
def force(
    ctx: click.Context, job: str, dataid: str, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT for one chunk of JOB whatever its inputs say; history calls it forced."""
    store = store_of(ctx)
    try:
        outcome = force_job(store, job, dataid, [script, *arguments], say=narrator(sys.stderr))
    finally:
        store.close()
    ctx.exit(exit_code(outcome, strict=False))


@click.command()
@click.argument("job")
@click.option(
    "--lease",
    type=click.FloatRange(min=1),
    default=24 * 3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the claim lasts if nobody ends it.",
)
@click.option("--secrets", is_flag=True, help="Print the passwords too, decrypted.")
@click.option("--strict", is_flag=True, help="Exit with 3 if there was nothing to do.")
@click.pass_context
def start(ctx: click.Context, job: str, lease: float, secrets: bool, strict: bool) -> None:
    """Claim the next chunk of JOB for a program that settles it by `odf end`; print its context."""
    from ..runner.external import start as claim

    store = store_of(ctx)
    started = claim(store, job, lease=lease, secrets=secrets)
    try:
        print(json_text(started[1] if started else []), flush=True)
    except OSError:
        if started:  # nobody got to know of the claim, which would last for a day
            store.fail(started[0], "`odf start` couldn't print its context", may_retry=False)
        raise
    if started is None:
        click.echo(nothing_to_do(store, job), err=True)
        ctx.exit(IDLE if strict else 0)


@click.command()
@click.argument("job")
@click.argument("dataid")
@click.argument("status", metavar="READY|FAILED|RESUBMIT")
@click.option("--generation", type=int, help="Only this claim: dataflow_generation of the context.")
@click.pass_context
def end(ctx: click.Context, job: str, dataid: str, status: str, generation: int | None) -> None:
    """Settle a chunk of JOB that `odf start` has claimed.

    RESUBMIT gives it back; it also sends back a chunk that isn't claimed, like `odf resubmit`.
    """
    from ..runner.external import end as settle

    click.echo(settle(store_of(ctx), job, dataid, status, generation=generation), err=True)
