"""The original's three tables as CSV files: `odf load` and `odf dump`."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import Refused, WrongUse
from ..model import DATASET_COLUMNS
from ..util.text import printable
from .catalog import keep_names
from .moves import person
from .store import Store

ROWS_PER_STATEMENT = 10_000
"""Rows of a statement."""


class TableFile(NamedTuple):
    """One of the tables: the columns of its file, and those that identify a row."""

    table: str
    columns: Sequence[str]
    key: Sequence[str]
    fixed: Sequence[str]
    """What may not differ between a row that is here and one of the same key."""
    needed: Sequence[str]

    def path(self, folder: str) -> str:
        return os.path.join(folder, f"{self.table}.csv")


DATASET = TableFile(
    "dataset",
    ("datasetid", *DATASET_COLUMNS),
    ("datasetid",),
    tuple(DATASET_COLUMNS),
    ("datasetid",),
)
JOB = TableFile(
    "job",
    ("jobid", "itemtype", "datasetid", "itemvalue", "modified"),
    ("jobid", "itemtype", "datasetid", "itemvalue"),
    (),
    ("jobid", "itemtype"),
)
STATUS = TableFile(
    "datastatus",
    ("datasetid", "jobid", "dataid", "locktype", "status", "modified"),
    ("datasetid", "jobid", "dataid"),
    ("locktype", "status"),
    ("datasetid", "jobid", "dataid", "locktype", "status"),
)
TABLES = (DATASET, JOB, STATUS)


def load(store: Store, folder: str) -> dict[str, int]:
    """Add the rows of dataset.csv, job.csv and datastatus.csv; how many were new, by table.

    All of them or none: a row that is here with other values is refused, the same one is left.
    """
    files = {
        table: list(_rows(table, folder)) for table in TABLES if os.path.isfile(table.path(folder))
    }
    if not files:
        named = ", ".join(f"{table.table}.csv" for table in TABLES)
        raise WrongUse(f"{folder!r} has none of {named}. Name the folder that they are in.")

    def work() -> dict[str, int]:
        with store.db.transaction(who=person(), why="odf load"):
            # Without unique keys, only the locks keep others from adding the same rows meanwhile.
            store.db.run("registry.lock_datasets")
            store.db.run("registry.lock_jobs")
            keep_names(store)
            return {table.table: _add(store, table, rows) for table, rows in files.items()}

    added = store.db.insist(work)[0]
    store._plans.clear()
    return added


def dump(store: Store, folder: str) -> dict[str, int]:
    """Write the three tables into a folder as they are now; how many rows, by table."""
    there = [table.path(folder) for table in TABLES if os.path.exists(table.path(folder))]
    if there:
        raise Refused(f"{there[0]} already exists. Name another folder.")
    with store.db.reading():
        found = {table: store.db.records(f"transfer.{table.table}") for table in TABLES}
    os.makedirs(folder, exist_ok=True)
    for table, rows in found.items():
        with open(table.path(folder), "x", encoding="utf-8", newline="") as file:
            os.chmod(file.fileno(), 0o600)
            file.write(",".join(table.columns) + "\n")
            for row in rows:
                file.write(",".join(_quoted(row[name]) for name in table.columns) + "\n")
    return {table.table: len(rows) for table, rows in found.items()}


def _quoted(value: Any) -> str:
    """A value as H2 reads it: nothing is NULL, and a text is in quotes."""
    return "" if value is None else '"' + str(value).replace('"', '""') + '"'


def _rows(table: TableFile, folder: str) -> Iterator[dict[str, str | None]]:
    path = table.path(folder)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = [name.strip().lower() for name in next(reader, [])]
            unknown = [name for name in names if name not in (*table.columns, "generation")]
            missing = [name for name in table.needed if name not in names]
            if unknown or missing:
                what = f"has no column {missing[0]}" if missing else f"has a column {unknown[0]!r}"
                raise WrongUse(
                    f"{path} {what}: its first line must name its columns, which are among: "
                    f"{', '.join(table.columns)}. Correct the file."
                )
            for values in reader:
                if values:
                    yield _row(table, names, values, f"{path}:{reader.line_num}")
        except (csv.Error, UnicodeDecodeError) as error:
            where = f"{path}:{reader.line_num}"
            raise WrongUse(f"{where} isn't CSV in UTF-8: {error}. Correct the file.") from None


def _row(
    table: TableFile, names: Sequence[str], values: Sequence[str], where: str
) -> dict[str, str | None]:
    if len(values) != len(names):
        raise WrongUse(f"{where} has {len(values)} values for {len(names)} columns. Correct it.")
    given = dict(zip(names, values, strict=True))
    row = {name: given.get(name) or None for name in table.columns}
    if lacking := [name for name in table.needed if row[name] is None]:
        raise WrongUse(f"{where} has no {lacking[0]}. Correct it.")
    if modified := row.get("modified"):
        try:
            row["modified"] = datetime.fromisoformat(modified).isoformat(" ", "milliseconds")
        except ValueError:
            raise WrongUse(
                f"{where} has the time {modified[:40]!r}, which isn't YYYY-MM-DD HH:MM:SS. "
                "Correct it."
            ) from None
    return row


def _add(store: Store, table: TableFile, rows: Sequence[Mapping[str, str | None]]) -> int:
    here = {_of(table.key, row): row for row in store.db.records(f"transfer.{table.table}")}
    new: dict[tuple, Mapping[str, str | None]] = {}
    for row in rows:
        key = _of(table.key, row)
        known = here.get(key) or new.get(key)
        if known is None:
            new[key] = row
        elif differing := [name for name in table.fixed if known[name] != row[name]]:
            raise Refused(
                printable(
                    f"{table.table} {' '.join(map(str, key))} has a different {differing[0]} here "
                    "than in the file. Nothing was loaded; change one of them first."
                )
            )
    listed = list(new.values())
    for at in range(0, len(listed), ROWS_PER_STATEMENT):
        store.db.run(
            f"transfer.add_{table.table}", rows=json.dumps(listed[at : at + ROWS_PER_STATEMENT])
        )
    return len(listed)


def _of(names: Sequence[str], row: Mapping[str, Any]) -> tuple:
    return tuple(row[name] for name in names)
