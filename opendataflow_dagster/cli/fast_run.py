"""`odf run` without click: what a cron line runs a thousand times a day starts in milliseconds.

It imports neither click nor rich, and parses its few options itself. Whatever it doesn't understand
goes to click, which knows the same options: a new one belongs here and in cli/run.py. The progress
of `--all` is drawn by hand: click and rich take longer to load than many a job to run.
"""

import gc
import os
import sys
import time
from _thread import allocate_lock  # `threading` would cost a cron line milliseconds
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from signal import SIGINT
from typing import Any, NamedTuple, TextIO

from ..errors import DataflowError, Refused, WrongUse, what_installs
from ..model import Say
from ..runner.run import Outcome, run_job
from ..store import open_configured
from ..store.store import Store
from ..util.text import first_line, printable, typed

TYPE_CHECKING = False  # type checkers take it for true; a cron line doesn't pay for `typing`
if TYPE_CHECKING:
    from ..chunk import Checked, Chunk

EXIT_IDLE = 3
"""The exit code of `--strict` if there was nothing to do.

The others: 0 for success, 2 for wrong use, 1 or the error's own for what was refused or failed; of
a script its own, or 128+n if signal n ended it.
"""


REDRAW_SECONDS = 0.1

RECOUNT_SECONDS = 5.0
"""Seconds between two queries of what is left."""

ROUTINE = ("Launching ", "is complete. Updating status", "rows updated to READY for ")
"""Messages of each chunk that the progress replaces."""

EXCERPT_LETTERS = 300
"""Letters of a long message that are printed from its beginning, and from its end."""


class RunLine(NamedTuple):
    """The command line of `odf run`."""

    script: str
    arguments: tuple[str, ...] = ()
    job: str | None = None
    all_chunks: bool = False
    workers: int = 1
    strict: bool = False
    config: str | None = None
    wait: bool = False
    exact: bool = False
    """Whether `--` stood before the script: then every word after it is the script's."""


RUN_OPTIONS = (
    "--job",
    "--all",
    "--all-jobs",
    "--workers",
    "--wait",
    "--strict",
    "--config",
    "--spark",
    "--batch",
    "--help",
)
"""The options of `odf run` before the script. After it they are more often a mistake than meant."""


def parse(words: list[str]) -> RunLine | None:
    """Parse the words after `odf run`; None for what click has to explain or refuse."""
    given: dict[str, str] = {}
    flags: set[str] = set()
    at = 0
    exact = False
    while at < len(words) and words[at].startswith("-") and not exact:
        if words[at] == "--":
            exact, at = True, at + 1
            continue
        name, equals, value = words[at].partition("=")
        at += 1
        if name in ("--all", "--strict", "--wait") and not equals:
            flags.add(name)
        elif name in ("--job", "--workers", "--config") and (equals or at < len(words)):
            given[name] = value if equals else words[at]
            at += not equals
        else:
            return None
    workers = given.get("--workers", "1")
    if at == len(words) or not (workers.isascii() and workers.isdigit() and int(workers)):
        return None
    return RunLine(
        words[at],
        tuple(words[at + 1 :]),
        given.get("--job"),
        "--all" in flags,
        int(workers),
        "--strict" in flags,
        given.get("--config"),
        "--wait" in flags,
        exact,
    )


def choose_target(config: str | None, target: str | None = None) -> None:
    """Use the tables of a target of the flow, or of the one of DATAFLOW_TARGET, if there is one."""
    if not (target or os.environ.get("DATAFLOW_TARGET")):
        return
    from ..flow.flow import enter_target

    enter_target(target, config)


def execute(line: RunLine) -> int:
    """Run a script, and return the exit code."""
    refuse_own_options(line)
    return exit_code(run_script(line), strict=line.strict)


def run_script(line: RunLine, checks: "Sequence[Callable[[Chunk], Checked]]" = ()) -> Outcome:
    """Run a script for the chunks of its job; each chunk that it produces gets the `checks`."""
    store = open_configured(line.config)
    jobid = line.job or job_of(line.script)
    many = line.all_chunks or line.workers > 1
    if many:
        gc.enable()
    with closing(store), narrated(store, jobid, many) as (progress, say):
        return run_job(
            store,
            jobid,
            [line.script, *line.arguments],
            say=say,
            all_chunks=many,
            workers=line.workers,
            wait=line.wait,
            progress=progress,
            checks=checks,
        )


def names_job(line: RunLine) -> bool:
    """Whether what is to be run may be a job of the flow.yml here: it is no file, nor a path."""
    script = line.script
    return not ("/" in script or os.path.isfile(script)) and os.path.isfile("flow.yml")


