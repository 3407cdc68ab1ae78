"""`odf run` without click: what a cron line runs a thousand times a day starts in milliseconds."""

import gc
import os
import sys
from collections.abc import Callable
from signal import SIGINT
from typing import NamedTuple, TextIO

from ..errors import DataflowError, WrongUse, what_installs
from ..model import Say
from ..runner.run import Outcome, run_job
from ..store.opening import open_configured
from ..store.store import Store
from ..util.text import first_line, printable, typed

TYPE_CHECKING = False  # type checkers take it for true; a cron line doesn't pay for `typing`
if TYPE_CHECKING:
    from .progress import RunProgress

IDLE = 3
"""The exit code of `--strict` when there was nothing to do."""


EXCERPT = 300
"""Letters that are kept of the beginning and of the end of an endless message."""


class RunLine(NamedTuple):
    """What a command line of `odf run` asks for."""

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


OPTIONS = (
    "--job",
    "--all",
    "--workers",
    "--wait",
    "--strict",
    "--config",
    "--spark",
    "--batch",
    "--help",
)
"""What `odf run` takes before the script. After it, it is a mistake more often than an argument."""


def parse(words: list[str]) -> RunLine | None:
    """Read the words after `odf run`; None for what click had better explain, or refuse."""
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


def execute(line: RunLine) -> int:
    """Run, and return the exit code."""
    _refuse_own_options(line)
    store = open_configured(line.config)
    jobid = line.job or job_of(line.script)
    many = line.all_chunks or line.workers > 1
    if many:
        gc.enable()
    progress, say = narration(store, jobid, many)
    try:
        outcome = run_job(
            store,
            jobid,
            [line.script, *line.arguments],
            say=say,
            all_chunks=many,
            workers=line.workers,
            wait=line.wait,
            progress=progress,
        )
        if progress:
            progress.end()
    finally:
        store.close()
    return exit_code(outcome, strict=line.strict)


def _refuse_own_options(line: RunLine) -> None:
    """Refuse options of `odf run` that stand after the script, unless a `--` is before them."""
    for word in line.arguments:
        if word == "--" or line.exact:
            return
        name = word.partition("=")[0]
        if name in OPTIONS:
            raise WrongUse(
                f"{name} stands after the script, so `odf run` would not see it. Write it before "
                f"the script; if it is the script's: odf run -- {typed(line.script)} …"
            )


def narration(store: Store, jobid: str, many: bool) -> tuple["RunProgress | None", Say]:
    """What says how a run goes; on a terminal, with a line below of how far many chunks are."""
    if many and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from .progress import RunProgress

        progress = RunProgress(sys.stderr, store, jobid)
        return progress, progress.say
    return None, narrator(sys.stderr)


def exit_code(outcome: Outcome, *, strict: bool) -> int:
    return IDLE if strict and outcome.idle else outcome.code


def job_of(script: str) -> str:
    """A script's job: its base name without the last extension."""
    return os.path.splitext(os.path.basename(script))[0]


def narrator(stream: TextIO | None) -> Say:
    """What prints a line at once; a stream that is closed or can't show a letter stops nothing."""

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


def concluded(work: Callable[[], int]) -> int:
    """The exit code of some work; an error of ours, or of the database, ends it in one line."""
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
        complain(f"The database says: {first_line(error)}. `odf doctor` tells more.")
        return 1


def complain(error: object) -> None:
    """Say what went wrong in one line of bearable length: an id may be a book."""
    text = printable(str(error))
    if len(text) > 2 * EXCERPT:
        text = f"{text[:EXCERPT]} … {text[-EXCERPT:]}"
    narrator(sys.stderr)(f"odf: {text}")
