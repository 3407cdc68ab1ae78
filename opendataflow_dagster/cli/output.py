"""How listings are shown: tables for people, objects for programs; and progress lines."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..config.settings import BUILT_IN, load_settings
from ..errors import DataflowError, NoDatabase, Refused, WrongUse
from ..model import WORDS, Status
from ..store import open_from
from ..store.store import Store, job_names
from ..util.text import count_of as count_of
from ..util.text import did_you_mean, printable, typed

if TYPE_CHECKING:
    from rich.table import Table

    from ..pipelines.project import Project

TABLE_COLUMNS = 100_000
"""Columns for a table that isn't cut: a terminal folds a long line, but an id cut off is lost."""

REDRAW_SECONDS = 0.1

REPRINT_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""

SCREEN_ROWS = 1000
"""Rows that a listing shows by default."""

COLUMN_GAP = 2

PAGERS = ("ODF_PAGER", "PAGER")
"""The environment variables that name a pager; the first that is set is taken."""

PROSE_COLUMNS = 20
"""Columns that a sentence needs at least to be wrapped in a table."""

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?")

SAMPLE_ROWS = 1000
"""Rows from which the widths of the columns of a longer listing are taken."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")


def store_of(ctx: click.Context, *, making: bool = False) -> Store:
    """Open the store that `--config` or the environment names; it is closed with the command.

    A project whose tables don't exist yet is refused, unless the command is `making` them.
    """
    settings = load_settings(ctx.find_root().obj)
    folder = os.path.dirname(settings.url.removeprefix("sqlite:///"))
    if settings.origin == BUILT_IN and not making and not os.path.exists(folder):
        from ..pipelines.project import nearest_project

        if root := nearest_project():
            raise NoDatabase(
                f"Nothing has run yet in {str(root)!r}, so it has no tables. The first "
                "`odf pipeline run`, or `odf init`, creates them. See `odf pipeline list`."
            )
    store = open_from(settings)
    ctx.call_on_close(store.close)
    return store


def pipeline_here(store: Store, slug: str) -> "Project | None":
    """The project around, if it has a pipeline of that name that is no job yet: it hasn't run."""
    from ..pipelines.project import nearest_project, read_project

    plan, _ = store.db.insist(lambda: store.read_plan(slug))
    if plan.reads or plan.outputs or (root := nearest_project()) is None:
        return None
    try:
        project = read_project(root)
        project.pipeline(slug)
    except DataflowError:  # it is no pipeline, or no project that can be read
        return None
    return project


def not_run_yet(slug: str) -> str:
    """The message about a pipeline that is no job yet, since it hasn't run."""
    return f"Pipeline {slug!r} hasn't run yet. Run: odf pipeline run {typed(slug)}"


@contextmanager
def knowing_pipelines(store: Store, jobid: str) -> Iterator[None]:
    """Explain a NOT_REGISTERED refusal, if it is about a pipeline that hasn't run yet."""
    try:
        yield
    except Refused as error:
        if error.code == "NOT_REGISTERED" and pipeline_here(store, jobid):
            raise Refused(not_run_yet(jobid), code=error.code) from None
        raise


def refuse_unknown_pipeline(store: Store, slug: str) -> None:
    """Refuse what is neither a registered job nor a pipeline of the project around."""
    from ..pipelines.project import nearest_project, read_project

    plan, _ = store.db.insist(lambda: store.read_plan(slug))
    if plan.reads or plan.outputs:
        return
    if root := nearest_project():
        read_project(root).pipeline(slug)
        return
    like = did_you_mean(slug, job_names(store)) or "."
    raise Refused(
        f"There is no pipeline {slug!r}, and no project.yml here{like} "
        "`odf job list` shows all jobs.",
        code="NOT_REGISTERED",
    )


def show(rows: Sequence[dict[str, Any]], *, as_json: bool, empty: str = "Nothing to show.") -> None:
    """Print rows to stdout; if there are none, print `empty` to stderr."""
    if as_json:
        print(json_text(rows, indent=1))
    elif not rows:
        if empty:
            click.echo(empty, err=True)
    elif sys.stdout.isatty():
        _table(rows)
    else:
        _columns(rows)


def limits(command: Callable) -> Callable:
    """The options --limit and --all of a listing that shows its first rows."""
    command = click.option("--all", "everything", is_flag=True, help="Show all rows.")(command)
    return click.option(
        "--limit",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Rows to show: {SCREEN_ROWS} by default, all with --json.",
    )(command)


def most_of(
    limit: int | None, everything: bool, as_json: bool, screen: int = SCREEN_ROWS
) -> int | None:
    """How many rows --limit, --all and --json ask for; None is all."""
    if limit is not None and everything:
        raise WrongUse("Use --limit or --all, not both.")
    return limit or (None if everything or as_json else screen)


def some_of(store: Store, datasetids: Iterable[str], everything: bool) -> dict[str, list[str]]:
    """The large ones of some datasets, with those of their chunks that a quick look takes in."""
    from ..storage.presence import NEWEST, newest_of_large

    if everything:
        return {}
    some = newest_of_large(store, datasetids)
    if some:
        click.echo(
            f"Of {', '.join(map(repr, some))}, only the {NEWEST:,} chunks that changed last are "
            "looked at: --all looks at all.",
            err=True,
        )
    return some


