"""Jobs of flow.yml: each function makes one chunk, here a day; what it returns is published."""

import csv
import io
from pathlib import Path

from opendataflow_dagster import Chunk


def check(chunk: Chunk) -> bytes:
    """Leave out the lines without an amount; a day without any other is refused."""
    day = Path(chunk.inputs["sales"].location or "", f"{chunk.dataid}.csv")
    with day.open(encoding="utf-8") as file:
        sales = [row for row in csv.reader(file) if row[1]]
    if len(sales) < 2:
        raise ValueError(f"{day} has no line with an amount")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sales)
    return text.getvalue().encode()
