"""Bringing Dagster's grid into agreement with the tables: compare first, then write what differs.

Every step can be cut short and done again: a tick that was killed is repeated, and one that finds
agreement writes nothing. What to look at comes from four places: the history of the tables, what
others wrote to Dagster's event log, marks that tell when Dagster's events vanished, and (for a new
cursor, or after such a loss) everything there is.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..ids import natural_key
from ..model import FAILED, PENDING, READY, RUNNING
from ..store.catalog import Catalog, read_catalog
from ..store.history import LostCursor, end_of_log, events_after
from ..store.item_folding import fold_marks
from ..store.overview import Truth, facts, holders, known, truths
from ..store.store import Store
from .events import recorded_event
from .grid import Mirror, Square
from .translator import DataflowTranslator

PAGE_CHANGES = 5000
"""Changes that are taken in at once: a page is always finished, whatever the time."""

PIECE_PARTITIONS = 1000
"""Partitions that are written between two looks at the clock."""

NOTHING = Truth(PENDING, "", None)


class Reconciled(NamedTuple):
    """What one pass wrote, and the cursor after it; `more` is left to do."""

    cursor: str
    made: int = 0
    planned: int = 0
    cleared: int = 0
    keys: int = 0
    more: bool = False

    @property
    def writes(self) -> int:
        return self.made + self.planned + self.cleared + self.keys


class WrongSquare(NamedTuple):
    """A partition whose square isn't what the tables say, and how to put it right."""

    datasetid: str
    dataid: str
    truth: Truth
    shown: Square
    repair: str  # "make", "plan", "clear" or "wait"
    run_id: str = ""


@dataclass
class Cursor:
    """Where the last pass stopped."""

    log: str | None = None
    events: int = 0
    layout: str = ""
    marks: dict[str, Any] = field(default_factory=dict)
    folds: dict[str, int] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    backfills: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)


def reconcile(
    store: Store,
    mirror: Mirror,
    translator: DataflowTranslator,
    cursor: str | None = None,
    *,
    seconds: float = 15.0,
    full: bool = False,
) -> Reconciled:
    """Make the grid tell what the tables say, from a cursor on; `full` looks at everything."""
    return _Pass(store, mirror, translator, cursor, seconds, full).run()


