"""The jobs: each function produces one chunk, here a day, and returns the data to publish."""

import csv
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from opendataflow_dagster import Chunk


def check(chunk: Chunk) -> bytes:
    """Leave out the lines without an amount; refuse a day in which no line has one."""
    day = Path(chunk.inputs["sales"].location or "", f"{chunk.dataid}.csv")
    with day.open(encoding="utf-8") as file:
        sales = [row for row in csv.reader(file) if row[1]]
    if len(sales) < 2:
        raise ValueError(f"{day} has no line with an amount")
    return as_csv(sales)


def report(chunk: Chunk) -> bytes:
    """Add up what each shop has sold."""
    cents: Counter[str] = Counter()
    for part in Path(chunk.inputs["checked"].location or "").glob("*.csv"):
        with part.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                cents[row["shop"]] += int(row["cents"])
    return as_csv([("shop", "cents"), *sorted(cents.items())])


def as_csv(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
