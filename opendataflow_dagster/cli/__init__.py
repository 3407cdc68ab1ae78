"""The `odf` command. What a cron line runs a thousand times a day is served without click."""

import gc
import io
import os
import sys

TYPE_CHECKING = False  # type checkers take it for true; a cron line doesn't pay for `typing`
if TYPE_CHECKING:
    from .fast_run import RunLine


def main() -> None:
    """Run `odf` with this process's arguments, and exit."""
    gc.disable()  # while modules are loaded, there is nothing to collect
    from ..config.credentials import take_passkey

    take_passkey()  # before anything that a user has written is loaded
    from .fast_run import parse, run_guarded

    words = sys.argv[1:]
    if words[:1] == ["run"] and (line := parse(words[1:])):
        leave(run_guarded(lambda: _run(line)))
    if words == ["alive"]:
        leave(run_guarded(_alive))
    gc.enable()
    sys.exit(run_guarded(lambda: _with_click(words)))


def _run(line: "RunLine") -> int:
    from .fast_run import choose_target, execute, names_job

    choose_target(line.config)
    if names_job(line):
        from .run_flow import run_named

        return run_named(line)
    return execute(line)


def _alive() -> int:
    from ..store import open_configured
    from .fast_run import choose_target, told_alive

    choose_target(None)
    return told_alive(open_configured(None))


def leave(code: int) -> None:
    """Exit without taking the interpreter apart, which takes longer than many a job."""
    from ..util.system import flush_output

    flush_output()
    os._exit(code)


def _with_click(words: list[str]) -> int:
    from .app import app

    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    app(words, prog_name="odf")
    return 0
