"""What the grid should show, and where the tables, Dagster's grid and the data disagree.

Dagster draws all partition keys of an asset. With a window, only the newest chunks of each domain
have one, and all in which something is left to do. The events of the others are kept: a chunk that
is resubmitted has a key again, and its square.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ..model import FAILED, PENDING, READY, RUNNING, natural_key
from ..storage.presence import Drift, drift_of_data, shown_word
from ..store.catalog import Catalog, read_catalog
from ..store.operations import unknown_dataset
from ..store.overview import EARLIER, Execution, Truth, holders, known, origins, truths, undone
from ..store.store import Store
from .outside import OutsideRuns
from .public_grid import PublicMirror, Square, is_ours
from .translator import DataflowTranslator

REPAIR_COMMAND = "odf drift --repair"

PIECE_PARTITIONS = 1000
"""Partitions compared between two checks of the time."""

NO_ROW = Truth(PENDING, "", None)
"""The truth about a chunk that the tables don't have."""


class WrongSquare(NamedTuple):
    """A partition whose square differs from the tables, and how to correct it."""

    datasetid: str
    dataid: str
    truth: Truth
    shown: Square
    repair: str  # "make", "plan", "clear" or "wait"
    run_id: str = ""
    execution: Execution | None = None


def differences(
    store: Store,
    mirror: PublicMirror,
    translator: DataflowTranslator,
    datasetid: str,
    dataids: Iterable[str] | None = None,
    blamed: Mapping[tuple[str, str], str] | None = None,
    runs: OutsideRuns | None = None,
) -> list[WrongSquare]:
    """Return the chunks of a dataset (or some of them) whose squares differ from the tables.

    `blamed` names the run that made a chunk FAILED: if Dagster shows the chunk as in progress in
    that same run, the run has finished with the chunk.
    """
    wanted = None if dataids is None else sorted(set(dataids))
    there, runs = truths(store, datasetid, wanted), runs or OutsideRuns(store, mirror)
    undone = {
        dataid: truth for dataid, truth in there.items() if truth.status not in (READY, PENDING)
    }
    found_origins = origins(store, datasetid, undone) if undone else {}
    parts = {translator.partition_key(dataid): dataid for dataid in wanted or there}
    shown = mirror.shown(translator.asset_key(datasetid), None if wanted is None else list(parts))
    found, waiting = [], {}
    for part in dict.fromkeys([*parts, *shown]):
        dataid = parts.get(part) or translator.dataid(part)
        truth, square = there.get(dataid, NO_ROW), shown.get(part, Square())
        blame = (blamed or {}).get((datasetid, dataid), "")
        run_id, execution = "", None
        if dataid in undone:
            origin = found_origins.get(dataid)
            execution = origin.execution if origin else Execution(EARLIER, truth.jobid)
            run_id = runs.of_chunk(execution, truth.status)
        repair = _repair(truth, square, blame, run_id)
        if (
            repair == "plan" and not mirror.shows_runs
        ):  # such a square can only be cleared, if at all
            is_over = square.state == READY and truth.status != RUNNING
            repair = "clear" if is_over else ""
        if repair == "clear" and square.state == FAILED and not is_ours(square.run_id):
            # An open backfill still counts this failure: if the square were cleared, it would think
            # that the partition never ran. The square is cleared when the backfill ends.
            if square.run_id not in waiting:
                waiting[square.run_id] = mirror.backfill_of(square.run_id)
            if waiting[square.run_id]:
                repair, run_id = "wait", waiting[square.run_id] or ""
        if repair:
            found.append(WrongSquare(datasetid, dataid, truth, square, repair, run_id, execution))
    found.sort(key=lambda square: (natural_key(square.dataid), square.dataid))
    return _with_holders(store, mirror, found)


def _repair(truth: Truth, shown: Square, blame: str, run_id: str) -> str:
    """Return how to correct one square, which `run_id` should show; "" if it is right."""
    if shown.live:  # the run will report how it ended, unless it has finished with this chunk
        return "plan" if truth.status == FAILED and shown.run_id in blame else ""
    if truth.status == READY:
        same = shown.state == READY and shown.version == truth.version
        return "" if same else "make"
    if truth.status == PENDING:
        return "clear" if shown.state else ""
    state = RUNNING if truth.status == RUNNING else FAILED
    same = shown.state == state and (shown.run_id == run_id or not is_ours(shown.run_id))
    return "" if same else "plan"


def _with_holders(
    store: Store, mirror: PublicMirror, found: list[WrongSquare]
) -> list[WrongSquare]:
    """Name the Dagster run that holds a chunk, so that its square links to it."""
    running = {
        square.dataid: square.truth
        for square in found
        if square.repair == "plan" and square.truth.status == RUNNING
    }
    if not running:
        return found
    held = holders(store, running)
    live = mirror.unfinished(set(held.values()))
    return [
        square._replace(run_id=held[square.dataid])
        if square.dataid in running and held.get(square.dataid) in live
        else square
        for square in found
    ]


