"""Makes Dagster's grid agree with the tables: compare first, then write only the differences.

Every step can be interrupted and repeated: a tick that was killed is repeated, and one that finds
no difference writes nothing. Four sources say what to compare: the history of the tables, what
others wrote to Dagster's event log, marks that show when Dagster's events vanished, and (for a new
cursor, or after such a loss) everything.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, starmap
from typing import Any, NamedTuple

import dagster as dg

from ..errors import NoDatabase
from ..model import FAILED, READY
from ..store.catalog import Catalog, depths, read_catalog, record_names
from ..store.history import LostCursor, end_of_log, events_after
from ..store.item_folding import fold_marks
from ..store.overview import EARLIER, Execution, facts, origins
from ..store.store import Store
from . import internals
from .checks import recorded_evaluations
from .drift import GridWindow, WrongSquare, differences, in_pieces
from .outside import OutsideRuns
from .public_grid import PublicMirror, RunAndJob, is_ours
from .translator import DataflowTranslator
from .versions import Lineage, stale_evaluations

PAGE_CHANGES = 5000
"""Changes read at a time: such a page is always finished, whatever the time."""

MadeHere = Mapping[dg.AssetKey, str | None]
"""The code version of each asset that a code location produces, if it has one."""

CLEANING_SECONDS = 3600.0
"""Seconds between two removals of runs past their retention."""

PIECE_RUNS = 200
"""Runs written between two checks of the time."""


class Reconciled(NamedTuple):
    """What one pass wrote, and the cursor after it; `more` means that work is left."""

    cursor: str
    made: int = 0
    planned: int = 0
    cleared: int = 0
    keys: int = 0
    runs: int = 0
    more: bool = False
    chunks: Mapping[tuple[str, str], int] = {}
    """How many chunks were mirrored, by status and (unless READY) by job."""
    stuck: int = 0
    """Squares that are wrong, and that this Dagster can't correct."""
    notes: Sequence[str] = ()
    """Lines about chunks without a partition, each reported once."""
    standing: Sequence[str] = ()
    """Lines about what a person has to change."""

    @property
    def writes(self) -> int:
        return self.made + self.planned + self.cleared + self.keys + self.runs


@dataclass
class Cursor:
    """Where the last pass stopped; Dagster keeps it for the sensor, as JSON."""

    log: str | None = None
    events: int = 0
    layout: str = ""
    marks: dict[str, Any] = field(default_factory=dict)
    folds: dict[str, int] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    backfills: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    stale: dict[str, str] = field(default_factory=dict)
    open: list[list[str]] = field(default_factory=list)
    """Executions whose runs are unfinished."""
    cleaned: float = 0.0
    """When old runs were last removed, in seconds since 1970."""
    lost_runs: bool = True
    """Whether runs may be missing that no square uses."""
    without_partition: dict[str, list[str]] = field(default_factory=dict)
    """By domain: the chunks that aren't among the partitions that the project defines."""


def reconcile(
    store: Store,
    mirror: PublicMirror,
    translator: DataflowTranslator,
    cursor: str | None = None,
    *,
    seconds: float = 15.0,
    full: bool = False,
    wipe: bool = False,
    made_here: MadeHere | None = None,
    runs: OutsideRuns | None = None,
    partitions_here: Mapping[dg.AssetKey, dg.PartitionsDefinition] | None = None,
) -> Reconciled:
    """Make the grid agree with the tables, starting at a cursor; `full` compares everything.

    Args:
        wipe: Where squares can't be corrected one by one, wipe the asset, and show it again.
        made_here: The assets that the code location produces; None: not known.
        partitions_here: The partitions of its assets.
    """
    runs = runs or OutsideRuns(store, mirror)
    work = _Pass(store, mirror, translator, cursor, seconds, full, wipe, made_here, runs)
    return work.run(work.window.outdated_lines(partitions_here or {}))


