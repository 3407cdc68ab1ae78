"""One frame as one chunk: staged with its evidence, and published for the claim in hand."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk, ChunkFailed, Place, Result
from ..location import DEFAULT_FORMAT
from ..storage.read import failing
from ..store.store import Store
from .error_text import in_a_line
from .progress import Progress, interrupting, working_on
from .write import result_of, stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PROGRESS = 10.0
"""Seconds between two lines about a job of Spark that takes long."""


def publish_frame(
    store: Store,
    place: Place,
    chunk: Chunk,
    df: "DataFrame",
    *,
    format: str = DEFAULT_FORMAT,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Publish a frame of Spark as the chunk of a dataset, as `publish` does other objects.

    `say` is given how far a job is that takes long.
    """
    try:
        with failing():
            spark = df.sparkSession
            with working_on([chunk.claim]):
                with interrupting(spark), Progress(spark, say, every=PROGRESS):
                    staged = stage(spark, store, chunk, place, df, (), format)
                try:
                    return result_of(staged, staged.show(lambda: store.confirm(chunk.claim)))
                finally:
                    staged.discard()
    except Exception as error:
        if (reason := in_a_line(error)) is None:
            raise
        raise ChunkFailed(reason) from error


def is_frame(obj: Any) -> bool:
    """Whether an object is a frame of Spark, which isn't imported to find out."""
    import sys

    module = sys.modules.get("pyspark.sql")
    return module is not None and isinstance(obj, module.DataFrame)