class _Pass:
    """One tick's work."""

    def __init__(
        self,
        store: Store,
        mirror: Mirror,
        translator: DataflowTranslator,
        cursor: str | None,
        seconds: float,
        full: bool,
    ) -> None:
        self.store, self.mirror, self.translator = store, mirror, translator
        self.until = time.monotonic() + seconds
        self.catalog: Catalog = read_catalog(store)
        self.datasets = {
            translator.asset_key(each).to_string(): each for each in sorted(self.catalog.domains)
        }
        self.members: dict[str, list[str]] = {}
        for datasetid, domain in sorted(self.catalog.domains.items()):
            self.members.setdefault(domain, []).append(datasetid)
        self.place = _read_cursor(cursor)
        self.full = full
        self.wrote = {"made": 0, "planned": 0, "cleared": 0, "keys": 0}

    def run(self) -> Reconciled:
        place, before = self.place, self._marks()
        # A page that was being drawn when a cache was forgotten may have brought the old one back.
        for datasetid in place.caches:
            self.mirror.forget_cache(self.translator.asset_key(datasetid))
        place.caches = []
        self._look_out(before)
        finished = self._follow() and self._verify()
        place.marks = self._marks() if any(self.wrote.values()) else before
        return Reconciled(json.dumps(asdict(place)), **self.wrote, more=not finished)

    def _look_out(self, marks: dict[str, Any]) -> None:
        """Find out what has to be compared as a whole."""
        place = self.place
        names = sorted((key, self.catalog.domains[each]) for key, each in self.datasets.items())
        layout = hashlib.sha256(repr(names).encode()).hexdigest()
        if self.full or place.log is None or place.layout != layout:
            if place.log is None:
                place.log, place.events = end_of_log(self.store), self.mirror.newest()
            place.datasets, place.domains = list(self.datasets.values()), list(self.members)
        elif marks["events"] < place.events:  # SQLite gives the numbers of deleted events again
            place.events = self.mirror.newest()
            place.datasets = list(self.datasets.values())
        elif marks["runs"] != place.marks["runs"] and self.mirror.runs_were_deleted(
            *place.marks["runs"]
        ):
            place.datasets = list(self.datasets.values())
        else:
            was, now = place.marks.get("assets", {}), marks["assets"]
            lost = [each for key, each in self.datasets.items() if was.get(key) != now.get(key)]
            place.datasets = list(dict.fromkeys([*place.datasets, *lost]))
        was, now = place.marks.get("partitions", {}), marks["partitions"]
        # Items that were folded have left no trace in the log.
        folds = fold_marks(self.store)
        if place.layout:
            shrunk = [each for each in folds if folds[each] != place.folds.get(each)]
            shrunk = [each for each in shrunk if each in self.catalog.domains]
            place.datasets = list(dict.fromkeys([*place.datasets, *shrunk]))
            shrunk = [self.catalog.domains[each] for each in shrunk]
            place.domains = list(dict.fromkeys([*place.domains, *shrunk]))
        place.folds = folds
        changed = [
            domain
            for domain in self.members
            if was.get(self.translator.partitions_name(domain))
            != now.get(self.translator.partitions_name(domain))
        ]
        place.domains = list(dict.fromkeys([*place.domains, *changed]))
        place.layout = layout

    def _follow(self) -> bool:
        """Take in what has changed since the last pass, page by page; whether that is all of it."""
        place = self.place
        while True:
            touched: dict[str, set[str]] = {}
            blamed: dict[tuple[str, str], str] = {}
            try:
                changes, log = events_after(self.store, place.log, PAGE_CHANGES)
            except LostCursor:
                changes, log = [], end_of_log(self.store)
                place.datasets, place.domains = list(self.datasets.values()), list(self.members)
            for change in changes:
                if change.locktype == "OUT":
                    touched.setdefault(change.datasetid, set()).add(change.dataid)
                    if change.status_after == FAILED and change.who:
                        blamed[change.datasetid, change.dataid] = change.who
            news = self.mirror.news(
                place.events, map(self.translator.asset_key, self.catalog.domains), PAGE_CHANGES
            )
            self._add(touched, news.touched)
            for backfill_id in [each for each in place.backfills if not self.mirror.is_open(each)]:
                self._add(touched, self.mirror.planned_by_backfill(backfill_id))
                place.backfills.remove(backfill_id)
            self._sync_keys(touched)
            for datasetid, dataids in touched.items():
                if datasetid in self.catalog.domains:
                    self._sync(datasetid, dataids, blamed)
            place.log, place.events = log, news.cursor
            if len(changes) < PAGE_CHANGES and not news.more:
                return True
            if time.monotonic() > self.until:
                return False

    def _verify(self) -> bool:
        """Compare as a whole what has to be; whether that is finished."""
        place = self.place
        for domain in list(place.domains):
            self._sync_domain(domain)
            place.domains.remove(domain)
        for datasetid in list(place.datasets):
            if datasetid in self.catalog.domains and not self._sync(datasetid, None, {}):
                return False
            place.datasets.remove(datasetid)
        return True

    def _sync(
        self, datasetid: str, dataids: set[str] | None, blamed: Mapping[tuple[str, str], str]
    ) -> bool:
        """Make the squares of a dataset right (all: None); whether there was time for all."""
        found = differences(self.store, self.mirror, self.translator, datasetid, dataids, blamed)
        key = self.translator.asset_key(datasetid)
        made = [each for each in found if each.repair == "make"]
        for some in _pieces(made):
            if dataids is None and self._is_late():
                return False
            told = facts(self.store, datasetid, {each.dataid: each.truth for each in some})
            self.mirror.make(
                [
                    recorded_event(
                        datasetid, each.dataid, each.truth, told.get(each.dataid), self.translator
                    )
                    for each in some
                ]
            )
            self.wrote["made"] += len(some)
        plans: dict[tuple[str, str], list[str]] = {}
        for each in found:
            if each.repair == "plan":
                plans.setdefault((each.truth.status, each.run_id), []).append(
                    self.translator.partition_key(each.dataid)
                )
        for (word, run_id), parts in plans.items():
            for some in _pieces(parts):
                if dataids is None and self._is_late():
                    return False
                self.mirror.plan(key, some, word, run_id)
                self.wrote["planned"] += len(some)
        stale = any(each.repair == "plan" and each.shown.state == FAILED for each in found)
        cleared = [each for each in found if each.repair == "clear"]
        for some in _pieces(cleared):
            self.mirror.clear(key, [self.translator.partition_key(each.dataid) for each in some])
            self.wrote["cleared"] += len(some)
        if stale or dataids is None:  # the cache goes on showing runs that were deleted
            self.mirror.forget_cache(key)
        if stale or cleared or dataids is None:
            self.place.caches.append(datasetid)
        for each in found:
            if each.repair == "wait" and each.run_id not in self.place.backfills:
                self.place.backfills.append(each.run_id)
        return True

    def _is_late(self) -> bool:
        """Whether the time is up; a pass that wrote nothing yet goes on, else it'd get nowhere."""
        return time.monotonic() > self.until and any(self.wrote.values())

    def _sync_keys(self, touched: Mapping[str, Iterable[str]]) -> None:
        """Give every touched chunk that a domain has a partition key, and take the others' away."""
        by_domain: dict[str, set[str]] = {}
        for datasetid, dataids in touched.items():
            if datasetid in self.catalog.domains:
                by_domain.setdefault(self.catalog.domains[datasetid], set()).update(dataids)
        for domain, dataids in by_domain.items():
            name, there = self.translator.partitions_name(domain), set()
            for some in _pieces(sorted(dataids)):
                there |= known(self.store, self.members[domain], some)
            keys = {self.translator.partition_key(each): each for each in dataids}
            existing = self.mirror.existing(name, list(keys))
            self._change_keys(
                domain,
                {key for key, each in keys.items() if each in there} - existing,
                {key for key, each in keys.items() if each not in there} & existing,
            )

    def _sync_domain(self, domain: str) -> None:
        """The same for all chunks of a domain."""
        name, wanted = self.translator.partitions_name(domain), set()
        for datasetid in self.members[domain]:
            wanted |= {
                self.translator.partition_key(each) for each in truths(self.store, datasetid)
            }
        existing = set(self.mirror.keys(name))
        self._change_keys(domain, wanted - existing, existing - wanted)

    def _change_keys(self, domain: str, new: set[str], gone: set[str]) -> None:
        """Add partition keys where they belong in the natural order of chunks, and drop others."""
        name = self.translator.partitions_name(domain)
        if gone:
            gone -= self._in_use(domain, gone)
        if not (new or gone):
            return
        tail: list[str] = []
        if new:
            first = min(map(self._order, new))
            tail = self._after(self.mirror.last_keys(name, PIECE_PARTITIONS), first)
            if len(tail) == PIECE_PARTITIONS:
                tail = self._after(self.mirror.keys(name), first)
        self.mirror.replace_keys(
            name, [*tail, *(gone - set(tail))], sorted({*tail, *new} - gone, key=self._order)
        )
        for datasetid in self.members[domain] if tail or gone else ():
            self.mirror.forget_cache(self.translator.asset_key(datasetid))
        self.wrote["keys"] += len(new) + len(gone)

    def _in_use(self, domain: str, keys: set[str]) -> set[str]:
        """Keys of chunks that the tables don't know, but a run that is at work was launched for."""
        used: set[str] = set()
        for datasetid in self.members[domain]:
            shown = self.mirror.shown(self.translator.asset_key(datasetid), sorted(keys))
            used |= {part for part, each in shown.items() if each.live}
        return used

    def _after(self, keys: list[str], first: tuple[str, str]) -> list[str]:
        for place, key in enumerate(keys):
            if self._order(key) > first:
                return keys[place:]
        return []

    def _order(self, key: str) -> tuple[str, str]:
        dataid = self.translator.dataid(key)
        return natural_key(dataid), dataid

    def _add(self, touched: dict[str, set[str]], found: Mapping[str, Iterable[str]]) -> None:
        """Add partitions by asset key, as Dagster has them, to chunks by dataset."""
        for key, parts in found.items():
            if key in self.datasets:
                chunks = touched.setdefault(self.datasets[key], set())
                chunks.update(map(self.translator.dataid, parts))

    def _marks(self) -> dict[str, Any]:
        names = map(self.translator.partitions_name, self.members)
        keys = map(self.translator.asset_key, self.catalog.domains)
        return self.mirror.marks(keys, names)


