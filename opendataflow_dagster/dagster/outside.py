"""The runs that show work outside Dagster: one for each execution of a job.

They are stored as Dagster stores runs, but nothing is launched. While an execution is at work, its
run is MANAGED: the only unfinished status that takes no slot and that Dagster leaves alone. Dagster
fails a STARTED run that has no process, and launches a QUEUED one. A partition's square takes its
color from a run, so chunks that fail in a run that is still at work are shown by a second run
beside it. The second run is removed when the first has ended.
"""

import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from ..model import DAGSTER_RUN, FAILED, PENDING, READY, RUNNING
from ..store.overview import EARLIER, Execution, ExecutionOutcome, outcomes, recent
from ..store.store import Store
from ..util.text import typed
from . import internals
from .events import OutsideOptions
from .public_grid import FINISHED_STATUSES, PublicMirror, is_ours, our_run

if TYPE_CHECKING:
    from .run_storage import RunStorage, ShownRun

OUTSIDE_TAG = "opendataflow/outside"
"""The tag of all runs that show work done outside Dagster; lists of runs are filtered by it."""

EXECUTION_TAG = ".dagster/opendataflow_execution"
"""The tag that names the execution; its prefix hides it in lists of runs."""

KIND_TAG = "opendataflow/kind"
"""The tag that says whether the execution was a process, a transaction, or items."""

BESIDE_TAG = "opendataflow/failures_so_far_of"
"""The tag of a run that shows what failed in another run that is still at work."""

TOLD_CHUNKS = 200
"""Chunks that aren't READY that get a line each in a run's log."""

TOLD_LINES = 20
"""Lines from the end of a chunk's log that a run's log repeats."""

NAMED_CHUNKS = 5
"""Failed chunks named in the command that resubmits them."""

FIRST_RUNS = [
    str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{word.lower()}.opendataflow"))
    for word in ("RUNNING", "FAILED", "RESUBMIT", "HOLD")
]
"""Runs of the first versions, one for each status, which showed all chunks."""

_WORKER = re.compile(r"(?:start:)?(?P<user>.+?)@(?P<host>.+):(?P<pid>\d+):[0-9a-f]{8}")
_STATUS = dg.DagsterRunStatus


class Wanted(NamedTuple):
    """The run that an execution should have; no status: none."""

    run_id: str
    status: dg.DagsterRunStatus | None
    outcomes: list[ExecutionOutcome]


