"""`odf work`: runs all jobs of a flow on this host until it is stopped, and shows the progress."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from tempfile import NamedTemporaryFile
from typing import IO, Any, Protocol, Self, TextIO

import click

from ..errors import DataflowError
from ..flow.flow import FILE, Flow, Job
from ..model import (
    GIVEN_BACK,
    READY,
    WORK_EVENTS_VARIABLE,
    WORK_VARIABLE,
    ChunkOutcome,
    Say,
)
from ..runner.catch_up import (
    HELD_BACK_CODE,
    ChunksFailed,
    HostJob,
    JobState,
    JobStep,
    TellClaimed,
    TellEnded,
)
from ..runner.run import Runner
from ..runner.script import Scripts
from ..runner.work import Workshop
from ..storage.presence import Expectation
from ..store import open_configured
from ..store.store import Store
from ..util.text import first_line, printable, typed
from .run_flow import OWN, expectations, in_order, script_of, without_script

# What `odf work` shows: a line for each job on a terminal, elsewhere a line of JSON per event.


REDRAW_SECONDS = 0.25

NARRATION = (
    "Launching ",
    ". Updating status",
    " rows updated to ",
    "Reason: ",
    "The next attempt",
    "Can't renew the claim",
)
"""What `odf run` says of each chunk: events tell the same."""

FAILURES = ("FAILED", "LOST", "HOLD")

SENTENCES = {
    "left_out": "{job} is left out: {why}",
    "trouble": "{job} can't be run: {why}",
    "away": "The database is down: {why}. Running scripts continue; nothing is claimed "
    "until it is back",
    "back": "The database is back after {seconds:g} s",
    "draining": "{why}: claiming nothing more, {running} at work; a second signal stops them",
    "stopping": "{why}: stopping {running} at work",
    "left": "{workers} workers don't end: their claims wait for their leases to expire",
    "recovered": "{job} {dataid} is {status}: {why}",
    "reloaded": "The flow has changed, and is read again",
    "finished": "done {done}, failed {failed}",
}
"""The sentence for an event, on a terminal."""


class Report(Protocol):
    """Receives what happens during the work."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def event(self, name: str, **fields: Any) -> None: ...
    def draw(self, jobs: Sequence[JobState], line: str) -> None: ...
    def say(self, line: str) -> None: ...
    def say_of(self, jobid: str) -> Say: ...


