"""What a slug of a project stands for: a registered dataset and its place, if it is one."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import Refused
from ..location import Folder, Remote, Table, target_of
from ..place import is_relative, location, path_of
from ..store.store import Store
from ..util.text import typed

BIGQUERY = "bigquery"
APPEND, REPLACE = "append", "replace"

_SELECT = re.compile(r"(\s|\(|--[^\n]*\n|/\*.*?\*/)*(select|with)\b", re.IGNORECASE | re.DOTALL)


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


class CsvFile(NamedTuple):
    """One CSV file, as people keep them."""

    datasetid: str
    path: str
    options: str = ""


class BigTable(NamedTuple):
    """A table of BigQuery, or a SELECT; without a host, Google's own."""

    datasetid: str
    location: str
    host: str
    project: str
    dataset: str
    name: str


Target = CsvFile | BigTable | Folder | Remote | Table
"""A place; a Table whose `column` is empty isn't kept by chunks, and its `name` may be a SELECT."""


def registered(store: Store, datasetid: str, root: Path) -> Row | None:
    """The row that a dataset is registered with; a relative place of it is in the folder `root`.

    So whoever runs a pipeline, from wherever, reads and writes the same files.
    """
    rows, _ = store.db.insist(lambda: store.db.records("state.dataset", datasetid=datasetid))
    if not rows:
        return None
    columns = {name.lower(): value for name, value in rows[0].items()}
    encrypted = columns.pop("encryptedpass", None)
    first = next((each for each in ("hostname", "database") if columns.get(each)), "")
    if first and is_relative(str(columns[first])):
        columns[first] = os.path.normpath(root / str(columns[first]))
    texts = {name: None if each is None else str(each) for name, each in columns.items()}
    return Row(datasetid, texts, encrypted)


def target(row: Row) -> Target:
    """The place that a dataset is registered with."""
    kind, name = row.told("format").lower(), row.told("tablename")
    place = location(row.columns)
    if kind == BIGQUERY:
        return _big_table(row)
    if not name and kind in ("", "csv") and (path := path_of(place or "")):
        there = os.path.isfile(path) or path.lower().endswith(".csv")
        if there and not os.path.isdir(path):
            return CsvFile(row.datasetid, os.path.abspath(path), row.told("options"))
    if not name and kind in ("", "csv") and not path_of(place or "") and _is_bare_file(place):
        raise Refused(
            f"{row.datasetid!r} is registered at {place}, which is the name of a host and not a "
            f"path. Run: odf dataset add {typed(row.datasetid)} --hostname "
            f"{typed('/path/' + (place or ''))}",
            code="INVALID_LOCATION",
        )
    # What isn't kept by chunks has no column that tells them; the core knows only what has.
    shown = {"chunkcolumn": row.told("chunkcolumn") or "-"}
    if is_select(name):
        shown["tablename"] = "(SELECT)"
    found = target_of(row.datasetid, {**row.columns, **shown})
    if isinstance(found, Table):
        return found._replace(name=name, column=row.told("chunkcolumn"))
    return found


def _is_bare_file(place: str | None) -> bool:
    return place is not None and "://" not in place and place.lower().endswith(".csv")


def is_select(text: str) -> bool:
    """Whether a `tablename` is a query instead."""
    return _SELECT.match(text) is not None


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


def _big_table(row: Row) -> BigTable:
    project, dataset, name = (row.told(each) for each in ("database", "schemaname", "tablename"))
    needed = {"database": project, "tablename": name}
    if not is_select(name):
        needed["schemaname"] = dataset
    for column, value in needed.items():
        if not value:
            raise Refused(
                f"{row.datasetid!r} is in BigQuery, and registered without its "
                f"{_SAID[column]}. Run: odf dataset add {typed(row.datasetid)} --{column} NAME",
                code="INVALID_LOCATION",
            )
    host = row.told("hostname").rstrip("/")
    shown = ".".join(each for each in (project, dataset) if each)
    shown = f"{shown}.{'(SELECT)' if is_select(name) else name}"
    return BigTable(row.datasetid, f"{host or BIGQUERY}/{shown}", host, project, dataset, name)


_SAID = {"database": "project", "schemaname": "dataset", "tablename": "table"}