class GridWindow:
    """Which chunks of a catalog's domains the grid shows; without a window, all."""

    def __init__(
        self, store: Store, mirror: PublicMirror, translator: DataflowTranslator, catalog: Catalog
    ) -> None:
        self.store, self.mirror, self.translator = store, mirror, translator
        self.domains = catalog.domains
        self.members: dict[str, list[str]] = {}
        for datasetid, domain in sorted(catalog.domains.items()):
            self.members.setdefault(domain, []).append(datasetid)

    def within(self, domain: str, dataids: set[str]) -> set[str]:
        """Return the chunks of a domain that the grid should show."""
        size = self.translator.window
        if size is None or len(dataids) <= size:
            return dataids
        newest = set(heapq.nlargest(size, dataids, key=_order))
        older = dataids - newest
        kept = older & self._with_key(domain, older) if self.mirror.has_open_backfills() else set()
        return newest | kept | undone(self.store, self.members[domain], older)

    def left_out(self, domain: str, dataids: Collection[str]) -> set[str]:
        """Return the chunks, of those given, that get no partition key."""
        size, name = self.translator.window, self.translator.partitions_name(domain)
        keys = self.mirror.last_keys(name, size) if size else []
        if not size or len(keys) < size:
            return set()
        first = _order(self.translator.dataid(keys[0]))
        older = {dataid for dataid in dataids if _order(dataid) < first}
        older -= self._with_key(domain, older)
        return older - undone(self.store, self.members[domain], older)

    def left_behind(self, domain: str) -> set[str]:
        """Return the partition keys that newer chunks have pushed out of the window."""
        size, name = self.translator.window, self.translator.partitions_name(domain)
        keys = self.mirror.keys(name) if size else []
        if not size or len(keys) <= size or self.mirror.has_open_backfills():
            return set()
        older = {self.translator.dataid(key) for key in keys[:-size]}
        older -= undone(self.store, self.members[domain], older)
        return {self.translator.partition_key(dataid) for dataid in older}

    def shown(self, datasetid: str) -> list[str] | None:
        """Return the chunks of a dataset that have a partition key; None: all have."""
        if self.translator.window is None:
            return None
        name = self.translator.partitions_name(self.domains[datasetid])
        return [self.translator.dataid(key) for key in self.mirror.keys(name)]

    def forget(self, touched: Mapping[str, set[str]], domain: str, dataids: Iterable[str]) -> None:
        """Drop chunks that the grid doesn't show from those to compare."""
        for datasetid in self.members[domain]:
            if datasetid in touched:
                touched[datasetid].difference_update(dataids)

    def bring_back(self, touched: dict[str, set[str]], domain: str, dataids: Iterable[str]) -> None:
        """Add chunks to those to compare, in all datasets: they may have been out of the window."""
        found = set(dataids)
        for datasetid in self.members[domain]:
            touched.setdefault(datasetid, set()).update(found)

    def give_keys(self, touched: dict[str, set[str]]) -> int:
        """Give every touched chunk that a domain has a partition key, and take the others' away.

        What the window leaves out is touched no more. Returns how many keys were changed.
        """
        changed, by_domain = 0, dict[str, set[str]]()
        for datasetid, dataids in touched.items():
            if datasetid in self.domains:
                by_domain.setdefault(self.domains[datasetid], set()).update(dataids)
        for domain, dataids in by_domain.items():
            there: set[str] = set()
            for some in in_pieces(sorted(dataids)):
                there |= known(self.store, self.members[domain], some)
            outside = self.left_out(domain, there)
            self.forget(touched, domain, outside)
            keys = {self.translator.partition_key(dataid): dataid for dataid in dataids - outside}
            existing = self.mirror.existing(self.translator.partitions_name(domain), list(keys))
            new = {key for key, dataid in keys.items() if dataid in there} - existing
            gone = {key for key, dataid in keys.items() if dataid not in there} & existing
            changed += self._change_keys(domain, new, gone)
            if new and self.translator.window is not None:
                changed += self._change_keys(domain, set(), self.left_behind(domain))
                self.bring_back(touched, domain, (keys[key] for key in new))
        return changed

    def give_all_keys(self, domain: str) -> int:
        """The same for all chunks of a domain."""
        there = set(chain(*(truths(self.store, datasetid) for datasetid in self.members[domain])))
        wanted = set(map(self.translator.partition_key, self.within(domain, there)))
        existing = set(self.mirror.keys(self.translator.partitions_name(domain)))
        return self._change_keys(domain, wanted - existing, existing - wanted)

    def _change_keys(self, domain: str, new: set[str], gone: set[str]) -> int:
        """Add partition keys where they belong in the natural order of chunks, and drop others."""
        name = self.translator.partitions_name(domain)
        if gone:
            gone -= self._in_use(domain, gone)
        if not (new or gone):
            return 0
        # Dagster shows keys in the order in which they were added: those that come after the first
        # new one are added again behind it.
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
        return len(new) + len(gone)

    def _in_use(self, domain: str, keys: set[str]) -> set[str]:
        """Keys that aren't to be there, but that a run that is at work was launched for."""
        used: set[str] = set()
        for datasetid in self.members[domain]:
            shown = self.mirror.shown(self.translator.asset_key(datasetid), sorted(keys))
            used |= {part for part, square in shown.items() if square.live}
        return used

    def _after(self, keys: list[str], first: tuple[str, str]) -> list[str]:
        for position, key in enumerate(keys):
            if self._order(key) > first:
                return keys[position:]
        return []

    def _order(self, key: str) -> tuple[str, str]:
        return _order(self.translator.dataid(key))

    def _with_key(self, domain: str, dataids: Iterable[str]) -> set[str]:
        keys = {self.translator.partition_key(dataid): dataid for dataid in dataids}
        name = self.translator.partitions_name(domain)
        return {keys[key] for key in self.mirror.existing(name, list(keys))}


