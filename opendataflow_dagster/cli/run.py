"""`odf run`, `force`, `start` and `end`: run a script, a Spark function, or any program."""

import sys

import click

from ..errors import WrongUse
from ..runner.run import force_job, nothing_to_do
from .app import JOB
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
"""How long a claim of `odf start` lasts: nothing renews it while the program runs."""

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
@click.option(
    "--job",
    type=JOB,
    metavar="ID",
    help="The job. Default: the script's name without its extension.",
)
@click.option(
    "--all", "all_chunks", is_flag=True, help="Run all chunks that are ready, until none is left."
)
@click.option(
    "--all-jobs",
    is_flag=True,
    help="Instead of SCRIPT: run all jobs of flow.yml, upstream first, until no chunk is left.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    help="Chunks to run in parallel; implies --all.",
)
@click.option(
    "--wait", is_flag=True, help="With --all: if the job is paused, wait for the end of the pause."
)
@click.option("--strict", is_flag=True, help="Exit with 3 if there is nothing to do.")
@click.option(
    "--config", metavar="FILE", help="The properties file. Default: ./dataflow.properties."
)
@click.option(
    "--spark", metavar="MODULE:FUNCTION", help="Instead of SCRIPT: call a Spark function."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="With --spark: chunks per Spark job, instead of the dial batch_size. The function must "
    "keep the column `dataid`.",
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
    """Run SCRIPT for the next chunk that is ready.

    The job claims the chunk, the script gets its dataid and datasets as environment variables, and
    the chunk becomes READY or FAILED. The exit code is the script's, or 128+n if signal n killed
    it.

    SCRIPT may be the name of a job in ./flow.yml, which says what runs it. A path, or the name of a
    file here, is always a script.

    With --spark, a function of a module, or of a file (path/file.py:function), is called instead:
    it gets the input chunks as DataFrames, and the DataFrame that it returns is published. The job
    has the function's name.

    Options come before SCRIPT. If an ARG looks like an option of `odf run`, put `--` before SCRIPT
    or before that ARG.

    \b
    Example: odf run ./loadbob.sh
    Example: odf run --all --workers 4 ./loadbob.sh
    Example: odf run --job loadbob -- ./load.sh --all
    Example: odf run --spark jobs.py:clean --all
    Example: odf run --all-jobs
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
@click.argument("job", type=JOB)
@click.argument("dataid")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]...")
@click.pass_context
def force(
    ctx: click.Context, job: str, dataid: str, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT for one chunk of JOB without the checks.

    The chunk runs even if its inputs aren't READY or it is READY itself. The history records the
    run as forced.

    \b
    Example: odf force loadbob 2026-03-01 ./loadbob.sh
    """
    store = store_of(ctx)
    try:
        outcome = force_job(store, job, dataid, [script, *arguments], say=narrator(sys.stderr))
    finally:
        store.close()
    ctx.exit(exit_code(outcome, strict=False))


@click.command()
@click.argument("job", type=JOB)
@click.option(
    "--lease",
    type=click.FloatRange(min=1),
    default=CLAIM_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long the claim lasts without `odf end`.",
)
@click.option("--secrets", is_flag=True, help="Print the decrypted passwords too.")
@click.option("--strict", is_flag=True, help="Exit with 3 if there is nothing to do.")
@click.pass_context
def start(ctx: click.Context, job: str, lease: float, secrets: bool, strict: bool) -> None:
    """Claim the next chunk of JOB for a program of your own.

    Prints the chunk's context as JSON: dataid, generation, datasets. The program settles the chunk
    with `odf end`. If there is nothing to do, the JSON is an empty list.

    \b
    Example: odf start loadbob > context.json
    """
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
@click.argument("job", required=False, type=JOB)
@click.argument("dataid", required=False)
@click.option("--generation", type=int, help="The dataflow_generation of the claim.")
@click.pass_context
def alive(ctx: click.Context, job: str | None, dataid: str | None, generation: int | None) -> None:
    """Check whether the claim of a running script still holds.

    Exits with 0 if it holds, and with 4 if it is lost. A script that `odf run` started needs no
    arguments. The command asks the tables. A faster test is whether the file $DATAFLOW_FENCE
    exists: it tells whether the claim held at the last heartbeat.

    \b
    Example: odf alive && mv result.tmp /data/out/$dataid
    Example: odf alive load 2026-03-01 --generation 17
    """
    if (job is None) != (dataid is None) or (job is None) != (generation is None):
        raise WrongUse("Give JOB, DATAID and --generation together. See `odf alive --help`.")
    ctx.exit(told_alive(store_of(ctx), job, dataid, generation))


@click.command()
@click.argument("job", type=JOB)
@click.argument("dataid")
@click.argument("status", metavar="READY|FAILED|RESUBMIT")
@click.option(
    "--generation", type=int, help="Settle only this claim: dataflow_generation of the context."
)
@click.pass_context
def end(ctx: click.Context, job: str, dataid: str, status: str, generation: int | None) -> None:
    """Settle a chunk that `odf start` claimed.

    RESUBMIT gives the chunk back. It also resubmits a chunk that isn't claimed, as `odf resubmit`
    does.

    \b
    Example: odf end loadbob 2026-03-01 READY
    Example: odf end loadbob 2026-03-01 FAILED --generation 17
    """
    from ..runner.run import end as settle

    click.echo(settle(store_of(ctx), job, dataid, status, generation=generation), err=True)
