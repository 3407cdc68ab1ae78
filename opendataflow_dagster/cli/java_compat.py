"""`RunJob`, `ForceJob`, `ForceCmd` and `utility.sh` with the original's calling convention."""

import os
import sys

from ..config.credentials import find_passkey, take_passkey
from ..config.settings import BUILT_IN, DEFAULT_URL, FILE_NAME, load_settings
from ..errors import NoDatabase, WrongUse
from . import leave
from .fast_run import job_of, narrator, run_guarded

TYPE_CHECKING = False  # type checkers take it for true; a cron line doesn't pay for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.store import Store

KEY = (
    "The key comes from PASSKEY, or the file named by PASSKEY_FILE, or else is the first argument."
)

RUN_USAGE = f"""\
usage: RunJob [KEY] SCRIPT [ARG...]
Runs SCRIPT for the next chunk that is ready of the job that is named like it, less the extension.
{KEY}
If nothing is encrypted, set PASSKEY to nothing: PASSKEY= RunJob SCRIPT [ARG...]"""

FORCE_USAGE = f"""\
usage: ForceJob [KEY] SCRIPT DATAID [ARG...]
       ForceJob [KEY] JOBID COMMAND [ARG...]
Runs SCRIPT for DATAID without the checks; or COMMAND as a job, its dataid is the current time.
{KEY}"""

CMD_USAGE = f"""\
usage: ForceCmd [KEY] JOBID COMMAND [ARG...]
Runs COMMAND as a job without the checks; its dataid is the current time.
{KEY}"""

UTILITY_USAGE = f"""\
usage: utility.sh [KEY] COMMAND [ARG...]
    utility.sh sql SELECT              print the rows of a query
    utility.sh dml STATEMENT           change rows; also ddl
    utility.sh crypt -e|-d TEXT        encrypt or decrypt, in the original's form
    utility.sh runs                    the 20 newest outputs
    utility.sh jobs | datasets         what is registered
    utility.sh getjob JOBID            what a job reads and writes
    utility.sh startjob JOBID          claim the next chunk, and print its context
    utility.sh forcejob JOBID          the same without the checks; the dataid is the current time
    utility.sh endjob JOBID DATAID STATUS   READY, FAILED or RESUBMIT
    utility.sh deleterun JOBID DATAID  forget what a job has made
    utility.sh createtables            create or upgrade the tables
{KEY}"""

AS_ODF = {
    "sql": ["sql"],
    "RunSql": ["sql"],
    "dml": ["dml"],
    "ddl": ["dml"],
    "RunUpdate": ["dml"],
    "runs": ["runs"],
    "GetJobRuns": ["runs"],
    "jobs": ["job", "list"],
    "GetJobs": ["job", "list"],
    "datasets": ["dataset", "list"],
    "GetDataSets": ["dataset", "list"],
    "getjob": ["job", "list", "--json"],
    "GetJobData": ["job", "list", "--json"],
    "startjob": ["start"],
    "endjob": ["end"],
    "SetJobEndStatus": ["end"],
    "deleterun": ["delete-run"],
    "createtables": ["init"],
    "CreateTables": ["init"],
}
"""The original's words, and those of `odf` that do the same."""

UTILITIES = (*AS_ODF, "crypt", "Cryptor", "forcejob", "ForceJob", "SetDataStatus")

IN_SHELL = ("set", "export", "declare")
"""Commands that show the variables of a job, and that only a shell has."""


def runjob() -> None:
    """The entry point of `RunJob`."""
    words = _without_key(1, RUN_USAGE)
    take_passkey()

    def work() -> int:
        from ..runner.run import run_job

        _go_where_it_lies(words[:1])

        def run(store: "Store") -> int:
            return run_job(store, job_of(words[0]), words, say=narrator(sys.stdout)).code

        return _with_store(words[:1], run)

    leave(run_guarded(work))


def forcejob() -> None:
    """The entry point of `ForceJob`."""
    _force(FORCE_USAGE, newest_order=True)


def forcecmd() -> None:
    """The entry point of `ForceCmd`."""
    _force(CMD_USAGE, newest_order=False)


def utility() -> None:
    """The entry point of `utility.sh`."""
    words = sys.argv[1:]
    if len(words) > 1 and words[1] in UTILITIES:
        given = words[0] not in UTILITIES and not _has_key()
        if given or words[0] == os.environ.get("PASSKEY"):
            _hide_key(words)
    take_passkey()
    sys.exit(run_guarded(lambda: run_utility(words)))


