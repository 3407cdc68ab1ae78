"""`odf validate` and `odf pipeline`: projects of pipelines."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import NoDatabase
from ..model import FAILED
from ..runner.run import Outcome
from ..util.text import printable, typed
from .fast_run import exit_code, narration, narrator
from .output import as_json, show

if TYPE_CHECKING:
    from ..config.settings import Settings
    from ..pipelines.jobs import Known
    from ..pipelines.project import Project
    from ..store.store import Store

of_project = click.option(
    "--project", "folder", metavar="DIR", help="The project's folder; else this one, or one above."
)

by_engine = click.option(
    "--engine",
    type=click.Choice(["spark", "local"]),
    help="What runs the transformations: Spark, or for pandas a process without Java; "
    "else as project.yml says.",
)


@click.command()
@click.argument("pipeline", required=False)
@of_project
@by_engine
@click.option("--junit", metavar="FILE", help="Write JUnit's XML to FILE too, for CI.")
@as_json
@click.pass_context
def validate(
    ctx: click.Context,
    pipeline: str | None,
    folder: str | None,
    engine: str | None,
    junit: str | None,
    as_json: bool,
) -> None:
    """Run each transformation of a project on its expected inputs, and compare what it returns.

    A transformation fails if its output isn't the expected one, if it returns nothing or what it
    was given, or if its file lacks `run` or its expectations. A pipeline fails if a source is
    missing, or a transformation in its folder isn't listed. Exit code: 1 if any fails.

    \b
    Example: odf validate
    Example: odf validate clean_orders --project shop --junit report.xml
    """
    from ..pipelines import validate as validation
    from ..pipelines.project import find_project, read_project

    project = read_project(find_project(folder)).on(engine)
    verdicts = []
    say = narrator(sys.stderr)
    for verdict in validation.validate(project, pipeline, ctx.find_root().obj, say=say):
        verdicts.append(verdict)
        if as_json:
            continue
        click.echo(printable(validation.line_of(verdict)))
        if not verdict.passed:
            for line in validation.details_of(verdict):
                click.echo(f"        {printable(line)}")
    if as_json:
        show([validation.object_of(verdict) for verdict in verdicts], as_json=True)
    if junit:
        validation.write_junit(verdicts, Path(junit))
    click.echo(validation.summary_of(verdicts), err=True)
    if not all(verdict.passed for verdict in verdicts):
        ctx.exit(1)


@click.group()
def pipeline() -> None:
    """Run the pipelines of a project, and list them."""


@pipeline.command("run")
@click.argument("slug", required=False)
@click.option(
    "--stream", metavar="FILE", help="Run for each row of this CSV file, as an item of its own."
)
@click.option(
    "--all",
    "all_chunks",
    is_flag=True,
    help="Run until nothing is left; without SLUG all pipelines, in the order of their sources.",
)
@click.option("--strict", is_flag=True, help="Exit with 3 if there was nothing to do.")
@of_project
@by_engine
@click.pass_context
def run_(
    ctx: click.Context,
    slug: str | None,
    stream: str | None,
    all_chunks: bool,
    strict: bool,
    folder: str | None,
    engine: str | None,
) -> None:
    """Run a pipeline, on Spark by default, and write output/SLUG.csv and its destination.

    A run is a chunk of the destination, with a status, a history, and RESUBMIT. What was sent back
    is run again first; else a pipeline begins a new run. One that reads what another produces waits
    for that instead, and runs with the same dataid; if its sources have no run in common, it begins
    a new run and reads what they have made last. With --stream the sources are read once, and what
    one item makes is the first frame of the next. With --engine local, or `engine: local` in
    project.yml, transformations of pandas run without Spark and Java, and make the same.

    \b
    Example: odf pipeline run clean_contacts
    Example: odf pipeline run --all
    Example: odf pipeline run signups --stream new.csv --project shop
    """
    from ..pipelines.project import find_project, open_project, project_settings, read_project
    from ..pipelines.run import run_project

    if stream is not None and all_chunks:
        raise click.UsageError("--all is for what waits: a --stream file is run as a whole.")
    project = read_project(find_project(folder)).on(engine)
    if slug is None and not all_chunks:
        known = ", ".join(pipeline.slug for pipeline in project.pipelines)
        raise click.UsageError(f"Name a pipeline, or --all for all of them. There is: {known}")
    if slug is not None:
        project.pipeline(slug)
    settings = project_settings(project.root, ctx.find_root().obj)
    store = open_project(settings)
    try:
        if slug is None:
            outcome, say = Outcome(0), narrator(sys.stderr)
            for name, result in run_project(store, project, settings, say=say, environ=os.environ):
                if result.failed:
                    _print_place(store, project, name, result.failed)
                outcome = outcome.and_then(result)
        else:
            file = None if stream is None else Path(stream)
            outcome = _run_one(store, project, slug, settings, file, all_chunks)
    finally:
        store.close()
    ctx.exit(exit_code(outcome, strict=strict))


def _run_one(
    store: "Store",
    project: "Project",
    slug: str,
    settings: "Settings",
    stream_file: Path | None,
    all_chunks: bool,
) -> Outcome:
    from ..pipelines.run import run_pipeline

    progress, say = narration(store, slug, all_chunks)
    outcome = run_pipeline(
        store,
        project,
        slug,
        settings,
        say=say,
        environ=os.environ,
        stream_file=stream_file,
        all_chunks=all_chunks,
    )
    if progress:
        progress.end()
    if outcome.failed:
        _print_place(store, project, slug, outcome.failed)
    return outcome


@pipeline.command("list")
@of_project
@as_json
@click.pass_context
def list_(ctx: click.Context, folder: str | None, as_json: bool) -> None:
    """List the pipelines of a project: what each waits for, reads, does and writes.

    \b
    Example: odf pipeline list
    """
    from ..pipelines.jobs import plans_of, takes_items
    from ..pipelines.project import find_project, project_settings, read_project

    project = read_project(find_project(folder))
    plans = plans_of(project, _known(project_settings(project.root, ctx.find_root().obj), project))

    def listed(names: tuple[str, ...]) -> Any:
        return list(names) if as_json else ", ".join(names)

    rows = [
        {
            "pipeline": pipeline.slug,
            "waits_for": listed(plans[pipeline.slug].inputs),
            "sources": listed(pipeline.sources),
            "transformations": listed(pipeline.transformations),
            "destination": plans[pipeline.slug].outputs[0],
            "items": takes_items(project, pipeline)
            if as_json or takes_items(project, pipeline)
            else None,
            "trouble": pipeline.trouble,
        }
        for pipeline in project.pipelines
    ]
    show(rows, as_json=as_json)


def _known(settings: "Settings", project: "Project") -> "Known":
    """What the tables know of the project's datasets; nothing if there are no tables."""
    from ..pipelines.jobs import Known, known_of
    from ..store import open_from

    store = open_from(settings)
    try:
        return known_of(store, {pipeline.slug for pipeline in project.pipelines})
    except NoDatabase:
        return Known()
    finally:
        store.close()


def _print_place(store: "Store", project: "Project", slug: str, failed: int) -> None:
    """Print the commands that show why a run failed, and that run it again."""
    from ..store.history import runs
    from ..store.items import cleaned_away

    say, named = narrator(sys.stderr), typed(slug)
    # Other commands look for the tables in the folder where they are typed.
    there = "" if Path.cwd() == project.root else f"cd {typed(str(project.root))} && "
    say(f"What failed: {there}odf history --pipeline {named}")
    ended = runs(store, jobid=slug, limit=failed)
    last = [row["dataid"] for row in ended if row["status"] == FAILED]
    if not last:  # on HOLD, for a reason that says what to run
        return
    if len(last) == failed and cleaned_away(store, slug, last).issuperset(last):
        say("Post it again: what was cleaned away can't be made from here.")
        return
    if failed == 1 and last:
        again = f"odf resubmit {named} {typed(last[0])} && odf pipeline run {named}"
    else:
        again = f"odf resubmit {named} --failed && odf pipeline run {named} --all"
    say(f"Once it is mended: {there}{again}")
