"""RunJob: claim the next chunk of a job, run its script, settle.

For a program in another language, `start` claims and `end` settles: the work is between the two.
"""

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import DataflowError, InputsChanged, NoDatabase, Refused, StaleClaim, WrongUse
from ..model import (
    FAILED,
    GIVEN_BACK,
    LOST,
    READY,
    RESUBMIT,
    WORK_EVENTS_VARIABLE,
    ChunkOutcome,
    Claim,
    Fact,
    Outcome,
    Plan,
    Say,
    Stop,
    Tell,
    new_owner,
)
from ..store.store import Store
from ..util.text import first_line, printable, typed
from .environment import (
    AnswerFiles,
    EnvironmentCache,
    JobEnvironment,
    ScriptAnswer,
    job_environment,
)
from .script import CannotStart, CodeVersion, Ended, Scripts, check, stop_code

if TYPE_CHECKING:
    from ..chunk import Checked, Chunk

IS_COMPLETE, HAS_FAILED, WAS_INTERRUPTED = "is complete", "has failed", "was interrupted"
"""How the work on a chunk ended, in the words that are said of it."""

NO_DATA_LINE = "no suitable data available for job. Not running it"
EXTERNAL_LEASE_SECONDS = 24 * 3600.0
"""Seconds: nobody renews such a claim, so it lasts longer than any work."""

EXTERNAL_OWNER = "start:"
"""The prefix of the owner's name of such a claim, so that no other claim is ended by mistake."""


