"""`odf run`, `force`, `start` and `end`: run a script, a Spark function, or any program."""

import sys

import click

from ..errors import WrongUse
from ..runner.run import force_job, nothing_to_do
from .fast_run import (
    EXIT_IDLE,
    RunLine,
    choose_target,
    execute,
    exit_code,
    names_job,
    narrator,
    told_alive,
)
from .output import json_text, store_of

SCRIPT_LINE = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Everything after the script belongs to the script."""

CLAIM_SECONDS = 24 * 3600.0
"""How long a claim of `odf start` lasts: nobody renews it while the program runs."""

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
    "--all-jobs",
    is_flag=True,
    help="Instead of SCRIPT: run all jobs of flow.yml, in the order of their data, until nothing "
    "is left.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    help="Chunks to run in parallel; implies --all.",
)
@click.option("--wait", is_flag=True, help="With --all: wait for the end of a pause, too.")
@click.option("--strict", is_flag=True, help="Exit with 3 if there was nothing to do.")
@click.option("--config", metavar="FILE", help="The properties file; else ./dataflow.properties.")
@click.option(
    "--spark", metavar="MODULE:FUNCTION", help="A function of DataFrames, instead of SCRIPT."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="With --spark: chunks per Spark job, instead of the dial batch_size; the function keeps "
    "their column `dataid`.",
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]...")
@click.pass_context
def run(
    ctx: click.Context,
    job: str | None,
    all_chunks: bool,
    all_jobs: bool,
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

    SCRIPT may also be the name of a job of the flow.yml here, which says what runs it, unless it
    has a slash or is a file.
    """
    config = config or ctx.find_root().obj
    choose_target(config)
    if all_jobs:
        if script is not None or spark is not None or job is not None:
            raise click.UsageError("--all-jobs runs the jobs of flow.yml: name no script or job.")
        from .run_flow import run_all_jobs

        ctx.exit(run_all_jobs(RunLine("", (), None, True, workers, strict, config, wait)))
    if spark is None:
        if script is None:
            raise click.UsageError("Name a SCRIPT, --spark MODULE:FUNCTION, or --all-jobs.")
        if batch is not None:
            raise click.UsageError("--batch is for --spark: a script makes one chunk.")
        exact = ctx.meta[EXACT]
        named = RunLine(script, arguments, job, all_chunks, workers, strict, config, wait, exact)
        if names_job(named):
            from .run_flow import run_named

            ctx.exit(run_named(named))
        ctx.exit(execute(named))
    if script is not None:
        raise click.UsageError(f"Give either --spark or the script {script!r}, not both.")
    line = RunLine(spark, (), job, all_chunks or workers > 1, workers, strict, config, wait)
    from .run_flow import run_spark

    ctx.exit(exit_code(run_spark(line, batch), strict=strict))


@click.command(context_settings=SCRIPT_LINE)
@click.argument("job")
@click.argument("dataid")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]...")
@click.pass_context
def force(
    ctx: click.Context, job: str, dataid: str, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT for one chunk of JOB, ready or not; history calls it forced."""
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
    default=CLAIM_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long the claim lasts without `odf end`.",
)
@click.option("--secrets", is_flag=True, help="Print the passwords too, decrypted.")
@click.option("--strict", is_flag=True, help="Exit with 3 if there was nothing to do.")
@click.pass_context
def start(ctx: click.Context, job: str, lease: float, secrets: bool, strict: bool) -> None:
    """Claim the next chunk of JOB for a program that settles it by `odf end`; print its context."""
    from ..runner.run import start as claim

    store = store_of(ctx)
    started = claim(store, job, lease=lease, secrets=secrets)
    try:
        print(json_text(started[1] if started else []), flush=True)
    except OSError:
        if started:  # no program knows of the claim, which would last for a day
            store.fail(started[0], "`odf start` couldn't print its context", may_retry=False)
        raise
    if started is None:
        click.echo(nothing_to_do(store, job), err=True)
        ctx.exit(EXIT_IDLE if strict else 0)


@click.command()
@click.argument("job", required=False)
@click.argument("dataid", required=False)
@click.option("--generation", type=int, help="Which claim of the chunk: its dataflow_generation.")
@click.pass_context
def alive(ctx: click.Context, job: str | None, dataid: str | None, generation: int | None) -> None:
    """Exit with 0 if the claim of a running script still holds, and with 4 if it is lost.

    In a script of `odf run` it needs no arguments. The file $DATAFLOW_FENCE answers faster, and is
    as fresh as the last heartbeat; this asks the tables.

    \b
    Example: odf alive && mv result.tmp /data/out/$dataid
    Example: odf alive load 2026-03-01 --generation 17
    """
    if (job is None) != (dataid is None) or (job is None) != (generation is None):
        raise WrongUse("JOB, DATAID and --generation go together. See `odf alive --help`.")
    ctx.exit(told_alive(store_of(ctx), job, dataid, generation))


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
    from ..runner.run import end as settle

    click.echo(settle(store_of(ctx), job, dataid, status, generation=generation), err=True)
