"""`odf validate` and `odf new`: projects of pipelines."""

from pathlib import Path

import click

from ..dataflow.names import printable, typed
from .output import as_json, count_of, show


@click.command()
@click.argument("pipeline", required=False)
@click.option("--project", metavar="DIR", help="The project's folder; else this one, or one above.")
@click.option("--junit", metavar="FILE", help="Write JUnit's XML to FILE too, for CI.")
@as_json
@click.pass_context
def validate(
    ctx: click.Context, pipeline: str | None, project: str | None, junit: str | None, as_json: bool
) -> None:
    """Run each transformation of a project on its expected inputs, and compare what it returns.

    A transformation fails if its output isn't the expected one, if it returns nothing or what it
    was given, or if its file lacks `run` or its expectations. Exit code: 1 if any fails.

    \b
    Example: odf validate
    Example: odf validate clean_orders --project shop --junit report.xml
    """
    from ..pipelines import report
    from ..pipelines.project import find_project, read_project
    from ..pipelines.validate import validate as judge

    found = read_project(find_project(project))
    verdicts = []
    for verdict in judge(found, pipeline):
        verdicts.append(verdict)
        if as_json:
            continue
        click.echo(printable(report.line_of(verdict)))
        if not verdict.passed:
            for line in report.details_of(verdict):
                click.echo(f"        {printable(line)}")
    if as_json:
        show([report.object_of(each) for each in verdicts], as_json=True)
    if junit:
        report.write_junit(verdicts, Path(junit))
    click.echo(report.summary_of(verdicts), err=True)
    if not all(each.passed for each in verdicts):
        ctx.exit(1)


@click.command()
@click.argument("project")
def new(project: str) -> None:
    """Make the folder PROJECT with a small pipeline that validates, to begin from.

    \b
    Example: odf new shop && odf validate --project shop
    """
    from ..pipelines.new import make

    made = make(Path(project))
    click.echo(
        f"{printable(project)} has {count_of(len(made), 'file')}. "
        f"Next: {typed('odf', 'validate', '--project', project)}",
        err=True,
    )