class OutsideRuns:
    """The runs of one store's executions in one Dagster instance."""

    def __init__(
        self,
        store: Store,
        mirror: PublicMirror,
        *,
        options: OutsideOptions | None = None,
    ) -> None:
        self.store, self.mirror = store, mirror
        self.options = options or OutsideOptions()
        self._wanted: dict[Execution, Wanted] = {}
        self._shown: set[str] = set()
        self._failed: dict[str, ShownRun] = {}
        """The failed runs that were stored."""
        self._real: dict[str, dg.DagsterRunStatus | None] = {}
        self._kept: set[Execution] | None = None
        self.written = 0

    @cached_property
    def storage(self) -> "RunStorage":
        """Where Dagster keeps runs, for a mirror that shows them."""
        # Imported here: a Dagster that lacks what that module imports has a mirror without runs.
        from .grid import Mirror
        from .run_storage import RunStorage

        assert isinstance(self.mirror, Mirror)
        return RunStorage(self.mirror)

    # --- what should be shown ---

    def run_id(self, execution: Execution, part: str = "") -> str:
        return our_run(self.store.id, *execution, part)

    def wanted(self, execution: Execution) -> Wanted:
        """Return the run that an execution should have by the tables, as of this pass."""
        if execution not in self._wanted:
            found = outcomes(self.store, execution)
            self._wanted[execution] = Wanted(self.run_id(execution), _end(found), found)
        return self._wanted[execution]

    def of_chunk(self, execution: Execution, status: str) -> str:
        """Return the run that shows a chunk with a status other than READY; "" if none does."""
        if not self.mirror.shows_runs:
            return ""
        if self.is_dagsters(execution):
            real = execution.name.removeprefix(DAGSTER_RUN)
            state = self._state_of_real(execution)
            is_live = state is not None and state not in FINISHED_STATUSES
            if is_live if status == RUNNING else state == _STATUS.FAILURE:
                return real
            if status != RUNNING:
                return self.run_id(execution, "so far")
        wanted = self.wanted(execution)
        fits = _STATUS.MANAGED if status == RUNNING else _STATUS.FAILURE
        return wanted.run_id if wanted.status == fits else self.run_id(execution, "so far")

    def kept(self) -> set[Execution]:
        """The executions whose runs are kept."""
        if self._kept is None:
            self._kept = set(recent(self.store, self.options.keep_days, self.options.keep_runs))
        return self._kept

    def is_dagsters(self, execution: Execution) -> bool:
        """Whether a run of this Dagster performed an execution."""
        return _is_dagsters(execution.name) and self._state_of_real(execution) is not None

    def _state_of_real(self, execution: Execution) -> dg.DagsterRunStatus | None:
        real = execution.name.removeprefix(DAGSTER_RUN)
        if real not in self._real:
            self._real[real] = self.mirror.statuses({real}).get(real)
        return self._real[real]

    def forget(self, executions: Iterable[Execution]) -> None:
        """Read the tables, and Dagster's own runs, again: these executions have progressed."""
        self._real = {}
        for execution in executions:
            self._wanted.pop(execution, None)
            self._shown.discard(self.run_id(execution))
            self._shown.discard(self.run_id(execution, "so far"))

    # --- what is written ---

    def show(self, executions: Iterable[Execution]) -> None:
        """Write the runs of executions as they should be."""
        if not self.mirror.shows_runs:
            return
        wanted = {each: self.wanted(each) for each in executions}
        ids = {each.run_id for each in wanted.values()}
        reals = {name.removeprefix(DAGSTER_RUN) for name, _ in wanted if _is_dagsters(name)}
        there = self.mirror.statuses(ids | reals)
        written = []
        for execution, each in wanted.items():
            state = there.get(each.run_id)
            is_dagsters_own = execution.name.removeprefix(DAGSTER_RUN) in there
            if each.status is not None and (state is not None or not is_dagsters_own):
                written.append((execution, each, state))
        self._write(written)

    def show_for(self, executions: Mapping[str, Execution]) -> None:
        """Make sure that the runs that the squares link to exist and are correct."""
        if not self.mirror.shows_runs:
            return
        unsure = {run_id for run_id in executions if is_ours(run_id)} - self._shown
        there = self.mirror.statuses(unsure)
        written = []
        for run_id in unsure:
            wanted, state = self.wanted(executions[run_id]), there.get(run_id)
            if run_id != wanted.run_id:
                failed = [
                    each for each in wanted.outcomes if each.status not in (READY, RUNNING, None)
                ]
                wanted = Wanted(run_id, _STATUS.FAILURE, failed)
            if state != wanted.status:
                written.append((executions[run_id], wanted, state))
        self._write(written)
        self._shown |= unsure

    def tell_failures_last(self) -> None:
        """Log why runs of this pass failed, after their chunks: a page shows its last lines."""
        if self._failed:
            there = self.mirror.statuses(set(self._failed))
            self.storage.put(
                shown
                for run_id, shown in self._failed.items()
                if there.get(run_id) == _STATUS.FAILURE  # neither removed since nor at work again
            )

    def remove_so_far(self, executions: Iterable[Execution], left: Iterable[str]) -> None:
        """Remove the runs of failures so far that no square is shown by any more.

        Args:
            executions: Those that progressed. Once they have ended, their own run shows the
                failures.
            left: Runs that squares were shown by, and no longer are.
        """
        if not self.mirror.shows_runs:
            return
        candidates = {
            self.run_id(each, "so far")
            for each in executions
            if self.wanted(each).status in FINISHED_STATUSES
        }
        candidates = self.mirror.statuses(candidates | set(left)).keys()
        for run_id in candidates:
            run = self.mirror.instance.get_run_by_id(run_id)
            if run and BESIDE_TAG in run.tags and not self._shows_something(run_id):
                self.mirror.remove_run(run_id)
                self.written += 1

    def missing(self) -> list[Execution]:
        """Return the kept executions that have no run."""
        if not self.mirror.shows_runs:
            return []
        by_run = {
            self.run_id(each): each
            for each in sorted(self.kept())
            if not _is_dagsters(each.name) and each.name != EARLIER
        }
        there = self.mirror.statuses(set(by_run))
        return [each for run_id, each in by_run.items() if run_id not in there]

    def has_first(self) -> bool:
        """Whether runs of the first versions exist."""
        return bool(self.mirror.statuses(set(FIRST_RUNS)))

    def remove_first(self) -> None:
        """Remove the runs of the first versions once no square is shown by them."""
        for run_id in self.mirror.statuses(set(FIRST_RUNS)):
            self.mirror.remove_run(run_id)

    def remove_old(self, until: float) -> None:
        """Remove runs past their retention, except those that a square links to now."""
        for run_id in self._old_runs() if self.mirror.shows_runs else ():
            if time.monotonic() > until:
                return
            if not self._shows_something(run_id):
                self.storage.disown(run_id)
                self.mirror.remove_run(run_id)
                self.written += 1

    def _old_runs(self) -> list[str]:
        found = self.storage.ended(OUTSIDE_TAG)
        cutoff = time.time() - self.options.keep_days * 86400
        old = [
            run_id
            for place, (run_id, ended) in enumerate(found)
            if place >= self.options.keep_runs or (ended or 0) < cutoff
        ]
        return old[::-1]

    def _shows_something(self, run_id: str) -> bool:
        """Whether the square of any chunk is red or in progress because of this run."""
        by_key: dict[str, list[str]] = {}
        for key, part in self.mirror.planned_by(run_id):
            by_key.setdefault(key, []).append(part)
        for key, parts in by_key.items():
            asset = dg.AssetKey.from_db_string(key)
            if asset and any(
                square.run_id == run_id for square in self.mirror.shown(asset, parts).values()
            ):
                return True
        return False

    def _write(self, runs: list[tuple[Execution, Wanted, dg.DagsterRunStatus | None]]) -> None:
        """Write runs as they should be, given their status so far, or None for a new run."""
        if not runs:
            return
        shown = [self._shown_run(execution, wanted) for execution, wanted, _ in runs]
        self.storage.put(shown)
        self._failed |= {
            each.run.run_id: each for each in shown if each.run.status == _STATUS.FAILURE
        }
        for (execution, wanted, state), each in zip(runs, shown, strict=True):
            if state != wanted.status:
                self.written += 1
                self._alert(wanted, each)
            self._shown.add(wanted.run_id)
            if wanted.status == _STATUS.SUCCESS:  # its chunks aren't needed any more: free them
                self._wanted[execution] = wanted._replace(outcomes=[])

    def _shown_run(self, execution: Execution, wanted: Wanted) -> "ShownRun":
        from .run_storage import ShownRun

        began = min((each.began for each in wanted.outcomes), default=time.time())
        # Dagster would report a failed run without a duration as one that failed to start.
        ended = max([began + 0.001, *(each.at for each in wanted.outcomes)])
        return ShownRun(
            self._run(execution, wanted),
            began,
            ended if wanted.status in FINISHED_STATUSES else None,
            list(self._lines(execution, wanted, began)),
            _error(execution.jobid, wanted),
        )

    def _alert(self, wanted: Wanted, shown: "ShownRun") -> None:
        """Notify run failure sensors of a run with failed chunks, if the options say so."""
        is_failed = wanted.status == _STATUS.FAILURE
        is_failed = is_failed and any(each.status == FAILED for each in wanted.outcomes)
        if self.options.alerts and is_failed and not internals.flaws(internals.ALERTS):
            self.storage.alert(shown.run, time.time(), _counts(wanted.outcomes), shown.error)

    def _run(self, execution: Execution, wanted: Wanted) -> dg.DagsterRun:
        job, plan = self.storage.snapshots
        who = next((each.who for each in wanted.outcomes if each.who), "")
        worker = _WORKER.fullmatch(execution.name)
        kind = "process" if worker else execution.name.partition(":")[0]
        tags = {
            # Always the same value, since a list of runs is filtered by tag and value.
            OUTSIDE_TAG: "true",
            KIND_TAG: kind if kind in ("process", "items", EARLIER) else "transaction",
            "opendataflow/job": execution.jobid,
            EXECUTION_TAG: execution.name,
            # Dagster shows this tag as who launched the run.
            "user": f"{worker['user']}@{worker['host']}" if worker else who,
            # Automatic retries of Dagster would launch it again, and there is nothing to launch.
            "dagster/max_retries": "0",
        }
        if worker:
            tags |= {"opendataflow/host": worker["host"]}
        if wanted.run_id != self.run_id(execution):
            tags |= {BESIDE_TAG: self.run_id(execution)}
        return dg.DagsterRun(
            execution.jobid,
            wanted.run_id,
            status=wanted.status,
            tags={key: value for key, value in tags.items() if value},
            job_snapshot_id=job,
            execution_plan_snapshot_id=plan,
        )

    # --- what its page shows ---

    def _lines(
        self, execution: Execution, wanted: Wanted, began: float
    ) -> Iterable[tuple[float, int, str]]:
        found = wanted.outcomes
        who = next((each.who for each in found if each.who), "somebody")
        worker = _WORKER.fullmatch(execution.name)
        if worker:
            who = f"process {worker['pid']} of {worker['user']} on {worker['host']}"
        yield began, logging.INFO, f"{execution.jobid}: executed outside Dagster by {who}"
        others = [each for each in found if each.status not in (READY, PENDING)]
        for each in others[:TOLD_CHUNKS]:
            level = logging.INFO if each.status in (RUNNING, None) else logging.ERROR
            yield each.at, level, self._outcome_line(execution, each)
        last = max((each.at for each in found), default=began)
        if len(others) > TOLD_CHUNKS:
            more = f"{len(others) - TOLD_CHUNKS:,} more chunks that aren't READY"
            yield last, logging.WARNING, f"{more}: see `odf history {execution.jobid}`"
        yield last, logging.INFO, _counts(found)

    def _outcome_line(self, execution: Execution, outcome: ExecutionOutcome) -> str:
        word = outcome.status or "gone"
        line = f"{outcome.datasetid} {outcome.dataid}: {word}"
        if outcome.why:
            line += f", {outcome.why}"
        if outcome.who and not _WORKER.match(outcome.who):
            line += f" (by {outcome.who})"
        if outcome.status != FAILED or outcome.generation is None:
            return line
        steps = self.store.db.records(
            "steps.of_run",
            jobid=execution.jobid,
            dataid=outcome.dataid,
            generation=outcome.generation,
        )
        texts = [step[key] for step in steps for key in ("stdout", "traceback") if step[key]]
        return "\n".join([line, *"\n".join(texts).splitlines()[-TOLD_LINES:]])


