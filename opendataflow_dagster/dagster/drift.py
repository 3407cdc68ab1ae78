"""Where the tables, Dagster's grid and the data disagree, and how that is put right."""

from collections.abc import Iterator, Mapping, Sequence

import dagster as dg

from ..model import FAILED, PENDING, READY, RUNNING, natural_key
from ..storage.presence import Drift, drift_of_data, shown_word
from ..store.catalog import Catalog, read_catalog
from ..store.operations import unknown_dataset
from ..store.overview import truths
from ..store.store import Store
from .differences import NO_ROW, differences
from .public_grid import PublicMirror, open_mirror
from .reconcile import Reconciled, reconcile
from .translator import DataflowTranslator
from .window import GridWindow

REPAIR_COMMAND = "odf drift --repair"


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

    What a Dagster run is still at work on isn't drift: it will tell itself how it ended. Of a
    dataset in `some`, only those chunks are compared. Without a `catalog` it is read.
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
            if not some.keys().isdisjoint(members):  # only all chunks tell which keys have none
                continue
            found += _of_keys(window, domain)
    return found


def repair(
    store: Store, instance: dg.DagsterInstance, translator: DataflowTranslator | None = None
) -> Reconciled:
    """Compare everything and put Dagster's side right; the tables and the data stay as they are."""
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


def _of_grid(window: GridWindow, datasetid: str, some: Sequence[str] | None) -> list[Drift]:
    """The squares of a dataset that aren't what the tables say, as stored or as the UI has them."""
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
    """The squares that are stored right, and that the UI draws otherwise."""
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
    """The partition keys of a domain that are missing, or that no chunk has."""
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