class Runner:
    """Runs one script for chunks of one job; threads may share it."""

    secrets = True
    """Whether what it runs finds the passwords in its environment."""

    awaits_others = True
    """Whether a run of all chunks waits for chunks of other workers."""

    waits = False
    """Whether a run of all chunks waits for the end of a pause, too."""

    checks: "Sequence[Callable[[Chunk], Checked]]" = ()
    """The checks of a chunk after its script succeeded, before it becomes READY."""

    def __init__(
        self,
        store: Store,
        jobid: str,
        argv: list[str],
        *,
        say: Say,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.store, self.jobid, self.argv = store, jobid, argv
        self.environ = environ
        self._say = say
        self.code = CodeVersion(argv, environ)
        self._environment = EnvironmentCache(store, jobid, environ, secrets=self.secrets)
        self._check()

    def _check(self) -> None:
        """Refuse, before anything is claimed, what can't be run."""
        try:
            check(self.argv[0], self.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            error = WrongUse(f"{refusal}. Nothing was claimed.")
            error.exit_code = refusal.code
            raise error from None

    def environment(self) -> JobEnvironment:
        """The environment of the scripts, at most a second old; raises what forbids a claim."""
        return self._environment.read()

    def at_once(self) -> int:
        """How many chunks a worker claims at once: what the job's dial says now."""
        from ..store.claims import batch_size

        return batch_size(self.store, self.jobid) or 1

    def claim(self, owner: str, k: int = 1) -> tuple[list[Claim], JobEnvironment] | None:
        """The next chunks and their environment; when idle, lost claims are recovered first."""
        environment = self.environment()
        claims = self.store.claim_or_recover(self.jobid, owner=owner, k=k)
        return (claims, environment) if claims else None

    def run(
        self,
        claims: Sequence[Claim],
        environment: JobEnvironment,
        scripts: Scripts,
        *,
        stdin_null: bool = False,
    ) -> Generator[tuple[Claim, ChunkOutcome]]:
        """Run the script for each claimed chunk, and settle it.

        Chunks that haven't started are given back, however the loop ends.
        """
        if len(claims) == 1:
            yield claims[0], self.run_one(claims[0], environment, scripts, stdin_null=stdin_null)
            return
        from .heartbeat import WaitingClaims

        with WaitingClaims(
            self.store, claims, stopping=scripts.why_no_more, say=self.tell
        ) as waiting:
            while claim := waiting.next():
                environment = self.environment()  # it may have changed since the claim
                result = self.run_one(claim, environment, scripts, stdin_null=stdin_null)
                yield claim, result

    def run_one(
        self,
        claim: Claim,
        environment: JobEnvironment,
        scripts: Scripts,
        *,
        stdin_null: bool = False,
    ) -> ChunkOutcome:
        """Run the script for a claimed chunk, and settle it."""
        try:
            env = environment.for_chunk(claim)
        except DataflowError as error:
            return self.settle(claim, environment, Ended(1, str(error), 0.0))
        self.tell(f"Launching {self.argv[0]} with dataid {printable(claim.dataid)}")
        code = self.code.text()  # now: the script may be replaced while it runs
        try:
            ended, answer, stopped = self._execute(claim, environment, env, scripts, stdin_null)
        except BaseException as error:
            # The script has ended by now (`Scripts.run` sees to it). Settle the chunk here: else it
            # would wait for the end of its lease, and count as lost.
            why = f"{type(error).__name__} in odf itself"
            if isinstance(error, Exception):
                self.store.fail(claim, why, may_retry=False)
            else:
                from ..store.claims import interrupt_soon

                interrupt_soon(self.store, [claim], Stop(why))
            raise
        if stopped and not ended.began:
            from ..store.claims import give_back

            give_back(self.store, [claim], ended.reason)
            return ChunkOutcome(ended.code, GIVEN_BACK, None, ended.reason)
        return self.settle(claim, environment, ended, answer, code, stopped=stopped)

    def _execute(
        self,
        claim: Claim,
        environment: JobEnvironment,
        env: dict[str, str],
        scripts: Scripts,
        stdin_null: bool,
    ) -> tuple[Ended, ScriptAnswer, bool]:
        """How the script ended, what it answered, and whether it was stopped from outside."""
        with AnswerFiles(claim, environment.plan.outputs, env) as files:
            if files.trouble:
                self.tell(files.trouble)
            ended = scripts.run(
                self.argv,
                env,
                time_limit=claim.time_limit,
                beat=self._heart(claim, files),
                beat_every=claim.lease / 3,
                stdin_null=stdin_null,
            )
            if scripts.has_stopped(ended):  # it may have been stopped in the middle of a line
                return ended, ScriptAnswer(), True
            ended, answer = _with_answer(ended, files)
            if self.checks and not ended.code:
                ended, answer = self._checked(claim, environment, ended, answer)
            return ended, answer, False

    def settle(
        self,
        claim: Claim,
        environment: JobEnvironment,
        ended: Ended,
        answer: ScriptAnswer = ScriptAnswer(),  # noqa: B008 - a tuple, which nobody can change
        code: str | None = None,
        *,
        stopped: bool = False,
    ) -> ChunkOutcome:
        """Record how a script ended; a chunk whose claim was lost stays unchanged."""
        retry_in = None
        for line in answer.log:
            self._say(line)
        try:
            if stopped:
                from ..store.claims import interrupt

                self._tell_end(WAS_INTERRUPTED, ended.reason)
                status = interrupt(self.store, claim, Stop(ended.reason))
            elif ended.code == 0:
                self._tell_end(IS_COMPLETE)
                status = READY
                self.store.finish(claim, facts(claim, environment, answer, code))
            else:
                self._tell_end(HAS_FAILED, ended.reason)
                status, retry_in = self.store.fail(claim, ended.reason)
                if answer.checks:
                    from ..chunk import note_failed_checks

                    known = facts(claim, environment, answer, code)
                    note_failed_checks(self.store, claim, known)
        except StaleClaim as error:
            self.tell(str(error))
            status = RESUBMIT if isinstance(error, InputsChanged) else LOST
            return ChunkOutcome(ended.code or 1, status, None, ended.reason)
        return self._report_status(
            claim, environment, ChunkOutcome(ended.code, status, retry_in, ended.reason, stopped)
        )

    def _checked(
        self, claim: Claim, environment: JobEnvironment, ended: Ended, answer: ScriptAnswer
    ) -> tuple[Ended, ScriptAnswer]:
        """How a script ended with what the checks say of its chunk."""
        from ..chunk import as_results, failed_checks, open_chunk

        results = as_results(answer.results, environment.plan.outputs)
        chunk = open_chunk(self.store, claim, environment).with_results(results)
        asked = tuple(check(chunk) for check in self.checks)
        answer = answer._replace(results=results, checks=(*answer.checks, *asked))
        if reason := failed_checks(asked):
            ended = ended._replace(code=1, reason=reason)
        return ended, answer

    def _tell_end(self, how: str, reason: str = "", trace: Sequence[str] = ()) -> None:
        """Say how the work on a chunk has ended, in the original's words."""
        self.tell(f"Job {self.argv[0]} {how}. Updating status")
        for line in trace:
            self._say(line)
        if reason:
            self.tell(f"Reason: {printable(reason)}")

    def _report_status(
        self, claim: Claim, environment: JobEnvironment, result: ChunkOutcome
    ) -> ChunkOutcome:
        """Print a chunk's new status, and when it will be retried."""
        self._say(settled_line(claim, environment.plan, result.status))
        if result.retry_in:
            self.tell(f"The next attempt is due in {result.retry_in:g} s")
        return result

    def tell(self, message: str) -> None:
        self._say(f"{log_time()}: {message}")

    def tell_nothing(self) -> None:
        """Say that there is nothing to claim, and why."""
        self.tell(nothing_to_do(self.store, self.jobid))

    def _heart(self, claim: Claim, files: AnswerFiles) -> Callable[[], bool]:
        """Renew the lease; report an outage once, without failing the script."""
        said = False
        every = claim.lease / 3
        renewed = time.monotonic() - every  # it may have waited for its turn so long

        def beat() -> bool:
            nonlocal said, renewed
            asked = time.monotonic()
            try:
                alive = not self.store.heartbeat([claim])
                renewed = asked
                files.heed(alive)
                return alive
            except Exception as error:
                # A lease that may end before the next beat counts as ended: another worker could
                # claim the chunk while the script moves its result into place.
                files.heed(time.monotonic() + every < renewed + claim.lease)
                if not said:
                    self.tell(f"Can't renew the claim: {first_line(error)}. The script continues")
                said = True
                if self.store.db.trouble(error) == "gone":
                    self.store.db.drop()
                return True

        return beat


def run_job(
    store: Store,
    jobid: str,
    argv: list[str],
    *,
    say: Say,
    all_chunks: bool = False,
    workers: int = 1,
    wait: bool = False,
    progress: Tell | None = None,
    checks: "Sequence[Callable[[Chunk], Checked]]" = (),
) -> Outcome:
    """Run a script for the next chunk of a job, or with `all_chunks` until none is left.

    With `wait`, a pause or a concurrency of 0 doesn't end the run. `progress` gets the number of
    done and failed chunks after each chunk. Each produced chunk gets the `checks`.
    """
    runner = Runner(store, jobid, argv, say=say)
    runner.waits, runner.checks = wait, checks
    return run_chunks(runner, all_chunks=all_chunks, workers=workers, progress=progress)


def run_chunks(
    runner: Runner, *, all_chunks: bool = False, workers: int = 1, progress: Tell | None = None
) -> Outcome:
    """Let a runner work on the next chunk, or with `all_chunks` until none is left.

    If `odf work` started it, it reports each chunk there, and the first signal lets it drain.
    """
    events = os.environ.pop(WORK_EVENTS_VARIABLE, None)  # what we start is no part of `odf work`
    with Scripts(drains=events is not None) as scripts:
        runner.store.db.say, runner.store.db.ending = runner.tell, scripts.why_no_more
        try:
            return _run_chunks(runner, scripts, all_chunks, workers, progress, events)
        except NoDatabase:
            if scripts.stopping is None:
                raise
            runner.tell("Stopped while waiting for a connection")
            return Outcome(stop_code(scripts))
        except KeyboardInterrupt:
            if scripts.stopping is None:
                raise
            runner.tell("Stopped at once: unfinished chunks are given back")
            return Outcome(stop_code(scripts))


def _run_chunks(
    runner: Runner,
    scripts: Scripts,
    all_chunks: bool,
    workers: int,
    progress: Tell | None,
    events: str | None,
) -> Outcome:
    if all_chunks or workers > 1:
        from .catch_up import catch_up  # imported late: most cron lines run one chunk

        return catch_up(runner, scripts, workers=workers, progress=progress, events=events)
    taken = runner.claim(new_owner())
    if taken is None:
        runner.tell_nothing()
        return Outcome(stop_code(scripts))
    results = [result for _, result in runner.run(*taken, scripts)]
    return _outcome(results[0], scripts) if results else Outcome(stop_code(scripts))


def force_job(
    store: Store,
    jobid: str,
    dataid: str,
    argv: list[str],
    *,
    say: Say,
) -> Outcome:
    """Run a script for one chunk without the checks, unless it is being produced."""
    from ..store.claims import force

    runner = Runner(store, jobid, argv, say=say)
    with Scripts() as scripts:
        environment = runner.environment()
        claim = force(store, jobid, dataid, owner=new_owner())
        return _outcome(runner.run_one(claim, environment, scripts), scripts)


def facts(
    claim: Claim,
    environment: JobEnvironment,
    answer: ScriptAnswer | None = None,
    code: str | None = None,
) -> list[Fact]:
    """What is known of the outputs of a chunk: where they are, and what its script says."""
    if answer and (answer.results or answer.checks):
        from ..chunk import facts_of

        return facts_of(claim, environment, answer.results, answer.checks, code)
    return [
        Fact(datasetid, claim.dataid, location=environment.locations.get(datasetid), code=code)
        for datasetid in environment.plan.outputs
        if code or datasetid in environment.locations
    ]


def _with_answer(ended: Ended, files: AnswerFiles) -> tuple[Ended, ScriptAnswer]:
    """How a script ended with what it says, which may be that the chunk is no good."""
    try:
        answer = files.read()
    except DataflowError as error:
        reason = "; ".join(part for part in (ended.reason, str(error)) if part)
        return ended._replace(code=ended.code or 1, reason=reason), ScriptAnswer()
    if not ended.code and answer.checks:
        from ..chunk import failed_checks

        if reason := failed_checks(answer.checks):
            ended = ended._replace(code=1, reason=reason)
    return ended, answer


def settled_line(claim: Claim, plan: Plan, status: str) -> str:
    """The original's line about a chunk that has been settled."""
    chunk = f"{claim.jobid} and {printable(claim.dataid)}"
    return (
        f"{len(plan.outputs)} rows updated to {status} for {chunk} "
        f"{len(plan.reads)} IN file-local locks released"
    )


def nothing_to_do(store: Store, jobid: str) -> str:
    """Return the original's message that there is nothing to claim, followed by the reason."""
    from ..explain.explain import why_nothing

    return f"{NO_DATA_LINE}: {why_nothing(store, jobid)}"


def log_time() -> str:
    """The time, as `date` prints it."""
    return time.strftime("%a %b %e %H:%M:%S %Z %Y")


def _outcome(result: ChunkOutcome, scripts: Scripts) -> Outcome:
    if result.status == READY:
        return Outcome(0, done=1)
    if result.status == GIVEN_BACK or result.interrupted:
        return Outcome(stop_code(scripts))
    return Outcome(stop_code(scripts) or result.code or 1, failed=1)


def start(
    store: Store,
    jobid: str,
    *,
    lease: float = EXTERNAL_LEASE_SECONDS,
    secrets: bool = False,
    environ: Mapping[str, str] = os.environ,
    forced: str | None = None,
) -> tuple[Claim, list[dict[str, str]]] | None:
    """Claim the next chunk of a job; return it with its context, or None if nothing is ready.

    With `forced`, claim that chunk whatever the status of its inputs. The context is the original's
    list of objects with one key each, without passwords unless `secrets` is true.
    """
    from ..store.claims import force  # imported late: `odf run` starts without it

    environment = job_environment(store, store.plan(jobid), environ, secrets=secrets)
    owner = EXTERNAL_OWNER + new_owner()
    if forced is not None:
        claims = [force(store, jobid, forced, owner=owner, lease=lease)]
    else:
        claims = store.claim_or_recover(jobid, owner=owner, lease=lease)
    if not claims:
        return None
    [claim] = claims
    # A policy's lease is for claims that are renewed, and nobody renews this one.
    if claim.lease != lease:
        claim = claim._replace(lease=lease)
        if store.heartbeat([claim]):
            raise StaleClaim(
                f"Chunk {claim.dataid!r} of {jobid!r} was claimed by another worker. Start again."
            )
    return claim, environment.context(claim, secrets=secrets)


def is_alive(
    store: Store,
    jobid: str | None = None,
    dataid: str | None = None,
    generation: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Whether a claim holds; without arguments, the claim for which this script was started."""
    given = {
        "jobid": jobid or environ.get("dataflow_jobid"),
        "dataid": dataid or environ.get("dataid"),
        "generation": generation or environ.get("dataflow_generation"),
    }
    if not (given["jobid"] and given["dataid"] and str(given["generation"] or "").isdigit()):
        raise WrongUse(
            "No job runs here, so there is no claim to check. Name one: "
            "odf alive JOB DATAID --generation N."
        )
    given["generation"] = int(str(given["generation"]))
    rows = store.db.fetch("claims.alive", **given)
    return bool(rows)


def end(
    store: Store, jobid: str, dataid: str, status: str, *, generation: int | None = None
) -> str:
    """Settle a claim of `start` as READY or FAILED; return the original's line about it.

    With `generation`, settle that claim of the chunk, whoever made it. RESUBMIT gives a claim back,
    and resubmits a chunk that isn't claimed.
    """
    from ..store.claims import interrupt
    from ..store.operations import refuse_unknown_job, resubmit

    if status not in (READY, FAILED, RESUBMIT):
        raise WrongUse(
            f"The status must be {READY}, {FAILED} or {RESUBMIT}, not {status!r}. "
            "See `odf end --help`."
        )
    rows = store.db.run("runjob.live_claim", jobid=jobid, dataid=dataid)
    if not rows and status == RESUBMIT and generation is None:
        moved = resubmit(store, jobid, [dataid], why="odf end")
        return (
            f"{len(moved.moves)} rows updated to {RESUBMIT} for {jobid} and {printable(dataid)} "
            "0 IN file-local locks released"
        )
    if not rows:
        refuse_unknown_job(store, jobid)
        raise Refused(
            f"Chunk {dataid!r} of {jobid!r} isn't claimed, so there is nothing to end. "
            f"Claim it with `odf start {typed(jobid)}`; see `odf history {typed(jobid)}`.",
            code="NOT_CLAIMED",
        )
    [(current, owner, attempts)] = rows
    if generation is None and not owner.startswith(EXTERNAL_OWNER):
        raise Refused(
            f"Chunk {dataid!r} of {jobid!r} is being run by {owner}, which will settle it. "
            f"To settle it anyway, add --generation {current}.",
            code="LOCKED",
        )
    if generation is not None:
        current = generation
    claim = Claim(jobid, dataid, current, owner, attempts, EXTERNAL_LEASE_SECONDS, None)
    environment = job_environment(store, store.plan(jobid), secrets=False)
    if status == READY:
        store.finish(claim, facts(claim, environment))
    elif status == RESUBMIT:
        status = interrupt(store, claim, Stop("odf end"))
    else:
        status = store.fail(claim, "odf end").status
    return settled_line(claim, environment.plan, status)