def drift(
    store: Store,
    mirror: PublicMirror,
    translator: DataflowTranslator | None = None,
    *,
    datasetid: str | None = None,
    some: Mapping[str, Sequence[str]] = {},
    catalog: Catalog | None = None,
) -> list[Drift]:
    """Compare the tables with Dagster's grid, and with the data on this machine.

    A chunk that a Dagster run is working on isn't drift: the run will report how it ended. `some`
    limits the comparison to some chunks of datasets. Without a `catalog`, it is read.
    """
    translator = translator or DataflowTranslator()
    catalog = catalog or read_catalog(store)
    if datasetid is not None and datasetid not in catalog.datasets:
        raise unknown_dataset(store, datasetid)
    mirror.learn_partitions(translator, catalog.domains)
    window = GridWindow(store, mirror, translator, catalog)
    found: list[Drift] = []
    for name in [datasetid] if datasetid is not None else list(catalog.domains):
        found += _of_grid(window, name, some.get(name))
        found += drift_of_data(store, catalog, name, some)
    if datasetid is None:
        for domain, members in sorted(window.members.items()):
            if not some.keys().isdisjoint(members):  # extra keys only show against all chunks
                continue
            found += _of_keys(window, domain)
    return found


def _of_grid(window: GridWindow, datasetid: str, some: Sequence[str] | None) -> list[Drift]:
    """Return the squares of a dataset that differ from the tables, as stored or as drawn."""
    compared = window.shown(datasetid)
    if some is not None:
        compared = some if compared is None else set(compared).intersection(some)
    wrong = differences(window.store, window.mirror, window.translator, datasetid, compared)
    found = []
    for square in wrong:
        status, state = square.truth.status, square.shown.state
        note = " of an earlier generation" if _same(status, state) else ""
        command = "" if square.repair == "wait" else REPAIR_COMMAND
        words = shown_word(status), shown_word(state) + note
        found.append(Drift(datasetid, square.dataid, *words, "", command))
    if some is None:
        known = {square.dataid for square in wrong}
        found += _outdated_cache(window, datasetid, known)
    return found


def _outdated_cache(window: GridWindow, datasetid: str, known: set[str]) -> Iterator[Drift]:
    """Yield the squares that are stored right, but drawn wrong by the UI."""
    mirror, translator, domain = window.mirror, window.translator, window.domains[datasetid]
    key = translator.asset_key(datasetid)
    stored = mirror.shown(key)
    drawn = mirror.grid(key, translator.partitions_def(domain))
    keys = set(mirror.keys(translator.partitions_name(domain)))
    there = truths(window.store, datasetid)
    for part in sorted(stored.keys() | drawn.keys()):
        dataid = translator.dataid(part)
        state = stored[part].state if part in stored else ""
        if part in keys and dataid not in known and drawn.get(part, "") != state:
            status = there.get(dataid, NO_ROW).status
            text = f"{shown_word(drawn.get(part, ''))}, by an outdated cache"
            yield Drift(datasetid, dataid, shown_word(status), text, "", REPAIR_COMMAND)


def _of_keys(window: GridWindow, domain: str) -> list[Drift]:
    """Return the partition keys that a domain lacks, and those without a chunk."""
    translator = window.translator
    there = {
        translator.partition_key(dataid): (dataid, datasetid, truth)
        for datasetid in window.members[domain]
        for dataid, truth in truths(window.store, datasetid).items()
    }
    within = window.within(domain, {dataid for dataid, _, _ in there.values()})
    existing = set(window.mirror.keys(translator.partitions_name(domain)))
    found = [
        Drift(datasetid, dataid, shown_word(truth.status), "no partition key", "", REPAIR_COMMAND)
        for key, (dataid, datasetid, truth) in there.items()
        if key not in existing and dataid in within
    ]
    found += [
        Drift(domain, translator.dataid(key), "no chunk", "a partition key", "", REPAIR_COMMAND)
        for key in existing - there.keys()
    ]
    return sorted(found, key=lambda row: (natural_key(row.dataid), row.dataid))


def _same(status: str, state: str) -> bool:
    return status == state or (state == FAILED and status not in (READY, RUNNING, PENDING))


def _order(dataid: str) -> tuple[str, str]:
    return natural_key(dataid), dataid


def in_pieces(items: list, size: int = PIECE_PARTITIONS) -> Iterable[list]:
    """Yield pieces of a list, small enough to check the time between two."""
    return (items[start : start + size] for start in range(0, len(items), size))