def differences(
    store: Store,
    mirror: Mirror,
    translator: DataflowTranslator,
    datasetid: str,
    dataids: Iterable[str] | None = None,
    blamed: Mapping[tuple[str, str], str] | None = None,
) -> list[WrongSquare]:
    """The chunks of a dataset (or some of them) whose squares aren't what the tables say.

    `blamed` tells who made chunks FAILED: when that is the run that Dagster shows as in progress
    there, the run is through with the chunk.
    """
    asked = None if dataids is None else sorted(set(dataids))
    there = truths(store, datasetid, asked)
    parts = {translator.partition_key(each): each for each in asked or there}
    shown = mirror.shown(translator.asset_key(datasetid), None if asked is None else list(parts))
    found, waiting = [], {}
    for part in dict.fromkeys([*parts, *shown]):
        dataid = parts.get(part) or translator.dataid(part)
        truth, square = there.get(dataid, NOTHING), shown.get(part, Square())
        blame = (blamed or {}).get((datasetid, dataid), "")
        repair, run_id = _repair(truth, square, blame), ""
        if repair == "clear" and square.state == FAILED and square.run_id and not square.word:
            if square.run_id not in waiting:
                waiting[square.run_id] = mirror.backfill_of(square.run_id)
            if waiting[square.run_id]:
                repair, run_id = "wait", waiting[square.run_id]
        if repair:
            found.append(WrongSquare(datasetid, dataid, truth, square, repair, run_id or ""))
    found.sort(key=lambda each: (natural_key(each.dataid), each.dataid))
    return _with_holders(store, mirror, found)


