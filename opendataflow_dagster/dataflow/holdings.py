"""What lies where a dataset's chunks should be, compared with what the tables say is there."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from . import packs
from .catalog import Catalog
from .errors import WrongUse
from .model import PENDING, READY, RUNNING
from .names import typed
from .places import location, path_of
from .store import Store
from .truth import Truth, facts, is_larger, newest, truths

GONE, UNKNOWN, NO_FOLDER = "data is gone", "data of no known chunk", "folder is gone"

MANY, NEWEST = 100_000, 10_000
"""Rows above which a dataset is compared as a whole only if asked, and the chunks that are else."""

_COLUMN = re.compile(r"[^=/]+=(.*)", re.DOTALL)
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_PIECE = 1000


class Holding(NamedTuple):
    """One disagreement between a status and what lies on the disk."""

    dataid: str
    status: str
    found: str
    place: str


class Drift(NamedTuple):
    """One chunk that isn't the same everywhere. `run`: what puts it right."""

    datasetid: str
    dataid: str
    tables: str
    dagster: str
    data: str
    run: str


def newest_of_large(store: Store, datasetids: Iterable[str]) -> dict[str, list[str]]:
    """The large ones of some datasets, with the chunks that a quick look compares."""
    large = [each for each in datasetids if is_larger(store, each, MANY)]
    return {each: newest(store, each, NEWEST) for each in large}


def drift_of_data(
    store: Store, catalog: Catalog, datasetid: str | None = None,
    some: Mapping[str, Sequence[str]] = {},
) -> list[Drift]:  # fmt: skip
    """Compare the tables with the data on this machine, of one dataset or of all.

    Of a dataset in `some`, only those chunks.
    """
    if datasetid is not None and datasetid not in catalog.datasets:
        raise WrongUse(
            f"There is no dataset {datasetid!r}. `odf dataset list` tells what there is."
        )
    found: list[Drift] = []
    for each in [datasetid] if datasetid is not None else list(catalog.domains):
        for held in misplaced(store, each, catalog.datasets[each].columns, some.get(each)):
            jobid = next(iter(catalog.producers(each)), None)
            made = [jobid, held.dataid] if jobid and held.dataid else None
            again = f"odf resubmit {typed(*made)}" if made and held.found == GONE else ""
            status = shown_word(held.status)
            found.append(Drift(each, held.dataid, status, "", f"{held.found}: {held.place}", again))
    return found


def shown_word(status: str) -> str:
    """A status as it is told where tables, Dagster and data are compared."""
    return status if status not in ("", PENDING) else "missing"


def misplaced(
    store: Store,
    datasetid: str,
    columns: Mapping[str, str | None],
    dataids: Sequence[str] | None = None,
) -> list[Holding]:
    """The READY chunks of a dataset whose data isn't there, and data that no chunk stands for.

    Only where it can be told: a chunk's own recorded place, or a folder of this machine whose
    entries are named after chunks (`2026-11-18`, `2026-11-18.csv`, `day=2026-11-18`). Of some
    `dataids`, only their own places are looked at: a large folder isn't listed for a few chunks.
    """
    there = truths(store, datasetid, dataids)
    ready = {dataid: truth for dataid, truth in there.items() if truth.status == READY}
    root = location(columns)
    path = path_of(root) if root else None
    found: dict[str, Holding] = {}
    own = _own_places(store, datasetid, ready, root)
    for dataid, place in own.items():
        if not (packs.is_there(place) if packs.is_packed(place) else os.path.exists(place)):
            found[dataid] = Holding(dataid, READY, GONE, place)
    if path is not None and ready and not os.path.exists(path):
        return [Holding("", READY, NO_FOLDER, path)]
    if dataids is None and path is not None and os.path.isdir(path):
        for holding in _by_name(path, there, ready):
            if holding.dataid in own and holding.found == GONE:
                continue  # it has a place of its own, such as a pack, which was looked at
            found.setdefault(holding.dataid, holding)
    return sorted(found.values())


def _own_places(
    store: Store, datasetid: str, ready: Mapping[str, Truth], root: str | None
) -> dict[str, str]:
    """The paths on this machine that were recorded for single chunks."""
    places: dict[str, str] = {}
    names = list(ready)
    for start in range(0, len(names), _PIECE):
        some = {each: ready[each] for each in names[start : start + _PIECE]}
        for dataid, fact in facts(store, datasetid, some).items():
            recorded = fact["location"]
            path = path_of(recorded) if recorded and recorded != root else None
            if path is not None:
                places[dataid] = path
    return places


def _by_name(path: str, there: Mapping[str, Truth], ready: Mapping[str, Truth]) -> list[Holding]:
    """Compare with a folder's entries, if they are named after chunks."""
    entries = {
        dataid: entry.path
        for entry in os.scandir(path)
        if not entry.name.startswith(("_", "."))
        for dataid in names_of(entry.name)
    }
    if not entries.keys() & ready.keys():  # named otherwise: nothing can be told
        return []
    gone = [
        Holding(each, READY, GONE, os.path.join(path, each))
        for each in ready
        if each not in entries
    ]
    of_chunks = {entries[each] for each, truth in there.items() if each in entries}
    unknown = {
        entries[each]: Holding(each, PENDING, UNKNOWN, entries[each])
        for each in entries
        if entries[each] not in of_chunks
    }
    running = [each for each, truth in there.items() if truth.status == RUNNING]
    return [each for each in (*gone, *unknown.values()) if each.dataid not in running]


def names_of(entry: str) -> list[str]:
    """The chunks that a folder's entry may be named after; the likeliest last."""
    column = _COLUMN.fullmatch(entry)
    value = column[1] if column else entry
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), value)
    stems = [value]
    while "." in stems[-1].lstrip("."):
        stems.append(stems[-1].rpartition(".")[0])
    return list(dict.fromkeys([*stems, plain]))