def run_utility(words: list[str]) -> int:
    """Do what one of the original's utilities does, and return the exit code."""
    from . import _with_click

    if not words:
        return _explain(UTILITY_USAGE)
    name, *rest = words
    if name in AS_ODF:
        return _with_click([*AS_ODF[name], *rest])
    if name in ("crypt", "Cryptor") and len(rest) == 2 and rest[0] in ("-e", "-d"):
        from ..config.credentials import PROPERTIES, decrypt, encrypt_as_original

        way, text = rest
        key = find_passkey()
        print(
            encrypt_as_original(text, key)
            if way == "-e"
            else decrypt(text, key, purpose=PROPERTIES)
        )
        return 0
    if name in ("forcejob", "ForceJob") and len(rest) == 1:
        from ..runner.run import start
        from .output import json_text

        def force(store: "Store") -> int:
            started = start(store, rest[0], forced=_moment())
            print(json_text(started[1] if started else []))
            return 0

        return _with_store([], force)
    if name == "SetDataStatus":
        raise WrongUse(
            "SetDataStatus isn't supported: it can write any status. Use `odf ready DATASET "
            "DATAID`, `odf resubmit`, `odf hold`, or `odf dml` with an insert into datastatus."
        )
    if name in UTILITIES:
        return _explain(UTILITY_USAGE)
    raise WrongUse("utility.sh has no command of that name. Run it without arguments for a list.")


def _force(usage: str, *, newest_order: bool) -> None:
    words = _without_key(2, usage)
    has_key = _has_key()
    take_passkey()

    def work() -> int:
        from ..runner.run import force_job

        _go_where_it_lies(words[:2])

        def run(store: "Store") -> int:
            jobid, dataid, argv = words[0], _moment(), words[1:]
            if newest_order and _names_script(store, words):
                jobid, dataid, argv = job_of(words[0]), words[1], [words[0], *words[2:]]
            elif not has_key and store.plan(jobid).flaw:  # it may be a key: not to be printed
                return _explain(usage)
            elif not _can_start(argv[0]) and (argv[0] in IN_SHELL or " " in argv[0]):
                argv = ["bash", "-c", " ".join(argv)]
            return force_job(store, jobid, dataid, argv, say=narrator(sys.stdout)).code

        return _with_store(words[:2], run)

    leave(run_guarded(work))


def _names_script(store: "Store", words: list[str]) -> bool:
    """Whether the words are SCRIPT DATAID, and not JOBID COMMAND."""
    if store.plan(job_of(words[0])).flaw or not _can_start(words[0]):
        return False
    return bool(store.plan(words[0]).flaw) or not _can_start(words[1])


def _moment() -> str:
    from datetime import datetime

    return datetime.now().isoformat()


def _own_folder() -> str:
    """The folder of the command as it was called: for a link to us, that of the link."""
    return os.path.dirname(os.path.abspath(sys.argv[0]))


def _lies_beside(script: str) -> bool:
    """Whether a relative path leads to a script from the folder of the command."""
    return "/" in script and os.path.exists(os.path.join(_own_folder(), script))


def _go_where_it_lies(words: list[str]) -> None:
    """Work in the folder of the command, as the original does, if the script is only there."""
    if any(_lies_beside(word) and not os.path.exists(word) for word in words):
        os.chdir(_own_folder())


def _with_store(words: list[str], work: "Callable[[Store], int]") -> int:
    """Work with the tables that are configured here, beside the script, or where we lie."""
    from ..store import open_from

    beside = [os.path.dirname(os.path.abspath(word)) for word in words if "/" in word]
    folders = list(dict.fromkeys([os.getcwd(), *beside, _own_folder()]))
    tables = DEFAULT_URL.removeprefix("sqlite:///")
    home = next(
        (
            folder
            for folder in folders
            if any(os.path.exists(os.path.join(folder, name)) for name in (FILE_NAME, tables))
        ),
        None,
    )
    settings = load_settings(home=None if home == os.getcwd() else home)
    if words:  # what the script starts finds the same tables
        if settings.path:
            os.environ["DATAFLOW_PROPERTIES"] = settings.path
        if settings.origin == BUILT_IN:
            os.environ["DATAFLOW_URL"] = settings.url
    store = open_from(settings)
    try:
        return work(store)
    except NoDatabase:
        if home is None and settings.origin == BUILT_IN:
            raise NoDatabase(
                f"There is no {FILE_NAME}, and no {tables}, in {' or '.join(folders)}. Put the "
                f"file into one of them, or name it: DATAFLOW_PROPERTIES=/path/{FILE_NAME}"
            ) from None
        raise
    finally:
        store.close()


def _without_key(least: int, usage: str) -> list[str]:
    """The arguments after the key; a key among them moves to where `ps` doesn't show it."""
    words = sys.argv[1:]
    if len(words) > least and (not _has_key() or words[0] == os.environ.get("PASSKEY")):
        _hide_key(words)
    # A lone word may be a key whose script was forgotten: it is believed only if it can be started.
    if len(words) < least or not (_has_key() or _can_start(words[0]) or _can_start(words[-1])):
        sys.exit(_explain(usage))
    return words


def _hide_key(words: list[str]) -> None:
    os.environ["PASSKEY"] = words[0]
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    os.execv(sys.executable, [sys.executable, *before, *words[1:]])


def _has_key() -> bool:
    return "PASSKEY" in os.environ or bool(os.environ.get("PASSKEY_FILE"))


def _can_start(script: str) -> bool:
    from ..runner.script import CannotStart, check

    try:
        check(script, os.environ.get("PATH", os.defpath))
    except CannotStart:
        return os.path.exists(script) or _lies_beside(script)
    return True


def _explain(usage: str) -> int:
    print(usage, file=sys.stderr)
    return 2
