"""How a listing is shown: a table for people, objects for programs."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..dataflow.opening import open_configured
from ..dataflow.store import Store

as_json = click.option("--json", "as_json", is_flag=True, help="A list of objects, for programs.")


def store_of(ctx: click.Context) -> Store:
    """The store that `--config` or the surroundings name, until the command ends."""
    store = open_configured(ctx.find_root().obj)
    ctx.call_on_close(store.close)
    return store


def show(rows: Sequence[dict[str, Any]], *, as_json: bool, empty: str = "Nothing to show.") -> None:
    """Print rows to stdout; what there is to say when there are none goes to stderr."""
    if as_json:
        print(json.dumps(rows, indent=1, default=str, ensure_ascii=False))
    elif not rows:
        click.echo(empty, err=True)
    elif sys.stdout.isatty():
        _table(rows)
    else:
        _columns(rows)


def _table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    Console().print(table)


def _columns(rows: Sequence[dict[str, Any]]) -> None:
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: Any) -> str:
    return (
        ""
        if value is None
        else str(value).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    )
