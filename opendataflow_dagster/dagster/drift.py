"""What the grid should show, and where the tables, Dagster's grid and the data disagree.

Dagster draws all partition keys of an asset. With a window, only the newest chunks of each domain
have a key, and all older ones that aren't READY. The events of the others stay: a chunk that is
resubmitted gets its key and its square back.

Partitions that the project defines itself stay unchanged: a chunk whose dataid isn't one of their
keys has no square.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import dagster as dg

from ..model import FAILED, PENDING, READY, RUNNING, natural_key
from ..storage.presence import Drift, drift_of_data, shown_word
from ..store.catalog import Catalog, read_catalog
from ..store.operations import unknown_dataset
from ..store.overview import EARLIER, Execution, Truth, holders, known, origins, truths, undone
from ..store.store import Store
from ..util.text import count_of, first_of, printable
from .outside import OutsideRuns
from .public_grid import PublicMirror, Square, is_ours
from .translator import DataflowTranslator, described, is_kept, partition_keys

REPAIR_COMMAND = "odf drift --repair"

PIECE_PARTITIONS = 1000
"""Partitions compared between two checks of the time."""

MAX_KEPT_CHUNKS = 1000
"""Chunks without a partition that are remembered per domain, so that each is reported once."""

MAX_NAMED_CHUNKS = 10
"""How many chunks a line names."""

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
    """Which chunks of a catalog's domains the grid shows."""

    def __init__(
        self, store: Store, mirror: PublicMirror, translator: DataflowTranslator, catalog: Catalog
    ) -> None:
        self.store, self.mirror, self.translator = store, mirror, translator
        self.names = catalog.names
        self.told: dict[str, list[str]] = {}
        """By domain: the chunks without a partition that were already reported."""
        self.notes: list[str] = []
        self.definitions: dict[str, dg.PartitionsDefinition] = {}
        self.domains: dict[str, str] = {}
        self.members: dict[str, list[str]] = {}
        by_name: dict[str, str] = {}
        for datasetid, domain in sorted(catalog.domains.items()):
            if domain not in self.definitions:
                self.definitions[domain] = translator.partitions_def(domain)
            if self.keeps_keys(domain):  # domains of one name share their partitions
                domain = by_name.setdefault(translator.partitions_name(domain), domain)
            self.domains[datasetid] = domain
            self.members.setdefault(domain, []).append(datasetid)

    # --- the partitions of a domain ---

    def keeps_keys(self, domain: str) -> bool:
        """Whether the keys of a domain are added and removed with its chunks."""
        return is_kept(self.translator, domain, self.definitions[domain])

    def name(self, domain: str) -> str | None:
        """Return the name of a domain's keys in Dagster; None: its definition has them."""
        definition = self.definitions[domain]
        return definition.name if isinstance(definition, dg.DynamicPartitionsDefinition) else None

    def layout(self) -> list[tuple[str, str]]:
        """The partitions that the project defines: if they change, everything is compared."""
        return [
            (domain, self.name(domain) or repr(self.definitions[domain]))
            for domain in sorted(self.members)
            if not self.keeps_keys(domain)
        ]

    def marks(self) -> dict[str, Any]:
        """Return marks that change when events vanish, or when partition keys change."""
        assets = [self.translator.asset_key(datasetid) for datasetid in self.domains]
        names = {domain: self.name(domain) for domain in self.members}
        marks = self.mirror.marks(assets, list(filter(None, names.values())))
        keys = marks["partitions"]
        marks["partitions"] = {
            domain: keys.get(name) if name else [self.definitions[domain].get_last_partition_key()]
            for domain, name in names.items()
        }
        return marks

    def existing(self, domain: str, keys: Collection[str]) -> set[str]:
        """Return the partition keys, of those given, that exist."""
        if name := self.name(domain):
            return self.mirror.existing(name, list(keys))
        return set(partition_keys(self.definitions[domain]).intersection(keys))

    def with_partition(self, domain: str, dataids: Iterable[str]) -> set[str]:
        """Return the chunks, of those given, that have a partition or get one."""
        if self.keeps_keys(domain):
            return set(dataids)
        return self._with_key(domain, dataids)

    def without_partition(self, domain: str, dataids: Iterable[str]) -> set[str]:
        """Return the chunks, of those given, that aren't among the project's partitions."""
        found = set(dataids)
        return found - self.with_partition(domain, found)

    def _line(self, domain: str, dataids: Collection[str]) -> str:
        """Return the line about such chunks for the sensor's page."""
        names = first_of(
            [printable(each) for each in sorted(dataids, key=_order)], MAX_NAMED_CHUNKS
        )
        return (
            f"{count_of(len(dataids), 'chunk')} of domain {printable(domain)} without a partition "
            f"in {described(self.definitions[domain])}: {', '.join(names)}. The grid leaves such "
            "chunks out, and `odf drift` lists them."
        )

    def shown(self, datasetid: str, dataids: set[str] | None = None) -> Collection[str] | None:
        """The chunks of a dataset, or of those given, that have a partition; None: all have."""
        domain, translator = self.domains[datasetid], self.translator
        if dataids is not None:
            return self.with_partition(domain, dataids)
        if self.keeps_keys(domain):
            if translator.window is None:
                return None
            return list(map(translator.dataid, self.mirror.keys(str(self.name(domain)))))
        there = {translator.partition_key(each): each for each in truths(self.store, datasetid)}
        drawn = self.mirror.shown(translator.asset_key(datasetid)).keys()
        keys = self.existing(domain, there.keys() | drawn)
        return [there[key] if key in there else translator.dataid(key) for key in keys]

    def outdated_lines(self, here: Mapping[dg.AssetKey, dg.PartitionsDefinition]) -> list[str]:
        """Return lines about assets of a code location whose partitions no longer get new keys."""
        datasets = {self.translator.asset_key(each): each for each in self.domains}
        was = {
            self.translator.partitions_name(name): self.domains[each]
            for each, name in self.names.items()
            if each in self.domains
        }
        kept = {self.name(domain) for domain in self.members if self.keeps_keys(domain)}
        found: dict[tuple[str, str], list[str]] = {}
        for key, definition in here.items():
            name = definition.name if isinstance(definition, dg.DynamicPartitionsDefinition) else ""
            domain = self.domains[datasets[key]] if key in datasets else was.get(name or "")
            if not name or domain is None or name == self.name(domain):
                continue
            if (name in was or name == self.translator.partitions_name(domain)) and (
                key in datasets or name not in kept
            ):
                found.setdefault((name, domain), []).append(key.to_user_string())
        return [
            f"{', '.join(first_of(sorted(assets), MAX_NAMED_CHUNKS))}: the partitions {name!r} get "
            f"no more keys. Those of domain {printable(domain)} are now "
            f"{described(self.definitions[domain])}: reload this code location, and use them for "
            "your own assets, too."
            for (name, domain), assets in found.items()
        ]

    def clear_others(self, domain: str) -> int:
        """Clear what is shown for keys that don't exist, as before the partitions changed.

        Dagster counts an event at half past two towards the hour, and a Tuesday's towards the week.
        """
        count = 0
        if self.name(domain) or not self.mirror.shows_runs:
            return count
        for datasetid in self.members[domain]:
            key = self.translator.asset_key(datasetid)
            shown = self.mirror.shown(key)
            others = shown.keys() - self.existing(domain, shown.keys())
            others = sorted(part for part in others if not shown[part].live)
            self.mirror.clear(key, others)
            count += len(others)
        return count

    # --- the window ---

    def _size(self, domain: str) -> int | None:
        return self.translator.window if self.keeps_keys(domain) else None

    def within(self, domain: str, dataids: set[str]) -> set[str]:
        """Return the chunks of a domain that the grid should show."""
        size = self._size(domain)
        if size is None or len(dataids) <= size:
            return self.with_partition(domain, dataids)
        newest = set(heapq.nlargest(size, dataids, key=_order))
        older = dataids - newest
        kept = older & self._with_key(domain, older) if self.mirror.has_open_backfills() else set()
        return newest | kept | undone(self.store, self.members[domain], older)

    def left_out(self, domain: str, dataids: Collection[str]) -> set[str]:
        """Return the chunks, of those given, that get no partition key."""
        size = self._size(domain)
        keys = self.mirror.last_keys(str(self.name(domain)), size) if size else []
        if not size or len(keys) < size:
            return set()
        first = _order(self.translator.dataid(keys[0]))
        older = {dataid for dataid in dataids if _order(dataid) < first}
        older -= self._with_key(domain, older)
        return older - undone(self.store, self.members[domain], older)

    def left_behind(self, domain: str) -> set[str]:
        """Return the partition keys that newer chunks have pushed out of the window."""
        size = self._size(domain)
        keys = self.mirror.keys(str(self.name(domain))) if size else []
        if not size or len(keys) <= size or self.mirror.has_open_backfills():
            return set()
        older = {self.translator.dataid(key) for key in keys[:-size]}
        older -= undone(self.store, self.members[domain], older)
        return {self.translator.partition_key(dataid) for dataid in older}

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

    # --- keys that are added and removed ---

    def give_keys(self, touched: dict[str, set[str]]) -> int:
        """Give each touched chunk of a domain a partition key, and remove keys without a chunk.

        Chunks outside the window are dropped from `touched`. Returns how many keys were changed.
        """
        changed, by_domain = 0, dict[str, set[str]]()
        for datasetid, dataids in touched.items():
            if datasetid in self.domains:
                by_domain.setdefault(self.domains[datasetid], set()).update(dataids)
        for domain, dataids in by_domain.items():
            there: set[str] = set()
            for some in in_pieces(sorted(dataids)):
                there |= known(self.store, self.members[domain], some)
            self._note(domain, self.without_partition(domain, there))
            if not self.keeps_keys(domain):
                continue
            outside = self.left_out(domain, there)
            self.forget(touched, domain, outside)
            keys = {self.translator.partition_key(dataid): dataid for dataid in dataids - outside}
            existing = self.existing(domain, keys)
            new = {key for key, dataid in keys.items() if dataid in there} - existing
            gone = {key for key, dataid in keys.items() if dataid not in there} & existing
            changed += self._change_keys(domain, new, gone)
            if new and self.translator.window is not None:
                changed += self._change_keys(domain, set(), self.left_behind(domain))
                self.bring_back(touched, domain, (keys[key] for key in new))
        return changed

    def give_all_keys(self, domain: str) -> int:
        """Do the same for all chunks of a domain whose keys follow its chunks."""
        there = self._chunks(domain)
        wanted = set(map(self.translator.partition_key, self.within(domain, there)))
        existing = set(self.mirror.keys(str(self.name(domain))))
        return self._change_keys(domain, wanted - existing, existing - wanted)

    def has_come(self, domain: str) -> bool:
        """Whether a chunk that had no partition has one now; the others are reported."""
        there, before = self._chunks(domain), set(self.told.get(domain, ()))
        without = self.without_partition(domain, there)
        self.told[domain] = sorted(before & without)
        self._note(domain, without)
        return len(before) >= MAX_KEPT_CHUNKS or bool((before & there) - without)

    def _note(self, domain: str, dataids: set[str]) -> None:
        """Report chunks without a partition, each once, and only the first of very many."""
        told = self.told.get(domain, [])
        if len(told) < MAX_KEPT_CHUNKS and (new := sorted(dataids.difference(told))):
            self.notes.append(self._line(domain, new))
            self.told[domain] = [*told, *new][:MAX_KEPT_CHUNKS]

    def _chunks(self, domain: str) -> set[str]:
        return set(chain(*(truths(self.store, each) for each in self.members[domain])))

    def _change_keys(self, domain: str, new: set[str], gone: set[str]) -> int:
        """Add keys in the natural order of chunks, and remove others; return how many."""
        name = str(self.name(domain))
        if gone:
            gone -= self._in_use(domain, gone)
        if not (new or gone):
            return 0
        tail: list[str] = []
        if new:
            first = min(map(self._order, new))
            tail = self._after(self.mirror.last_keys(name, PIECE_PARTITIONS), first)
            if len(tail) == PIECE_PARTITIONS:
                tail = self._after(self.mirror.keys(name), first)
        self.mirror.replace_keys(
            name,
            [*tail, *(gone - set(tail))],
            sorted({*tail, *new} - gone, key=self._order),
        )
        for datasetid in self.members[domain] if tail or gone else ():
            self.mirror.forget_cache(self.translator.asset_key(datasetid))
        return len(new) + len(gone)

    def _in_use(self, domain: str, keys: set[str]) -> set[str]:
        """Return the keys, of those to be removed, that a running run needs."""
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
        return {keys[key] for key in self.existing(domain, keys)}


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
    drawn = mirror.grid(key, window.definitions[domain])
    there = truths(window.store, datasetid)
    for part in sorted(window.existing(domain, stored.keys() | drawn.keys())):
        dataid = translator.dataid(part)
        state = stored[part].state if part in stored else ""
        if dataid not in known and drawn.get(part, "") != state:
            status = there.get(dataid, NO_ROW).status
            text = f"{shown_word(drawn.get(part, ''))}, by an outdated cache"
            yield Drift(datasetid, dataid, shown_word(status), text, "", REPAIR_COMMAND)