def read_word(word: str) -> str:
    """The status that a person names."""
    if word.upper() not in WORDS:
        raise WrongUse(f"{word[:40]!r} isn't a status. The statuses are {', '.join(Status)}.")
    return WORDS[word.upper()]


def show_first(
    rows: Iterable[dict[str, Any]],
    most: int | None,
    *,
    as_json: bool,
    empty: str,
    more: str = "--limit or --all shows more",
) -> None:
    """Print the first rows, or all (None) as they are read, and say whether there are more."""
    rows = iter(rows)
    head = list(islice(rows, SAMPLE_ROWS if most is None else most + 1))
    cut = most is not None and len(head) > most
    if cut:
        head.pop()
    rest = () if most is not None or len(head) < SAMPLE_ROWS else rows
    if as_json:
        _stream_json(chain(head, rest))
    elif rest and (first := list(islice(rest, 1))):
        _columns(head, chain(first, rest))
    else:
        show(shown_rows(head, as_json=False), as_json=False, empty=empty)
    if cut:
        click.echo(f"The first {len(head):,} rows: {more}.", err=True)


def _stream_json(rows: Iterable[dict[str, Any]]) -> None:
    """Print rows as `json_text` with an indent of 1 does, one by one."""
    before = "["
    for row in rows:
        [shown] = shown_rows([row], as_json=True)
        print(before + "\n " + json_text(shown, indent=1).replace("\n", "\n "), end="")
        before = ","
    print("[]" if before == "[" else "\n]")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that the encoding of standard output can hold."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return json.dumps(value, indent=indent, default=str, ensure_ascii=not unicode)


def shown_rows(rows: Iterable[dict[str, Any]], *, as_json: bool) -> list[dict[str, Any]]:
    """Rows whose times are ISO texts: exact for programs, to the second for people."""
    precision = "microseconds" if as_json else "seconds"
    separator = "T" if as_json else " "

    def text(value: Any) -> Any:
        if not isinstance(value, datetime):
            return value
        return (value if as_json else value.replace(tzinfo=None)).isoformat(separator, precision)

    return [{key: text(value) for key, value in row.items()} for row in rows]


def wrapped(text: str, indent: int) -> str:
    """Wrap a sentence to the terminal, indented from the second line; unchanged elsewhere."""
    if not sys.stdout.isatty():
        return text
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Pager(io.TextIOBase):
    """Standard output on a terminal: from the line on that scrolls, a pager shows it."""

    encoding = "utf-8"

    def __init__(self, terminal: TextIO, words: list[str]) -> None:
        self._terminal, self._words = terminal, words
        self._room = shutil.get_terminal_size().lines - 1
        self._waiting: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # so click finds out whether a stream takes bytes
            raise TypeError("text only")
        if self._process is None:
            self._waiting.append(text)
            self._room -= text.count("\n")
            if self._room < 0:
                self._begin()
        elif self._process.stdin:
            self._process.stdin.write(text)
        return len(text)

    def _begin(self) -> None:
        environ = {"LESS": "FRX"} | dict(os.environ)
        try:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, text=True, errors="replace", env=environ
            )
        except OSError:  # `end` prints all of it
            self._room = sys.maxsize
            return
        before, self._waiting = "".join(self._waiting), []
        self.write(before)

    def end(self) -> None:
        """Print what fits on the screen, or wait until the reader leaves the pager."""
        if self._process is None:
            self._terminal.write("".join(self._waiting))
            self._terminal.flush()
            return
        with suppress(OSError):
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        while self._process.poll() is None:
            with suppress(KeyboardInterrupt):  # Ctrl-C is the pager's
                self._process.wait()


@contextmanager
def paged(as_json: bool = False) -> Iterator[None]:
    """Show what a listing prints in a pager, if standard output is a terminal that it fills.

    ODF_PAGER names it, or PAGER, or it is `less` where that is installed; empty, or `cat`, is none.
    """
    words = _pager()
    if as_json or not words or not sys.stdout.isatty():
        yield
        return
    streams = sys.stdout, sys.stderr
    pager = sys.stdout = Pager(sys.stdout, words)
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr = pager
    try:
        with suppress(BrokenPipeError):  # the reader has seen enough
            yield
    finally:
        sys.stdout, sys.stderr = streams
        pager.end()


def in_pager(command: Callable[..., None]) -> Callable[..., None]:
    """Show what a command lists in a pager, unless it is for a program or never ends."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with paged(as_json=options["as_json"] or options.get("follow", False)):
            command(*args, **options)

    return run


def _pager() -> list[str]:
    """The words of the pager's command; none if there is no such program here."""
    line = next((os.environ[name] for name in PAGERS if name in os.environ), "less")
    try:
        words = shlex.split(line)
    except ValueError:
        return []
    is_there = words and words[0] != "cat" and shutil.which(words[0])
    return words if is_there and os.environ.get("TERM") not in ("dumb", "unknown", None) else []