def told_alive(store: Store, *claim: Any) -> int:
    """Say whether a claim holds, and return the exit code."""
    from ..runner.run import is_alive

    try:
        if is_alive(store, *claim):
            return 0
    finally:
        store.close()
    complain("The claim is lost: another worker may have the chunk. Leave its result alone.")
    return Refused.exit_code


def refuse_own_options(line: RunLine) -> None:
    """Refuse options of `odf run` that stand after the script, unless a `--` is before them."""
    for word in line.arguments:
        if word == "--" or line.exact:
            return
        name = word.partition("=")[0]
        if name in RUN_OPTIONS:
            raise WrongUse(
                f"{name} comes after the script, so `odf run` wouldn't apply it. Put it before the "
                f"script; if it is meant for the script, run: odf run -- {typed(line.script)} …"
            )


class RunProgress:
    """Draws done, failed, left and the rate; the threads of a run share it."""

    def __init__(self, stream: TextIO, store: Store, jobid: str) -> None:
        self._stream, self._store, self._jobid = stream, store, jobid
        self._started = time.monotonic()
        self._drawn = self._counted = 0.0
        self._left = 0
        self._ended = 0
        self._line = ""
        self._lock = allocate_lock()

    def __call__(self, done: int, failed: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._drawn < REDRAW_SECONDS:
                return
            self._drawn = now
            if now - self._counted > RECOUNT_SECONDS:
                self._counted = now
                self._count(done + failed)
            left = max(0, self._left - (done + failed - self._ended))
            rate = (done + failed) / (now - self._started)
            line = f"done {done}, failed {failed}, left {left}, {rate:.1f} per second"
            self._line = line[: self._width() - 1]
            self._show(self._line)

    def say(self, line: str) -> None:
        """Print a line above the progress, unless the progress says the same."""
        if any(phrase in line for phrase in ROUTINE):
            return
        with self._lock:
            self._show(f"{line}\n{self._line}")

    def _count(self, ended: int) -> None:
        try:
            from ..store.claims import chunks_left

            self._left = chunks_left(self._store, self._jobid)
            self._ended = ended
        except Exception:  # the run itself waits for the database; its picture doesn't
            return

    def end(self) -> None:
        """Leave the terminal with the cursor at the start of a line."""
        with self._lock:
            self._show("")

    def _width(self) -> int:
        """The terminal's width: a line that folds couldn't be drawn over."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _show(self, text: str) -> None:
        try:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
        except (OSError, ValueError):
            return


@contextmanager
def narrated(
    store: Store, jobid: str, many: bool
) -> Generator[tuple[RunProgress | None, Say], None, None]:
    """Yield what prints the messages of a run; at a terminal, with a line of progress below."""
    progress, say = None, narrator(sys.stderr)
    if many and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        progress = RunProgress(sys.stderr, store, jobid)
        say = progress.say
    yield progress, say
    if progress:
        progress.end()


def exit_code(outcome: Outcome, *, strict: bool) -> int:
    return EXIT_IDLE if strict and outcome.idle else outcome.code


def job_of(script: str) -> str:
    """A script's job: its base name without the last extension."""
    return os.path.splitext(os.path.basename(script))[0]


def narrator(stream: TextIO | None) -> Say:
    """What prints a line at once; a closed stream or a letter that it can't show stops no run."""

    def say(line: str) -> None:
        if stream is None:
            return
        try:
            try:
                stream.write(line + "\n")
            except UnicodeEncodeError:
                stream.write(line.encode("ascii", "backslashreplace").decode() + "\n")
            stream.flush()
        except (OSError, ValueError):
            return

    return say


def run_guarded(work: Callable[[], int]) -> int:
    """Do the work and return its exit code; an error is printed in one line, without a traceback.

    Unexpected errors are raised: their traceback belongs in a report.
    """
    try:
        return work()
    except DataflowError as error:
        complain(error)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (line := what_installs(error)) is None:
            raise
        complain(line)
        return 1
    except KeyboardInterrupt:
        return 128 + SIGINT
    except UnicodeEncodeError as error:
        complain(f"{error.object[:40]!a} isn't valid Unicode. Give it in UTF-8.")
        return WrongUse.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}. Correct that, then run the command again.")
        return 1
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("psycopg", "sqlite3"):
            raise
        complain(f"The database says: {first_line(error)}. For details, run `odf doctor`.")
        return 1


def complain(error: object) -> None:
    """Print an error in one line of limited length: an id in it may be as long as a book."""
    text = printable(str(error))
    if len(text) > 2 * EXCERPT_LETTERS:
        text = f"{text[:EXCERPT_LETTERS]} … {text[-EXCERPT_LETTERS:]}"
    narrator(sys.stderr)(f"odf: {text}")
