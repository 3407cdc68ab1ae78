"""One frame as one chunk: staged with its evidence, and published for the claim in hand."""

from typing import TYPE_CHECKING, Any

from ..dataflow.chunk import Chunk, ChunkFailed, Place, Result
from ..dataflow.errors import DataflowError, StaleClaim
from ..dataflow.reading import with_code
from ..dataflow.store import Store, _stale
from ..dataflow.targets import DEFAULT_FORMAT
from .staging import stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def publish_frame(
    store: Store, place: Place, chunk: Chunk, df: "DataFrame", *, format: str = DEFAULT_FORMAT
) -> Result:
    """Publish a frame of Spark as the chunk of a dataset, as `publish` does other objects."""

    def confirm() -> None:
        if store.db.insist(lambda: store.heartbeat([chunk.claim]))[0]:
            raise _stale([chunk.claim])

    try:
        staged = stage(df.sparkSession, store, chunk, place, df, (), format)
        try:
            location, told = staged.show(confirm), staged.evidence
        finally:
            staged.discard()
    except StaleClaim:
        raise
    except DataflowError as error:
        raise ChunkFailed(with_code(error)) from error
    return Result(told.rows, staged.bytes, told.fingerprint, location, schema=told.schema)


def is_frame(obj: Any) -> bool:
    """Whether an object is a frame of Spark, which isn't imported to find out."""
    import sys

    module = sys.modules.get("pyspark.sql")
    return module is not None and isinstance(obj, module.DataFrame)
