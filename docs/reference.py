"""Prints docs/reference.md from the code: `make docs` writes it, a test compares it."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from opendataflow_dagster.errors import EXIT_CODES
from opendataflow_dagster.explain.explain import REFUSALS
from opendataflow_dagster.model import DIALS, TRANSITIONS, Status
from opendataflow_dagster.server.pages import ServerMetrics

SCHEMA = Path(__file__).parents[1] / "sql" / "postgres" / "schema.sql"
TABLE = re.compile(
    r"((?:^--[^\n]*\n)*)^create table if not exists (\w+) \((.*?)\)(?: with [^\n]*)?;$", re.M | re.S
)
KEY = re.compile(r"primary key \(([^)]*)\)")


def page() -> str:
    sections = [
        "# Codes, dials and tables",
        "Made from the code by `make docs`.",
        "## Exit codes",
        "`odf run SCRIPT` ends with the script's own exit code.",
        *_rows(("code", "meaning"), EXIT_CODES.items()),
        "## Refusals",
        "What `odf why`, a Dagster run and a log say of a chunk that isn't run.",
        *_rows(("code", "meaning"), ((f"`{code}`", text) for code, text in REFUSALS.items())),
        "## Statuses",
        "From which statuses each can be reached, and by what: [the picture](statuses.md).",
        *_rows(("status", "reached by"), _statuses()),
        "## Dials of a job",
        "Set by `odf policy JOB NAME=VALUE`, by `policy:` in flow.yml, or in `jobpolicy`.",
        *_rows(("dial", "what it sets", "default"), _dials()),
        "## Metrics",
        "`odf serve` shows them at `/metrics`, for Prometheus.",
        *_rows(("metric", "type", "meaning"), _metrics()),
        "## Columns of the tables",
        "On PostgreSQL; SQLite has the same names. See also [The tables](tables.md).",
        *_tables(SCHEMA.read_text()),
    ]
    return "\n\n".join(sections) + "\n"


def _rows(heads: tuple[str, ...], rows: Iterable[tuple]) -> Iterator[str]:
    lines = [heads, tuple("---" for _ in heads), *rows]
    yield "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _statuses() -> Iterator[tuple[str, str]]:
    for status in Status:
        acts = (
            f"{act} ({', '.join(before or 'no row' for before in moves[status])})"
            for act, moves in TRANSITIONS.items()
            if status in moves
        )
        yield f"`{status}`", "; ".join(acts)


def _dials() -> Iterator[tuple[str, str, str]]:
    for name, dial in DIALS.items():
        words = f" ({', '.join(dial.words)})" if dial.words else ""
        yield f"`{name}`", dial.meaning + words, dial.default


def _metrics() -> Iterator[tuple[str, str, str]]:
    for family in ServerMetrics().families():
        name = family.name + ("_total" if family.type == "counter" else "")
        yield f"`{name}`", family.type, family.documentation


def _tables(schema: str) -> Iterator[str]:
    for comment, table, body in TABLE.findall(schema):
        yield f"### {table}"
        if comment:
            yield " ".join(line.removeprefix("--").strip() for line in comment.splitlines())
        key = KEY.search(body)
        keys = [name.strip() for name in key[1].split(",")] if key else []
        yield from _rows(("column", "type"), _columns(KEY.sub("", body), keys))


def _columns(body: str, keys: list[str]) -> Iterator[tuple[str, str]]:
    for part in re.split(r",(?![^(]*\))", body):
        name, _, kind = " ".join(part.split()).partition(" ")
        if name:
            in_key = "key" if name in keys else ""
            kind = re.sub(r"\bprimary key\b", "key", kind.replace("|", "\\|"))
            yield f"`{name}`", f"{kind} {in_key}".strip()


if __name__ == "__main__":
    print(page(), end="")