def in_colour() -> bool:
    """Whether standard output is a terminal with colours that aren't switched off."""
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") not in ("dumb", "unknown")
    )


def _table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table that fits the terminal; one that can't fit is printed row by row.

    Nothing is cut: an id without its end is of no use. Sentences wrap, ids don't.
    """
    from rich.console import Console

    width = Console().width
    same, cells = _squeezed({name: [_cell(row[name]) for row in rows] for name in rows[0]}, width)
    if same:
        print("All rows:", ", ".join(f"{name} {text}" for name, text in same.items()))
    sentences = {name: texts for name, texts in cells.items() if _is_prose(texts)}
    ids = {name: texts for name, texts in cells.items() if name not in sentences}
    widths = _shares(sentences, width - _width(ids) - COLUMN_GAP * len(sentences))
    if _width(cells) <= width:
        widths = {}
    elif not widths or min(widths.values()) < 0:
        return _records(cells)
    # Without a height, rich takes 80 columns if TERM is dumb.
    Console(width=TABLE_COLUMNS, height=25).print(_rich_table(cells, widths))


def _squeezed(
    cells: dict[str, list[str]], width: int
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What all rows have in common, and the columns: without those that a table can spare."""
    if _width(cells) > width:
        cells = {name: texts for name, texts in cells.items() if set(texts) - {"", "0"}} or cells
    if _width(cells) > width:
        cells = {name: [_to_the_minute(text) for text in texts] for name, texts in cells.items()}
    if _width(cells) <= width:
        return {}, cells
    same = {name: texts[0] for name, texts in cells.items() if len(set(texts)) == 1}
    if len(next(iter(cells.values()))) == 1 or len(same) == len(cells):
        return {}, cells
    return same, {name: texts for name, texts in cells.items() if name not in same}


def _shares(columns: dict[str, list[str]], width: int) -> dict[str, int]:
    """Share a width among columns as they need it; -1 for one that would get too little."""
    shares = {}
    needs = {name: _width({name: texts}) for name, texts in columns.items()}
    for number, name in enumerate(sorted(needs, key=needs.__getitem__)):
        share = min(needs[name], width // (len(needs) - number))
        shares[name] = share if share >= min(needs[name], PROSE_COLUMNS) else -1
        width -= share
    return shares


def _rich_table(cells: dict[str, list[str]], widths: dict[str, int]) -> "Table":
    """A table in which the columns with a width wrap at it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, COLUMN_GAP, 0, 0))
    for name in cells:
        table.add_column(name, no_wrap=name not in widths, max_width=widths.get(name))
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _records(cells: dict[str, list[str]]) -> None:
    """Print a block of lines for each row, a line for each value."""
    margin = max(map(len, cells))
    for number, row in enumerate(zip(*cells.values(), strict=True)):
        print(end="\n" if number else "")
        for name, text in zip(cells, row, strict=True):
            if text:
                print(f"{name:<{margin}}  {text}")


def _width(cells: dict[str, list[str]]) -> int:
    """The columns of a terminal that a table takes."""
    from rich.cells import cell_len

    widest = [max(map(cell_len, [name, *texts])) for name, texts in cells.items()]
    return sum(widest) + COLUMN_GAP * (len(widest) - 1)


def _is_prose(texts: Iterable[str]) -> bool:
    return any(" " in text and not TIME.fullmatch(text) for text in texts)


def _to_the_minute(text: str) -> str:
    return text[:16] if TIME.fullmatch(text) else text


def _columns(rows: Sequence[dict[str, Any]], rest: Iterable[dict[str, Any]] = ()) -> None:
    """Print columns as wide as the first rows need them, and the rest of the rows as they come."""

    def texts(rows: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
        for row in rows:
            yield [_cell(value) for value in row.values()]

    cells = [list(rows[0]), *texts(shown_rows(rows, as_json=False))]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    for row in chain(cells, texts(shown_rows([row], as_json=False)[0] for row in rest)):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: Any) -> str:
    return "" if value is None else printable(str(value))


class StatusLine:
    """Shows the latest message on one line of a terminal; elsewhere, prints one now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._due = time.monotonic() + (0.0 if self._terminal else REPRINT_SECONDS)

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (REDRAW_SECONDS if self._terminal else REPRINT_SECONDS)
            self._stream.write(
                f"\r\x1b[K{printable(line)[:119]}" if self._terminal else f"{line}\n"
            )
            self._stream.flush()

    def end(self) -> None:
        """Leave the terminal with the cursor at the start of an empty line."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def fill_queues(store: Store, jobid: str | None = None) -> None:
    """Compute what jobs may claim, and show the progress; workers finish what can't end now."""
    line = StatusLine(sys.stderr)
    try:
        queued = store.fill(jobid, narrate=line)
    finally:
        line.end()
    if queued:
        sys.stderr.write(
            f"The queue of {', '.join(queued)} isn't complete yet: open transactions are waited "
            "for, which `odf doctor` lists. Idle workers and `odf recover` go on with it.\n"
        )