def _of_keys(window: GridWindow, domain: str) -> list[Drift]:
    """Return the partition keys that a domain lacks, and those without a chunk."""
    if not window.keeps_keys(domain):
        return list(_without_partition(window, domain))
    translator = window.translator
    there = {
        translator.partition_key(dataid): (dataid, datasetid, truth)
        for datasetid in window.members[domain]
        for dataid, truth in truths(window.store, datasetid).items()
    }
    within = window.within(domain, {dataid for dataid, _, _ in there.values()})
    existing = set(window.mirror.keys(str(window.name(domain))))
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


def _without_partition(window: GridWindow, domain: str) -> Iterator[Drift]:
    """Yield the chunks without a partition among those that the project defines."""
    what = f"no partition in {described(window.definitions[domain])}"
    for datasetid in window.members[domain]:
        there = truths(window.store, datasetid)
        for dataid in sorted(window.without_partition(domain, there), key=_order):
            yield Drift(datasetid, dataid, shown_word(there[dataid].status), what, "", "")


def _same(status: str, state: str) -> bool:
    return status == state or (state == FAILED and status not in (READY, RUNNING, PENDING))


def _order(dataid: str) -> tuple[str, str]:
    return natural_key(dataid), dataid


def in_pieces(items: list, size: int = PIECE_PARTITIONS) -> Iterable[list]:
    """Yield pieces of a list, small enough to check the time between two."""
    return (items[start : start + size] for start in range(0, len(items), size))
