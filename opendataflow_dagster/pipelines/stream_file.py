"""The rows of a CSV file as items that one run holds from the start."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import WrongUse
from ..formats.csv_options import UNDECLARED, read_pandas
from ..model import LEASE_SECONDS, RUNNING, Claim
from ..storage import files
from ..store.moves import Move, add_rows, generations
from ..store.store import Store
from ..util.text import first_line, printable

T = TypeVar("T")

PAGE = 1000
"""Rows that one statement writes."""


def read_items(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file as JSON would bring them: what is missing is None."""
    files.need("pandas")
    shown = printable(str(file))
    try:
        frame = read_pandas(str(file), UNDECLARED)
    except FileNotFoundError:
        raise WrongUse(f"There is no file {shown}. Name a CSV file with a row per item.") from None
    except (OSError, ValueError) as error:  # of pandas' own, and of Unicode, too
        raise WrongUse(f"{shown} can't be read as CSV: {first_line(error)}. Correct it.") from None
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            if isinstance(value, float) and math.isinf(value):
                raise WrongUse(f"{shown}: {name!r} of row {number} is infinite, which no item is.")
    return [{str(name): value for name, value in row.items()} for row in rows]


def claim_items(store: Store, jobid: str, payloads: Sequence[str], owner: str) -> list[Claim]:
    """Keep items as chunks of a job that this owner holds from the start: nobody else gets them."""
    db = store.db
    numbers, _ = db.insist(lambda: generations(store, len(payloads)))

    def work() -> list[Claim]:
        with db.transaction(who=owner, why="odf pipeline run --stream", act="claim"):
            [(lease, time_limit)] = db.run("forcing.dial", jobid=jobid, lease=LEASE_SECONDS)
            claims = [
                Claim(jobid, str(number), number, owner, 1, float(lease), time_limit)
                for number in numbers
            ]
            if db.run("items.is_accepted", jobid=jobid, dataid=claims[0].dataid):
                return claims  # the connection was lost after the commit
            store.refuse_unclaimable(now=True)
            outputs = store.read_plan(jobid).outputs
            for some, texts in zip(pages(claims), pages(payloads), strict=True):
                items = [
                    {"jobid": jobid, "dataid": claim.dataid, "payload": text, "idempotency": None}
                    for claim, text in zip(some, texts, strict=True)
                ]
                held = [{"dataid": each.dataid, "generation": each.generation} for each in some]
                rows = [
                    Move(jobid, output, each.dataid, None, RUNNING)
                    for each in some
                    for output in outputs
                ]
                db.change("items.add", items=json.dumps(items))
                db.change(
                    "pipelines.claim_items",
                    jobid=jobid,
                    owner=owner,
                    lease=float(lease),
                    rows=json.dumps(held),
                )
                add_rows(store, rows, {each.dataid: each.generation for each in some})
            return claims

    return db.insist(work)[0]


def pages(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many rows at a time as one statement writes."""
    return (rows[at : at + PAGE] for at in range(0, len(rows), PAGE))