class JsonLines:
    """Prints an object per event to standard output; scripts print to standard error meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._output: TextIO | None = None

    def __enter__(self) -> Self:
        self._output = _moved(1, 2)
        return self

    def __exit__(self, *_: object) -> None:
        if self._output is not None:
            _put_back(self._output, 1)

    def event(self, name: str, **fields: Any) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"at": at, "event": name, **fields})
        # A reader that has gone, or a full disk, stops no work.
        with self._lock, suppress(OSError, ValueError):
            print(line, file=self._output, flush=True)

    def draw(self, jobs: Sequence[JobState], line: str) -> None:
        pass

    def say(self, line: str) -> None:
        self.event("message", text=line)

    def say_of(self, jobid: str) -> Say:
        def say(line: str) -> None:
            if not any(phrase in line for phrase in NARRATION):
                self.event("message", job=jobid, text=line)

        return say


class Board:
    """Draws a line for each job at the bottom of a terminal, and prints all else above.

    What scripts print comes through a pipe, or they would write across the lines.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminal: TextIO = sys.stdout
        self._height = 0
        self._lines: list[str] = []
        self._drawn_at = 0.0
        self._outputs: list[TextIO] = []
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._terminal = os.fdopen(os.dup(1), "w", errors="backslashreplace")
        read, write = os.pipe()
        self._outputs = [_moved(number, write) for number in (1, 2)]
        os.close(write)
        self._reader = threading.Thread(target=self._pass_on, args=(read,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, output in zip((1, 2), self._outputs, strict=True):
            _put_back(output, number)
        if self._reader:  # a program that a script has left behind may keep the pipe open
            self._reader.join(0.5)
        with self._lock:
            self._show([], [])

    def event(self, name: str, **fields: Any) -> None:
        if name == "ended" and fields["status"] in FAILURES:
            self.say(f"{fields['job']} {fields['dataid']} {fields['status']}: {fields.get('why')}")
        elif name in SENTENCES:
            self.say(SENTENCES[name].format(**fields))
        elif name == "message":
            self.say(f"{fields['job']}: {fields['text']}" if "job" in fields else fields["text"])

    def say(self, line: str) -> None:
        with self._lock:
            self._show([f"{time.strftime('%H:%M:%S')} {printable(line)}"], self._lines)

    def say_of(self, jobid: str) -> Say:
        def say(line: str) -> None:
            if not any(phrase in line for phrase in NARRATION):
                self.say(f"{jobid}: {line}")

        return say

    def draw(self, jobs: Sequence[JobState], line: str) -> None:
        now = time.monotonic()
        if now - self._drawn_at < REDRAW_SECONDS:
            return
        self._drawn_at = now
        size = os.get_terminal_size(self._terminal.fileno())
        columns, most = size.columns or 80, max(4, (size.lines or 24) - 2)
        lines = [text[: columns - 1] for text in job_lines(jobs, line)]
        if len(lines) > most:
            more = f"… and {len(lines) - most + 1} more"
            lines = [*lines[: most - 2], more, lines[-1]]
        with self._lock:
            if lines != self._lines:
                self._show([], lines)

    def _show(self, above: Sequence[str], lines: list[str]) -> None:
        up = f"\x1b[{self._height}F" if self._height else ""
        text = f"{up}\x1b[J" + "".join(f"{line}\n" for line in [*above, *lines])
        self._height, self._lines = len(lines), lines
        with suppress(OSError, ValueError):
            self._terminal.write(text)
            self._terminal.flush()

    def _pass_on(self, read: int) -> None:
        """Print what scripts print, line by line."""
        with os.fdopen(read, errors="backslashreplace") as pipe:
            for line in pipe:
                with self._lock:
                    self._show([line.rstrip("\r\n")], self._lines)


def job_lines(jobs: Sequence[JobState], line: str) -> list[str]:
    """A line for each job, and one for all."""
    width = min(40, max([3, *(len(printable(job.job.jobid)) for job in jobs)]))
    rows = [f"{'JOB':<{width}}  {'RUNNING':>7}  {'DONE':>7}  {'FAILED':>6}  {'READY':>6}"]
    for job in jobs:
        ready = job.outlook.claimable if job.outlook else 0
        shown = f"{ready}+" if ready >= 100 else str(ready)
        rows.append(
            f"{printable(job.job.jobid)[:width]:<{width}}  {job.busy:>7}  {job.done:>7}  "
            f"{job.failed:>6}  {shown:>6}  {_state(job)}".rstrip()
        )
    totals = [sum(getattr(job, name) for job in jobs) for name in ("busy", "done", "failed")]
    rows.append(
        f"{totals[0]} running, {totals[1]} done, {totals[2]} failed" + (line and f"; {line}")
    )
    return rows


def _state(job: JobState) -> str:
    """Why a job does nothing, if something keeps it."""
    if job.trouble:
        return printable(job.trouble)
    if job.outlook and job.outlook.held:
        return job.outlook.held
    if job.waits_for_runs:
        return "in Dagster's hands"
    if job.opens_in is not None:
        return f"next in {job.opens_in / 60:.0f} min"
    if job.outlook and job.outlook.retry_in is not None:
        return f"retry in {max(0.0, job.outlook.retry_in):.0f} s"
    return ""


def _moved(number: int, target: int) -> TextIO:
    """Let one of our files be another from now on; return what it was."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    before = os.fdopen(os.dup(number), "w", errors="backslashreplace")
    os.dup2(target, number)
    return before


def _put_back(before: TextIO, number: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError, ValueError):
        os.dup2(before.fileno(), number)
        before.close()


FILE_CHECK_SECONDS = 2.0
"""Seconds after which the flow is looked at: it may have changed."""

HEED_SECONDS = 0.2
"""Seconds between two looks at what a program that runs all chunks of a job has reported."""

PROGRAM_GRACE_SECONDS = 30.0
"""Seconds that it has to give back what it has claimed."""


@click.command()
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="the number of CPUs",
    help="Chunks to run in parallel, of all jobs together.",
)
@click.option(
    "--until-idle", is_flag=True, help="Exit when no chunk is left to run, as in a cron line."
)
@click.option(
    "--drain",
    "drain_seconds",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long scripts may keep running after the first signal, before they are stopped. "
    "Default: until they end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON, even at a terminal.")
@click.pass_context
def work(
    ctx: click.Context,
    workers: int,
    until_idle: bool,
    drain_seconds: float | None,
    as_json: bool,
) -> None:
    """Run the jobs of flow.yml on this host, as chunks become ready.

    The command runs until TERM or Ctrl-C. It then claims no more chunks, and exits when the running
    scripts have ended. A second signal stops the scripts and gives their chunks back at once.

    It waits through pauses and database outages, grants retries and settles lost claims. Any number
    of hosts can run it at the same time.

    At a terminal it shows one line for each job. Elsewhere it prints a line of JSON for each event,
    and the output of scripts goes to standard error.

    \b
    Example: odf work --workers 8
    Example: odf work --until-idle
    """
    flow = Flow.load(FILE)
    os.environ[WORK_VARIABLE] = "1"
    config = ctx.find_root().obj
    store = open_configured(config)
    store.db.insist(store.db.connect)  # a wrong address is told now, and not waited for
    report: Report = Board() if sys.stdout.isatty() and not as_json else JsonLines()
    with closing(store), report, Scripts(drains=True) as scripts:
        source = FlowJobs(store, report, config)
        shop = Workshop(
            store,
            scripts,
            report,
            workers=workers,
            until_idle=until_idle,
            drain_seconds=drain_seconds,
            reload=source.reload,
        )
        store.db.say, store.db.ending = report.say, scripts.why_no_more
        jobs = source.jobs_of(flow)
        report.event("started", flow=flow.name, workers=workers, jobs=[job.jobid for job in jobs])
        outcome = shop.run(jobs)
        report.event("finished", done=outcome.done, failed=outcome.failed)
    ctx.exit(outcome.code)


class FlowJobs:
    """The jobs of the flow that this host runs, read again when the file changes."""

    def __init__(self, store: Store, report: Report, config: str | None) -> None:
        self.store, self.report, self.config = store, report, config
        self._seen = _stamp()
        self._look_at = 0.0
        self._known: dict[str, tuple[Job, list[Expectation], HostJob]] = {}
        self._left_out: set[str] = set()

    def jobs_of(self, flow: Flow) -> list[HostJob]:
        """The jobs that `odf work` starts; the others are named once, with the reason."""
        jobs = []
        for job in in_order(flow):
            if job.runs_in not in OWN:
                self._leave_out(job, f"runs_in is {job.runs_in}")
            elif not (job.run or job.python or job.spark or job.pipeline):
                self._leave_out(job, str(without_script(job)))
            else:
                jobs.append(self._host_job(job, expectations(flow, job)))
                if flaw := self.store.plan(job.jobid).flaw:
                    self._leave_out(job, f"{flaw}. Run: odf apply", "trouble")
        return jobs

    def reload(self) -> Sequence[HostJob] | None:
        """The jobs, if the file has changed; one that can't be read leaves them as they are."""
        from time import monotonic

        if monotonic() < self._look_at:
            return None
        self._look_at = monotonic() + FILE_CHECK_SECONDS
        if (stamp := _stamp()) == self._seen:
            return None
        self._seen = stamp
        try:
            jobs = self.jobs_of(Flow.load(FILE))
        except (DataflowError, OSError) as error:
            self.report.event("message", text=f"The flow stays as it was: {first_line(error)}")
            return None
        self.report.event("reloaded", jobs=[job.jobid for job in jobs])
        return jobs

    def _leave_out(self, job: Job, why: str, event: str = "left_out") -> None:
        if (told := f"{job.jobid} {why}") not in self._left_out:
            self._left_out.add(told)
            self.report.event(event, job=job.jobid, why=why)

    def _host_job(self, job: Job, rules: list[Expectation]) -> HostJob:
        """What runs a job; the same one as before if nothing has changed."""
        *before, known = self._known.get(job.jobid, (None, None, None))
        if known is None or before != [job, rules]:
            known = HostJob(
                job.jobid,
                lambda: self._step_of(job, rules),
                reads_today="today" in job.inputs,
                is_shared=job.runs_in is None,
                is_alone=job.run is None,
                begins_runs=job.pipeline is not None,
            )
            self._known[job.jobid] = (job, rules, known)
        return known

    def _step_of(self, job: Job, rules: list[Expectation]) -> JobStep:
        say = self.report.say_of(job.jobid)
        if job.run is None:
            config = [] if self.config is None else ["--config", self.config]
            python = [sys.executable, "-m", f"{__package__}"]
            return _program([*python, "run", *config, "--all", job.jobid])
        runner = ScriptRunner(self.store, job.jobid, script_of(job), say=say)
        runner.checks = rules
        return _claimer(runner)


class ScriptRunner(Runner):
    """Runs a script for chunks of one job; what `odf run` says of each is left to the events."""

    def tell(self, message: str) -> None:
        self._say(message)


def _claimer(runner: Runner) -> JobStep:
    """Claims chunks of a job and runs its script, as a worker of `odf run --all` does."""

    def step(owner: str, scripts: Scripts, claimed: TellClaimed, ended: TellEnded) -> bool:
        taken = runner.claim(owner, runner.at_once())
        if not taken:
            return False
        claimed([claim.dataid for claim in taken[0]], time.monotonic())
        with closing(runner.run(*taken, scripts, stdin_null=True)) as results:
            for claim, result in results:
                ended(claim.dataid, result, time.monotonic())
        return True

    return step


def _program(words: list[str]) -> JobStep:
    """Runs a program that claims by itself until nothing is left.

    Functions run apart from the scripts' supervisor: they may end their process, or fill it with
    Java, and the next start finds them as they are then. The program appends to a file what it has
    claimed, and what became of it.
    """

    def step(owner: str, scripts: Scripts, claimed: TellClaimed, ended: TellEnded) -> bool:
        with Scripts() as own, NamedTemporaryFile(prefix="odf-work-") as file:
            events = _ProgramEvents(file, claimed, ended)

            def beat() -> bool:
                events.read()
                if scripts.why_no_more() and not events.is_draining:
                    events.is_draining = True
                    own.drain(signal.SIGTERM)  # the first TERM; the second comes with False
                return scripts.why_stopping() is None

            result = own.run(
                words,
                {**os.environ, WORK_EVENTS_VARIABLE: file.name},
                beat=beat,
                beat_every=HEED_SECONDS,
                grace=PROGRAM_GRACE_SECONDS,
                stdin_null=True,
            )
            events.read()
        if scripts.why_no_more() is None and result.code not in (0, HELD_BACK_CODE):
            program = f"`{typed('odf', *words[3:])}`"
            told = f"{program} ended with {result.reason or result.code}: see what it printed."
            if result.code == 1 and events.has_failures:
                raise ChunksFailed(told)
            raise DataflowError(told)
        return True

    return step


class _ProgramEvents:
    """The file in which a program reports its chunks, read as it grows."""

    def __init__(self, file: IO[bytes], claimed: TellClaimed, ended: TellEnded) -> None:
        self._file, self._claimed, self._ended = file, claimed, ended
        self._rest = b""
        self.is_draining = self.has_failures = False

    def read(self) -> None:
        """Pass on what the program has reported since the last look."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for event in map(json.loads, lines):
            if "claimed" in event:
                self._claimed(event["claimed"], event["at"])
                continue
            result = ChunkOutcome(*event["result"])
            self.has_failures |= result.status not in (READY, GIVEN_BACK) and not result.interrupted
            self._ended(event["ended"], result, event["at"])


def _stamp() -> tuple[int, int, int] | None:
    with suppress(OSError):
        found = os.stat(FILE)
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None