def _repair(truth: Truth, shown: Square, blame: str) -> str:
    """What has to be done about one square, or nothing."""
    if shown.live:  # it will tell itself how it ended, unless it's through with this chunk already
        return "plan" if truth.status == FAILED and shown.run_id in blame else ""
    if truth.status == READY:
        same = shown.state == READY and shown.version == truth.version
        return "" if same else "make"
    if truth.status == RUNNING:
        return "" if shown.state == RUNNING else "plan"
    if truth.status == PENDING:
        return "clear" if shown.state else ""
    same = shown.state == FAILED and shown.word in (truth.status, "")
    return "" if same else "plan"


def _with_holders(store: Store, mirror: Mirror, found: list[WrongSquare]) -> list[WrongSquare]:
    """Name the Dagster run that holds a chunk, so that its square leads there."""
    running = {
        each.dataid: each.truth
        for each in found
        if each.repair == "plan" and each.truth.status == RUNNING
    }
    if not running:
        return found
    held = holders(store, running)
    live = mirror.unfinished(set(held.values()))
    return [
        each._replace(run_id=held[each.dataid])
        if each.dataid in running and held.get(each.dataid) in live
        else each
        for each in found
    ]


def _read_cursor(cursor: str | None) -> Cursor:
    """Where a cursor points; one that can't be read means the beginning."""
    try:
        return Cursor(**json.loads(cursor or "{}"))
    except (ValueError, TypeError):
        return Cursor()


def _pieces(items: list) -> Iterable[list]:
    return (
        items[start : start + PIECE_PARTITIONS] for start in range(0, len(items), PIECE_PARTITIONS)
    )