def _end(found: list[ExecutionOutcome]) -> dg.DagsterRunStatus | None:
    """Return the status of a run whose chunks ended this way."""
    words = {each.status for each in found}
    # MANAGED: Dagster shows such a run as unfinished, but its run monitoring and its limits of
    # concurrent runs leave it alone. As STARTED it would take a slot from runs that Dagster
    # launches.
    if RUNNING in words:
        return _STATUS.MANAGED
    if words - {READY, PENDING, None}:
        return _STATUS.FAILURE
    if READY in words:
        return _STATUS.SUCCESS
    return _STATUS.CANCELED if any(each.acted for each in found) else None


def _counts(found: list[ExecutionOutcome]) -> str:
    """Count the chunks by status."""
    counts: dict[str, int] = {}
    for each in found:
        word = each.status or "gone"
        counts[word] = counts.get(word, 0) + 1
    by_status = ", ".join(f"{count:,} {word}" for word, count in sorted(counts.items()))
    return f"{len(found):,} chunk{'s' * (len(found) != 1)}: {by_status}"


def _is_dagsters(name: str) -> bool:
    return name.startswith(DAGSTER_RUN)


def _error(jobid: str, wanted: Wanted) -> str:
    """Describe the chunks that aren't READY, failed first, and what to do; "" for a success."""
    if wanted.status == _STATUS.SUCCESS:
        return ""
    bad = [each for each in wanted.outcomes if each.status not in (READY, PENDING, RUNNING)]
    bad.sort(key=lambda each: each.status != FAILED)
    lines = [_counts(wanted.outcomes)] + [
        f"{each.datasetid} {each.dataid}: {each.status or 'gone'}"
        + (f", {each.why}" if each.why else "")
        for each in bad[:TOLD_LINES]
    ]
    if failed := [each.dataid for each in bad if each.status == FAILED]:
        lines.append(f"To learn more: odf why {typed(jobid, failed[0])}")
        chunks = typed(*failed) if len(failed) <= NAMED_CHUNKS else "--failed"
        lines.append(f"To produce them again: odf resubmit {typed(jobid)} {chunks}")
    return "\n".join(lines)
