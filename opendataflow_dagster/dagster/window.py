"""The window of a grid: the newest chunks of each domain, and all in which something is left to do.

Dagster draws all partition keys of an asset, so what is outside has none. It keeps its events: a
chunk that is resubmitted has a key again, and its square.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping

from ..model import natural_key
from ..store.catalog import Catalog
from ..store.overview import undone
from ..store.store import Store
from .public_grid import PublicMirror
from .translator import DataflowTranslator


class GridWindow:
    """Which chunks of the domains of a catalog the grid shows: all, without a window."""

    def __init__(
        self, store: Store, mirror: PublicMirror, translator: DataflowTranslator, catalog: Catalog
    ) -> None:
        self.store, self.mirror, self.translator = store, mirror, translator
        self.domains = catalog.domains
        self.members: dict[str, list[str]] = {}
        for datasetid, domain in sorted(catalog.domains.items()):
            self.members.setdefault(domain, []).append(datasetid)

    def within(self, domain: str, dataids: set[str]) -> set[str]:
        """Those of all chunks of a domain that are to be shown."""
        size = self.translator.window
        if size is None or len(dataids) <= size:
            return dataids
        newest = set(heapq.nlargest(size, dataids, key=_order))
        older = dataids - newest
        kept = older & self._with_key(domain, older) if self.mirror.has_open_backfills() else set()
        return newest | kept | undone(self.store, self.members[domain], older)

    def left_out(self, domain: str, dataids: Collection[str]) -> set[str]:
        """Those of some chunks that stay without a partition key."""
        size, name = self.translator.window, self.translator.partitions_name(domain)
        keys = self.mirror.last_keys(name, size) if size else []
        if not size or len(keys) < size:
            return set()
        first = _order(self.translator.dataid(keys[0]))
        older = {dataid for dataid in dataids if _order(dataid) < first}
        older -= self._with_key(domain, older)
        return older - undone(self.store, self.members[domain], older)

    def left_behind(self, domain: str) -> set[str]:
        """The partition keys that newer ones have pushed out."""
        size, name = self.translator.window, self.translator.partitions_name(domain)
        keys = self.mirror.keys(name) if size else []
        if not size or len(keys) <= size or self.mirror.has_open_backfills():
            return set()
        older = {self.translator.dataid(key) for key in keys[:-size]}
        older -= undone(self.store, self.members[domain], older)
        return {self.translator.partition_key(dataid) for dataid in older}

    def shown(self, datasetid: str) -> list[str] | None:
        """The chunks of a dataset that have a partition key; None: all have."""
        if self.translator.window is None:
            return None
        name = self.translator.partitions_name(self.domains[datasetid])
        return [self.translator.dataid(key) for key in self.mirror.keys(name)]

    def forget(self, touched: Mapping[str, set[str]], domain: str, dataids: Iterable[str]) -> None:
        """Take chunks that aren't shown off those that are to be compared."""
        for datasetid in self.members[domain]:
            if datasetid in touched:
                touched[datasetid].difference_update(dataids)

    def bring_back(self, touched: dict[str, set[str]], domain: str, dataids: Iterable[str]) -> None:
        """Add chunks to those to be compared, in all datasets: they may have been outside."""
        found = set(dataids)
        for datasetid in self.members[domain]:
            touched.setdefault(datasetid, set()).update(found)

    def _with_key(self, domain: str, dataids: Iterable[str]) -> set[str]:
        keys = {self.translator.partition_key(dataid): dataid for dataid in dataids}
        name = self.translator.partitions_name(domain)
        return {keys[key] for key in self.mirror.existing(name, list(keys))}


def _order(dataid: str) -> tuple[str, str]:
    return natural_key(dataid), dataid