def repair(
    store: Store, instance: dg.DagsterInstance, translator: DataflowTranslator | None = None
) -> Reconciled:
    """Compare everything and repair Dagster's side; the tables and the data stay unchanged."""
    translator, mirror = translator or DataflowTranslator(), open_mirror(instance)
    done = reconcile(store, mirror, translator, full=True, wipe=True)
    total = done
    while done.more:
        done = reconcile(store, mirror, translator, done.cursor, wipe=True)
        total = Reconciled(
            done.cursor,
            total.made + done.made,
            total.planned + done.planned,
            total.cleared + done.cleared,
            total.keys + done.keys,
            total.runs + done.runs,
        )
    for datasetid in read_catalog(store).domains:
        mirror.forget_cache(translator.asset_key(datasetid))
    return total


def open_mirror(instance: dg.DagsterInstance) -> PublicMirror:
    """The mirror of an instance: the full one, or the public API's if Dagster has changed."""
    if internals.flaws(internals.GRID):
        return PublicMirror(instance)
    from .grid import Mirror

    return Mirror(instance)


class _Pass:
    """The work of one tick."""

    def __init__(
        self,
        store: Store,
        mirror: PublicMirror,
        translator: DataflowTranslator,
        cursor: str | None,
        seconds: float,
        full: bool,
        wipe: bool,
        made_here: MadeHere | None,
        runs: OutsideRuns,
    ) -> None:
        self.store, self.mirror, self.translator = store, mirror, translator
        self.until = time.monotonic() + seconds
        self.catalog: Catalog = read_catalog(store)
        with suppress(NoDatabase, *store.db.failures):  # a read-only user skips this
            record_names(store, self.catalog)
        mirror.learn_partitions(translator, self.catalog.domains)
        self.lineage = Lineage(store, translator, mirror, self.catalog)
        self.made_here = made_here
        self.depths = depths(
            (source, output)
            for plan in self.catalog.jobs.values()
            for source in plan.reads
            for output in plan.outputs
        )
        self.datasets = {
            translator.asset_key(datasetid).to_string(): datasetid
            for datasetid in sorted(self.catalog.domains)
        }
        self.window = GridWindow(store, mirror, translator, self.catalog)
        self.domains, self.members = self.window.domains, self.window.members
        self.cursor = _read_cursor(cursor)
        self.window.told = self.cursor.without_partition
        self.full, self.wipe, self.runs = full, wipe, runs
        self.stuck = 0
        self.compared: set[str] = set()
        self.left: set[str] = set()
        self.made: set[str] = set()
        self.wrote = {"made": 0, "planned": 0, "cleared": 0, "keys": 0, "runs": 0}
        self.chunks = Counter[tuple[str, str]]()

    def run(self, outdated: Iterable[str]) -> Reconciled:
        # The marks are read before the work: whatever vanishes meanwhile shows in them next time.
        cursor, before = self.cursor, self.window.marks()
        # A page drawn while a cache was cleared may have restored the old cache.
        wrong = []
        if before["events"] > cursor.events:
            wrong = self.mirror.wrong_caches(cursor.events, self.datasets)
        for datasetid in {*cursor.caches, *wrong}:
            self.mirror.forget_cache(self.translator.asset_key(datasetid))
        cursor.caches = wrong
        self._find_whole(before)
        self._look_after_open()
        finished = self._follow() and self._verify() and self._restore_runs()
        self.runs.tell_failures_last()
        if self.made_here:
            self._tell_stale()
        if finished and time.time() > cursor.cleaned + CLEANING_SECONDS:
            self.runs.remove_old(self.until)
            cursor.cleaned = time.time()
        self.wrote["runs"] = self.runs.written
        # The writes changed the marks, too: with the old marks, the next tick would compare again.
        cursor.marks = self.window.marks() if any(self.wrote.values()) else before
        return Reconciled(
            json.dumps(asdict(cursor)),
            **self.wrote,
            more=not finished,
            chunks=self.chunks,
            stuck=self.stuck,
            notes=self.window.notes,
            standing=[*self.catalog.merge_lines(), *outdated],
        )

    def _find_whole(self, marks: dict[str, Any]) -> None:
        """Find what has to be compared completely, because no log says what changed in it."""
        cursor = self.cursor
        names = sorted(
            (key, self.catalog.domains[datasetid]) for key, datasetid in self.datasets.items()
        )
        names += self.window.layout()
        if not self.mirror.shows_runs:  # once they are shown again, everything has to be compared
            names.append(("", ""))
        layout = hashlib.sha256(repr(names).encode()).hexdigest()
        if self.full or cursor.log is None or cursor.layout != layout:
            if cursor.log is None:
                cursor.log, cursor.events = end_of_log(self.store), self.mirror.newest()
            self._doubt_all()
        elif self.runs.has_first():
            self._doubt_all()
        else:
            self._add_lost(marks)
        self._add_folded()
        before, now = cursor.marks.get("partitions", {}), marks["partitions"]
        changed = [domain for domain in self.members if before.get(domain) != now[domain]]
        cursor.domains = _without_repeats(cursor.domains, changed)
        cursor.layout = layout

    def _doubt_all(self) -> None:
        """Mark all datasets, runs and partition keys for comparison."""
        cursor = self.cursor
        cursor.datasets, cursor.domains = list(self.datasets.values()), list(self.members)
        cursor.lost_runs = True

    def _look_after_open(self) -> None:
        """Correct unfinished runs that somebody has canceled, and their squares."""
        cursor = self.cursor
        if not self.mirror.shows_runs:
            self.mirror.end_runs()
            return
        open_runs = {self.runs.run_id(each): each for each in starmap(Execution, cursor.open)}
        if not open_runs:
            return
        there = self.mirror.statuses(set(open_runs))
        wrong = [
            execution
            for run_id, execution in open_runs.items()
            if there.get(run_id) != dg.DagsterRunStatus.MANAGED
        ]
        self._show_runs(wrong)
        self._sync_chunks(self._planned_by(map(self.runs.run_id, wrong)))

    def _show_runs(self, executions: Iterable[Execution]) -> dict[str, set[str]]:
        """Write the runs of executions; return the chunks of ended ones that other runs showed."""
        if not self.mirror.shows_runs:
            return {}
        executions = list(executions)
        self.runs.show(executions)
        still = {Execution(*each) for each in self.cursor.open}
        over = []
        for execution in executions:
            if self.runs.wanted(execution).status == dg.DagsterRunStatus.MANAGED:
                still.add(execution)
            else:
                still.discard(execution)
                over.append(self.runs.run_id(execution, "so far"))
        self.cursor.open = [list(each) for each in sorted(still)]
        return self._planned_by(over)

    def _planned_by(self, run_ids: Iterable[str]) -> dict[str, set[str]]:
        """Return the chunks that runs planned, by dataset."""
        found: dict[str, set[str]] = {}
        for key, part in self.mirror.planned_by(*run_ids):
            self._add(found, {key: [part]})
        return found

    def _sync_chunks(self, touched: Mapping[str, set[str]]) -> None:
        for datasetid, dataids in touched.items():
            if datasetid in self.catalog.domains:
                self._sync(datasetid, dataids, {})

    def _restore_runs(self) -> bool:
        """Write missing runs, newest first; return whether there was time for all."""
        if not self.cursor.lost_runs:
            return True
        self.runs.remove_first()
        for some in in_pieces(self.runs.missing(), PIECE_RUNS):
            if self._is_late() or (self.runs.written and time.monotonic() > self.until):
                return False
            self._show_runs(some)
        self.cursor.lost_runs = False
        return True

    def _add_lost(self, marks: dict[str, Any]) -> None:
        """Add datasets whose events vanished from Dagster: wiped, or deleted with their runs."""
        cursor = self.cursor
        if marks["events"] < cursor.events:  # SQLite reuses the numbers of deleted events
            cursor.events = self.mirror.newest()
            self._doubt_all()
        elif marks["runs"] != cursor.marks["runs"] and self.mirror.runs_were_deleted(
            *cursor.marks["runs"]
        ):
            self._doubt_all()
        else:
            before, now = cursor.marks.get("assets", {}), marks["assets"]
            wiped = [
                datasetid
                for key, datasetid in self.datasets.items()
                if before.get(key) != now.get(key)
            ]
            cursor.datasets = _without_repeats(cursor.datasets, wiped)

    def _add_folded(self) -> None:
        """Add datasets whose items were folded since: folding deletes rows and logs no change."""
        cursor, folds = self.cursor, fold_marks(self.store)
        if cursor.layout:
            folded = [
                datasetid
                for datasetid, mark in folds.items()
                if mark != cursor.folds.get(datasetid) and datasetid in self.catalog.domains
            ]
            cursor.datasets = _without_repeats(cursor.datasets, folded)
            domains = [self.domains[datasetid] for datasetid in folded]
            cursor.domains = _without_repeats(cursor.domains, domains)
        cursor.folds = folds

    def _follow(self) -> bool:
        """Compare the changes since the last pass, page by page; return whether that is all."""
        while self._follow_page():
            if time.monotonic() > self.until:
                return False
        return True

    def _follow_page(self) -> bool:
        """Compare what one page of both logs names; return whether there are more pages."""
        cursor = self.cursor
        page = min(PAGE_CHANGES, 5 * self.mirror.batch)
        touched: dict[str, set[str]] = {}
        blamed: dict[tuple[str, str], str] = {}
        try:
            changes, log = events_after(self.store, cursor.log, page)
        except LostCursor:
            changes, log = [], end_of_log(self.store)
            self._doubt_all()
        executions: dict[Execution, None] = {}
        for change in changes:
            if change.locktype == "OUT":
                touched.setdefault(change.datasetid, set()).add(change.dataid)
                if change.jobid and change.execution:
                    executions[Execution(change.execution, change.jobid)] = None
                if change.status_after == FAILED and change.who:
                    blamed[change.datasetid, change.dataid] = change.who
        news = self.mirror.news(
            cursor.events, map(self.translator.asset_key, self.catalog.domains), page
        )
        self._add(touched, news.touched)
        for backfill_id in list(cursor.backfills):
            if not self.mirror.is_open(backfill_id):
                self._add(touched, self.mirror.planned_by_backfill(backfill_id))
                cursor.backfills.remove(backfill_id)
        self.runs.forget(executions)
        for datasetid, dataids in self._show_runs(executions).items():
            touched.setdefault(datasetid, set()).update(dataids)
        # Keys before squares: Dagster draws a square for each key, and none for an event without
        # one.
        self.wrote["keys"] += self.window.give_keys(touched)
        # Inputs before what is made from them: a materialization points to the events of its
        # inputs.
        for datasetid in self._from_above(touched):
            if datasetid in self.catalog.domains:
                self._sync(datasetid, touched[datasetid], blamed)
        self.runs.remove_so_far(executions, self.left)
        self.left.clear()
        # Only now: a pass that is killed before starts again at the old place, and finds what is
        # right.
        cursor.log, cursor.events = log, news.cursor
        return len(changes) == page or news.more

    def _verify(self) -> bool:
        """Compare completely what has to be; return whether that is finished."""
        cursor = self.cursor
        for domain in list(cursor.domains):
            if domain in self.members:
                self._sync_domain(domain)
            cursor.domains.remove(domain)
        for datasetid in self._from_above(cursor.datasets):
            if datasetid in self.catalog.domains and not self._sync(datasetid, None, {}):
                return False
            cursor.datasets.remove(datasetid)
        return True

    def _sync(
        self, datasetid: str, dataids: set[str] | None, blamed: Mapping[tuple[str, str], str]
    ) -> bool:
        """Correct the squares of a dataset (all: None); return whether there was time for all."""
        self.compared.add(datasetid)
        self.runs.forget(())
        key, whole = self.translator.asset_key(datasetid), dataids is None
        some = self.window.shown(datasetid, dataids)
        found = differences(
            self.store, self.mirror, self.translator, datasetid, some, blamed, self.runs
        )
        # Plans first: Dagster's cache may miss a materialization that a plan follows at once.
        if not (self._plan(key, found, whole) and self._make(datasetid, found, whole)):
            return False
        failed = {
            square.dataid: square.truth
            for square in found
            if square.repair == "plan" and square.truth.status == FAILED
            if square.execution and not self.runs.is_dagsters(square.execution)
        }
        if failed:
            self._tell_checks(datasetid, facts(self.store, datasetid, failed))
        stale = any(square.repair == "plan" and square.shown.state == FAILED for square in found)
        cleared = [square for square in found if square.repair == "clear"]
        if cleared and not self.mirror.shows_runs:
            return self._wipe(datasetid, cleared)
        for some in in_pieces(cleared):
            self.mirror.clear(
                key, [self.translator.partition_key(square.dataid) for square in some]
            )
            self.wrote["cleared"] += len(some)
        # Dagster's cache never drops a partition: it would keep showing runs that were deleted.
        if stale or whole:
            self.mirror.forget_cache(key)
        if stale or cleared or whole:
            self.cursor.caches.append(datasetid)
        for square in found:
            if square.repair == "wait" and square.run_id not in self.cursor.backfills:
                self.cursor.backfills.append(square.run_id)
        return True

    def _wipe(self, datasetid: str, wrong: list[WrongSquare]) -> bool:
        """Wipe a dataset's asset and show it again, if requested; else count the wrong squares."""
        if not self.wipe:
            self.stuck += len(wrong)
            return True
        # Dagster has no public way to take back one partition: all go, and those that are READY are
        # reported again.
        self.mirror.instance.wipe_assets([self.translator.asset_key(datasetid)])
        self.wrote["cleared"] += len(wrong)
        return self._sync(datasetid, None, {})

    def _make(self, datasetid: str, found: list[WrongSquare], whole: bool) -> bool:
        """Show READY chunks as materialized; return whether there was time for all."""
        wrong = [square for square in found if square.repair == "make"]
        for some in in_pieces(wrong, self.mirror.batch):
            if whole and self._is_late():
                return False
            chunks = {square.dataid: square.truth for square in some}
            key, here = self.translator.asset_key(datasetid), self.made_here
            by = self._runs_of(datasetid, some, whole)
            records = facts(self.store, datasetid, chunks)
            events = self.lineage.events(datasetid, chunks, (here or {}).get(key), records)
            self.mirror.make(events, by, observed=here is None or key not in here)
            self._tell_checks(datasetid, records)
            self.wrote["made"] += len(some)
            self.made.add(datasetid)
            self.chunks[READY, ""] += len(some)
        return True

    def _tell_checks(self, datasetid: str, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Show the results that the tables have of checks outside Dagster."""
        key = self.translator.asset_key(datasetid)
        for dataid, record in records.items():
            part = self.translator.partition_key(dataid)
            answers = recorded_evaluations(record.get("checks"), record.get("validated"), key, part)
            self.mirror.report_checks(answers)

    def _runs_of(
        self, datasetid: str, squares: list[WrongSquare], whole: bool
    ) -> dict[str, RunAndJob]:
        """Return, by partition, our run that shows a READY chunk; other chunks have none."""
        found = origins(self.store, datasetid, {each.dataid: each.truth for each in squares})
        by: dict[str, RunAndJob] = {}
        executions: dict[str, Execution] = {}
        for square in squares:
            origin = found.get(square.dataid)
            execution = origin.execution if origin and origin.execution.name != EARLIER else None
            if execution is None or (whole and execution not in self.runs.kept()):
                continue
            if not self.runs.is_dagsters(execution):
                run_id = self.runs.run_id(execution)
                executions[run_id] = execution
                by[self.translator.partition_key(square.dataid)] = run_id, execution.jobid
        self.runs.show_for(executions)
        return by

    def _plan(self, key: dg.AssetKey, found: list[WrongSquare], whole: bool) -> bool:
        """Show chunks as in progress or failed, by run; return whether there was time for all."""
        self.left |= {each.shown.run_id for each in found if is_ours(each.shown.run_id)}
        planned = [(each, each.execution) for each in found if each.repair == "plan"]
        planned = [(square, execution) for square, execution in planned if execution]
        for some in in_pieces(planned, self.mirror.batch):
            if whole and self._is_late():
                return False
            self.runs.show_for({square.run_id: execution for square, execution in some})
            by = {
                self.translator.partition_key(square.dataid): (square.run_id, execution.jobid)
                for square, execution in some
            }
            self.mirror.plan(key, by)
            self.wrote["planned"] += len(some)
            self.chunks.update((square.truth.status, each.jobid) for square, each in some)
        return True

    def _from_above(self, datasets: Iterable[str]) -> list[str]:
        """Sort datasets so that an input's event comes before the events that point to it."""
        return sorted(datasets, key=lambda datasetid: self.depths.get(datasetid, 0))

    def _tell_stale(self) -> None:
        """Report the checks of jobs here that read or write what was compared, if they changed."""
        here, told = self.made_here or {}, self.cursor.stale
        for jobid, plan in self.catalog.jobs.items():
            mine = [each for each in plan.outputs if self.lineage.flow(each)[0] == jobid]
            if not (plan.reads and any(self.translator.asset_key(each) in here for each in mine)):
                continue
            if jobid in told and self.compared.isdisjoint((*plan.reads, *plan.outputs)):
                continue
            found = list(stale_evaluations(self.store, jobid, self.translator))
            line = " ".join(each.description or "" for each in found)
            # Dagster calls a check of an asset that was materialized since "not evaluated".
            is_current = self.made.isdisjoint(mine) and all(map(self.mirror.is_evaluated, found))
            if told.get(jobid) != line or not is_current:
                self.mirror.report_checks(found)
                told[jobid] = line

    def _is_late(self) -> bool:
        """Whether the time is up; a pass without a write continues, to make progress."""
        return time.monotonic() > self.until and any(self.wrote.values())

    def _sync_domain(self, domain: str) -> None:
        """Compare all partition keys of a domain with its chunks."""
        if self.window.keeps_keys(domain):
            self.wrote["keys"] += self.window.give_all_keys(domain)
            return
        self.wrote["cleared"] += self.window.clear_others(domain)
        if self.window.has_come(domain):
            self.cursor.datasets = _without_repeats(self.cursor.datasets, self.members[domain])

    def _add(self, touched: dict[str, set[str]], found: Mapping[str, Iterable[str]]) -> None:
        """Add partitions, by asset key as stored in Dagster, to chunks by dataset."""
        for key, parts in found.items():
            if key in self.datasets:
                datasetid, parts = self.datasets[key], list(parts)
                if not self.window.keeps_keys(self.domains[datasetid]):
                    parts = self.window.existing(self.domains[datasetid], parts)
                touched.setdefault(datasetid, set()).update(map(self.translator.dataid, parts))


def _read_cursor(cursor: str | None) -> Cursor:
    """Return where a cursor points; an invalid one means the beginning."""
    try:
        return Cursor(**json.loads(cursor or "{}"))
    except (ValueError, TypeError):
        return Cursor()


def _without_repeats(*lists: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(chain(*lists)))
