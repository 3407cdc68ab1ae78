"""`RunJob` and `ForceJob` with the original's calling convention, for cron lines that exist."""

import os
import sys

from ..dataflow.passkey import take_passkey
from . import leave
from .runline import concluded, job_of, narrator

RUN_USAGE = """\
usage: RunJob [KEY] SCRIPT [ARG...]
Runs SCRIPT for the next chunk that is ready of the job that is named like it, less the extension.
The key comes from PASSKEY, or the file named by PASSKEY_FILE, or else is the first argument.
If nothing is encrypted, set PASSKEY to nothing: PASSKEY= RunJob SCRIPT [ARG...]"""

FORCE_USAGE = """\
usage: ForceJob [KEY] JOBID COMMAND [ARG...]
Runs COMMAND as a job without the checks; its dataid is the current time.
The key comes from PASSKEY, or the file named by PASSKEY_FILE, or else is the first argument."""


def runjob() -> None:
    """The entry point of `RunJob`."""
    words = _without_key(1, RUN_USAGE)
    take_passkey()

    def work() -> int:
        from ..dataflow.opening import open_configured
        from ..dataflow.runjob import run_job

        store = open_configured()
        try:
            return run_job(store, job_of(words[0]), words, say=narrator(sys.stdout)).code
        finally:
            store.close()

    leave(concluded(work))


def forcejob() -> None:
    """The entry point of `ForceJob`."""
    jobid, *words = _without_key(2, FORCE_USAGE)
    has_key = _has_key()
    take_passkey()

    def work() -> int:
        from datetime import datetime

        from ..dataflow.opening import open_configured
        from ..dataflow.runjob import force_job

        store = open_configured()
        try:
            if not has_key and store.plan(jobid).flaw:  # it may be a key: not to be printed
                return _explain(FORCE_USAGE)
            dataid = datetime.now().isoformat()
            return force_job(store, jobid, dataid, words, say=narrator(sys.stdout)).code
        finally:
            store.close()

    leave(concluded(work))


def _without_key(least: int, usage: str) -> list[str]:
    """The arguments after the key; a key among them moves to where `ps` doesn't show it."""
    words = sys.argv[1:]
    if len(words) > least and (not _has_key() or words[0] == os.environ.get("PASSKEY")):
        os.environ["PASSKEY"] = words[0]
        before = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
        os.execv(sys.executable, [sys.executable, *before, *words[1:]])
    # A lone word may be a key whose script was forgotten: it is believed only if it can be started.
    if len(words) < least or not (_has_key() or _can_start(words[-1])):
        sys.exit(_explain(usage))
    return words


def _has_key() -> bool:
    return "PASSKEY" in os.environ or bool(os.environ.get("PASSKEY_FILE"))


def _can_start(script: str) -> bool:
    from ..dataflow.script import CannotStart, check

    try:
        check(script, os.environ.get("PATH", os.defpath))
    except CannotStart:
        return os.path.exists(script)
    return True


def _explain(usage: str) -> int:
    print(usage, file=sys.stderr)
    return 2
