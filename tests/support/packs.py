"""Packs that `odf compact --pack` of the version before wrote: `tests/frozen/packs/`.

`arrow` has 9 chunks as `tests/storage/test_compact.py` makes them, of which "10" is empty; the
others have two chunks that Spark wrote, with every type that it knows. `facts.json` has what the
tables knew of each chunk, the note of its directory, and for Spark its evidence and types before it
was packed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from opendataflow_dagster.model import Fact
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import take

FROZEN = Path(__file__).parent.parent / "frozen" / "packs"


def put_packed(store: Store, jobid: str, datasetid: str, root: Path, name: str) -> list[dict]:
    """Give a folder a frozen pack, and the tables the facts of its chunks, produced by a job."""
    (root / "_packs").mkdir(parents=True)
    for path in (FROZEN / name).glob("*.parquet"):
        shutil.copy(path, root / "_packs")
    chunks: list[dict[str, Any]] = json.loads((FROZEN / name / "facts.json").read_text())
    for chunk in chunks:
        chunk["location"] = f"{root}/_packs/{chunk['pack']}#{chunk['fragment']}"
        [claim] = take(store, jobid, only=chunk["dataid"])
        fact = Fact(datasetid, claim.dataid, chunk["location"], chunk["rows"], chunk["bytes"])
        store.finish(claim, [fact])
    return chunks
