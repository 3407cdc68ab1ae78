"""The commands of `odf`; a command's module is imported when the command is used."""

import os
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import __version__
from ..config.settings import load_settings
from ..errors import DataflowError
from ..store import open_from
from ..store.operations import dataset_names
from ..store.store import job_names
from ..util.text import did_you_mean
from .fast_run import choose_target, complain
from .output import in_colour

GROUPS = {
    "Set up": {
        "init": "setup:init",
        "new": "setup:new",
        "demo": "demo:demo",
        "doctor": "setup:doctor",
        "dataset": "register:dataset",
        "job": "register:job",
        "policy": "register:policy",
        "plan": "flow:plan",
        "apply": "flow:apply",
        "export": "flow:export",
        "schema": "flow:schema",
        "load": "setup:load",
        "dump": "setup:dump",
    },
    "Run": {
        "run": "run:run",
        "work": "work:work",
        "force": "run:force",
        "start": "run:start",
        "end": "run:end",
        "alive": "run:alive",
    },
    "Look": {
        "status": "status:status",
        "runs": "history:runs",
        "history": "history:history",
        "why": "status:why",
        "drift": "status:drift",
        "sql": "status:sql",
    },
    "Recover": {
        "resubmit": "operate:resubmit",
        "hold": "operate:hold",
        "release": "operate:release",
        "recover": "operate:recover",
        "delete-run": "operate:delete_run",
        "dml": "operate:dml",
    },
    "Data": {
        "ready": "operate:ready",
        "split": "register:split",
        "clean": "operate:clean",
        "compact": "operate:compact",
    },
    "Pipelines": {
        "validate": "pipelines:validate",
        "pipeline": "pipelines:pipeline",
        "serve": "pipelines:serve",
        "token": "pipelines:token",
    },
    "Secrets": {
        "encrypt": "register:encrypt",
        "decrypt": "register:decrypt",
        "key": "register:key",
        "rotate": "register:rotate",
    },
}
"""Name → where its click command is, in the groups and the order that `odf --help` lists."""

COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}

WIDEST = max(map(len, COMMANDS))
"""Columns of the longest name, so that the sentences of all groups line up."""

KNOW_TARGETS = ("plan", "apply", "run")
"""Commands that choose a target themselves: they have a `--file` or a `--config` of their own."""


class Name(click.ParamType):
    """The name of a job or a dataset; what the tables have of them completes it."""

    name = "text"

    def __init__(self, *, jobs: bool = False, datasets: bool = False) -> None:
        self.jobs, self.datasets = jobs, datasets

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        options = ctx.find_root().params
        try:
            names = self._names(options.get("config"), options.get("target"))
        except (DataflowError, OSError):  # a TAB prints no error
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    def _names(self, config: str | None, target: str | None) -> list[str]:
        choose_target(config, target)
        settings = load_settings(config)
        is_file = settings.url.startswith("sqlite:///")
        if is_file and not os.path.isfile(settings.url.removeprefix("sqlite:///")):
            return []
        store = open_from(settings)
        try:
            found = [
                *(job_names(store) if self.jobs else []),
                *(dataset_names(store) if self.datasets else []),
            ]
        finally:
            store.close()
        return sorted(set(found))


JOB, DATASET, ANY = Name(jobs=True), Name(datasets=True), Name(jobs=True, datasets=True)


class Commands(click.Group):
    """A group that imports a command's module on first use, and ends errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        return getattr(import_module(f"opendataflow_dagster.cli.{module}"), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], COMMANDS) or '.'}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DataflowError as error:
            complain(error)
            ctx.exit(error.exit_code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in groups, with the whole first sentence of each."""
        for group, names in GROUPS.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            with formatter.section(group):
                formatter.write_dl(
                    [
                        (name.ljust(WIDEST), command.get_short_help_str(limit=200))
                        for name, command in commands.items()
                        if command
                    ]
                )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="odf")
@click.option(
    "--config", metavar="FILE", help="The properties file. Default: ./dataflow.properties."
)
@click.option(
    "--target",
    metavar="NAME",
    help="Use the tables of this target of ./flow.yml. Default: DATAFLOW_TARGET.",
)
@click.pass_context
def app(ctx: click.Context, config: str | None, target: str | None) -> None:
    """Run batch jobs chunk by chunk, on data that is ready.

    \b
    Next: `odf demo --scripts` is a tour; `odf COMMAND --help` has examples.
    """
    ctx.obj = config
    if ctx.invoked_subcommand in KNOW_TARGETS:
        os.environ |= {"DATAFLOW_TARGET": target} if target else {}
    else:
        choose_target(config, target)
    ctx.color = None if in_colour() else False
