"""Copies of one frame, many times: what copying costs is found out once."""

from copy import deepcopy
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any


class Master:
    """A frame of which copies are made that share nothing, not even the lists in its cells."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame
        kinds = [str(kind) for kind in frame.dtypes]
        self._deep = [
            at
            for at, kind in enumerate(kinds)
            if kind == "object" and not set(map(type, frame.iloc[:, at].array)) <= _plain()
        ]

    def copy(self) -> Any:
        import pandas

        made = self.frame.copy(deep=True)
        for at in self._deep:
            cells = [deepcopy(each) for each in made.iloc[:, at]]
            made.isetitem(at, pandas.Series(cells, index=made.index, dtype=object))
        return made


_known: set[type] = set()


def _plain() -> set[type]:
    """The types of cells that nobody can change."""
    if not _known:
        import pandas

        _known.update(
            (
                str,
                bytes,
                int,
                float,
                bool,
                complex,
                type(None),
                date,
                datetime,
                time,
                timedelta,
                Decimal,
                pandas.Timestamp,
                pandas.Timedelta,
                type(pandas.NaT),
                type(pandas.NA),
            )
        )
    return _known
