"""What each chunk of a dataset is, whoever made it: what other views of it are compared with."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..model import STRENGTH, read_status
from .store import Store

PAGE = 1000
"""Chunks that are looked at together where all of a dataset are."""


class Truth(NamedTuple):
    """The status of one chunk of a dataset, and which job and generation it comes from."""

    status: str
    jobid: str
    generation: int | None

    @property
    def version(self) -> str:
        """What tells one production of a chunk from another; hand-made rows have no generation."""
        return str(self.generation or 0)


def truths(store: Store, datasetid: str, dataids: Iterable[str] | None = None) -> dict[str, Truth]:
    """Every chunk of a dataset, or those of some that it has; by dataid."""
    if dataids is None:
        rows = store.db.run("truth.all", datasetid=datasetid)
    else:
        rows = store.db.run("truth.some", datasetid=datasetid, dataids=json.dumps(list(dataids)))
    found: dict[str, Truth] = {}
    for dataid, jobid, word, generation in rows:
        truth = Truth(read_status(word or "?"), jobid, generation)
        other = found.get(dataid)
        if other is None or _rank(truth) > _rank(other):
            found[dataid] = truth
    return found


def pages(store: Store, datasetid: str) -> Iterator[list[str]]:
    """All chunks of a dataset, some at a time, so that memory doesn't grow with them."""
    after = ""

    def page() -> list[str]:
        rows = store.db.run("truth.page", datasetid=datasetid, after=after, most=PAGE)
        return [dataid for (dataid,) in rows]

    while dataids := store.db.insist(page)[0]:
        yield dataids
        after = dataids[-1]


def newest(store: Store, datasetid: str, limit: int) -> list[str]:
    """The chunks of a dataset that changed last."""
    rows = store.db.run("truth.newest", datasetid=datasetid, limit=limit)
    return list(dict.fromkeys(dataid for (dataid,) in rows))


def is_larger(store: Store, datasetid: str, rows: int) -> bool:
    """Whether a dataset has more rows than that."""
    [(count,)] = store.db.run("truth.size", datasetid=datasetid, most=rows + 1)
    return count > rows


def known(store: Store, datasetids: Iterable[str], dataids: Iterable[str]) -> set[str]:
    """Which of some chunks any of some datasets has a row for."""
    rows = store.db.run(
        "truth.known", datasetids=json.dumps(list(datasetids)), dataids=json.dumps(list(dataids))
    )
    return {dataid for (dataid,) in rows}


def facts(store: Store, datasetid: str, chunks: Mapping[str, Truth]) -> dict[str, dict[str, Any]]:
    """What was recorded when those chunks were made; by dataid."""
    asked = [{"dataid": each, "generation": truth.generation} for each, truth in chunks.items()]
    rows = store.db.records("truth.facts", datasetid=datasetid, chunks=json.dumps(asked))
    return {row.pop("dataid"): row for row in rows}


def holders(store: Store, chunks: Mapping[str, Truth]) -> dict[str, str]:
    """The run that holds each of those chunks, where its claim names one; by dataid."""
    asked = [{"dataid": each, "jobid": truth.jobid} for each, truth in chunks.items()]
    rows = store.db.run("truth.holders", chunks=json.dumps(asked))
    return {dataid: runid for dataid, _, runid in rows}


def _rank(truth: Truth) -> tuple[int, int]:
    return STRENGTH.index(truth.status), truth.generation or 0
