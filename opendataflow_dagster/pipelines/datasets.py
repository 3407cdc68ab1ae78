"""What a slug of a project stands for: a registered dataset and its place, if it is one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import Refused
from ..location import columns_of, is_relative
from ..store.store import Store
from ..util.text import typed

APPEND, REPLACE = "append", "replace"


class Row(NamedTuple):
    """The row of a registered dataset; its password stays encrypted until it is needed."""

    datasetid: str
    columns: Mapping[str, str | None]
    encrypted: str | None

    def told(self, column: str) -> str:
        """A column's value; nothing if there is none, or no such column yet."""
        return self.columns.get(column) or ""

    def password(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The password, decrypted now."""
        from ..config.credentials import password_of

        return password_of(self.datasetid, self.encrypted, environ)


def registered(store: Store, datasetid: str, root: Path) -> Row | None:
    """The row that a dataset is registered with; a relative place of it is in the folder `root`.

    So whoever runs a pipeline, from wherever, reads and writes the same files.
    """
    rows, _ = store.db.insist(lambda: store.db.records("state.dataset", datasetid=datasetid))
    if not rows:
        return None
    columns = columns_of(rows[0])
    encrypted = columns.pop("encryptedpass", None)
    for column in ("hostname", "database"):
        if place := columns.get(column):
            if is_relative(place):
                columns[column] = os.path.normpath(root / place)
            break
    return Row(datasetid, columns, encrypted)


def write_mode(row: Row | None) -> str:
    """`append` or `replace`, if the dataset's row says so; else nothing."""
    mode = row.told("writemode").lower() if row else ""
    if row and mode not in ("", APPEND, REPLACE):
        raise Refused(
            f"{row.datasetid!r} has the writemode {mode!r}: it is append or replace. "
            f"Run: odf dataset add {typed(row.datasetid)} --writemode append",
            code="INVALID_LOCATION",
        )
    return mode
