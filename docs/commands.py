"""Prints docs/commands.md from the commands' help: `make docs` writes it, a test compares it."""

import re

import click

from opendataflow_dagster.cli.app import GROUPS, app

ARGUMENT = re.compile(r" \[\w+\]")


def page() -> str:
    root = app.make_context(
        "odf", [], resilient_parsing=True, terminal_width=100, max_content_width=100
    )
    parts = ["# Commands", "", "Generated from `odf COMMAND --help` by `make docs`.", ""]
    for group, names in GROUPS.items():
        parts += [f"## {group}", ""]
        for name in names:
            command = app.get_command(root, name)
            assert command is not None
            parts += _section(command, click.Context(command, root, info_name=name), 3)
    return "\n".join(parts)


def _section(command: click.Command, context: click.Context, level: int) -> list[str]:
    lines = [
        f"{'#' * level} {ARGUMENT.sub('', context.command_path)}",
        "",
        "```",
        command.get_help(context),
        "```",
        "",
    ]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                lines += _section(inner, click.Context(inner, context, info_name=name), level + 1)
    return lines


if __name__ == "__main__":
    print(page(), end="")
