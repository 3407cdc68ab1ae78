"""What the tables tell of a CSV file that is appended to: its length, and whose its parts are."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..store.store import Store
from .csv_journal import Part

PAGE = 1000
"""Parts of an old journal that one transaction brings."""


class Committed(NamedTuple):
    """How long a file was with all that is committed, and the batch that was committed last."""

    length: int
    batch: str


class Ledger:
    """The rows of one journal, by its number; no row is ever changed without the journal's lock."""

    def __init__(self, store: Store) -> None:
        self._store, self._db = store, store.db

    @property
    def store(self) -> str:
        return self._store.id

    def committed(self, journal: str) -> Committed | None:
        """What was committed last, if anything was."""
        rows, _ = self._db.insist(lambda: self._db.run("appends.committed", journal=journal))
        return Committed(*rows[0]) if rows else None

    def parts(self, journal: str, dataids: Sequence[str]) -> dict[str, list[Part]]:
        """What was appended for some chunks; what is being replaced comes first."""
        asked = json.dumps(list(dataids))
        rows, _ = self._db.insist(
            lambda: self._db.run("appends.parts", journal=journal, dataids=asked)
        )
        found: dict[str, list[Part]] = {}
        for row in rows:
            found.setdefault(row[0], []).append(Part(*row))
        return found

    def expect(self, journal: str, jobid: str, parts: Iterable[Part]) -> None:
        """Tell of parts that are about to take the place of others; those are told, too."""
        told = json.dumps([part._asdict() for part in parts])
        self._db.insist(
            lambda: self._db.change("appends.add", journal=journal, jobid=jobid, parts=told)
        )

    def commit(
        self,
        journal: str,
        location: str,
        jobid: str,
        last: Committed,
        parts: Sequence[Part],
        replaced: Sequence[str] = (),
        moves: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Tell of parts that are on the disk, all in one transaction.

        `replaced` are the chunks that had others; `moves` tell, the last first, from where on all
        others lie by how many bytes further.
        """
        told = json.dumps([part._asdict() for part in parts])

        def work() -> None:
            known = {"journal": journal, "jobid": jobid}
            with self._db.transaction():
                if self._db.run("appends.is_last", journal=journal, batch=last.batch):
                    return  # the connection was lost after the commit
                for start, by in moves:
                    self._db.change("appends.shift", journal=journal, start=start, by=by)
                self._db.change("appends.add", parts=told, **known)
                if replaced:
                    self._db.change("appends.forget_older", parts=told, journal=journal)
                self._db.change(
                    "appends.commit", journal=journal, location=location, **last._asdict()
                )

        self._db.insist(work)

    def take_over(
        self, journal: str, location: str, jobid: str, length: int, parts: Iterable[Part]
    ) -> None:
        """Tell all that a journal of an earlier version told; it may be told again."""
        parts = list(parts)
        for at in range(0, len(parts), PAGE):
            self.expect(journal, jobid, parts[at : at + PAGE])
        self._db.insist(
            lambda: self._db.change(
                "appends.commit", journal=journal, location=location, length=length, batch=""
            )
        )
