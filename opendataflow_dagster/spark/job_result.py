"""What a job's function returned, taken for its outputs or refused in a line."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..chunk import ChunkFailed
from ..model import Plan
from ..storage.pack import COLUMN
from ..util.text import printable
from .chunk_publish import is_frame
from .evidence import Observed
from .job import SparkJob
from .row_hash import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OTHERS = "odf_others"


def outputs_of(job: SparkJob, plan: Plan, returned: Any) -> dict[str, Any]:
    """What a function returned, by dataset: something for each, since the old chunk would stay."""
    outputs = plan.outputs
    if not isinstance(returned, Mapping):
        if returned is not None and len(outputs) > 1:
            raise ChunkFailed(
                f"{job.name} returned one {type(returned).__name__} for {len(outputs)} "
                f"datasets. Return a dict: {', '.join(map(repr, outputs))} → DataFrame."
            )
        returned = dict.fromkeys(outputs, returned)
    unknown = sorted(map(str, set(returned) - set(outputs)))
    if unknown:
        raise ChunkFailed(
            f"{job.name} returned {unknown[0]!r}, which job {plan.jobid!r} doesn't "
            f"write. Return a dict: {', '.join(map(repr, outputs))} → DataFrame."
        )
    if missing := [each for each in outputs if returned.get(each) is None]:
        raise ChunkFailed(
            f"{job.name} returned nothing for {', '.join(map(repr, missing))}. Return a DataFrame, "
            "or a Result(…) if it wrote the chunk itself."
        )
    for datasetid, df in returned.items():
        if is_frame(df):
            _check(job, datasetid, df)
    return dict(returned)


def _check(job: SparkJob, datasetid: str, df: "DataFrame") -> None:
    """Refuse a frame that has a name twice, or doesn't tell the chunks of a batch apart."""
    columns = df.columns
    is_exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    seen = Counter(columns if is_exact else [each.lower() for each in columns])
    if twice := [each for each in columns if seen[each if is_exact else each.lower()] > 1]:
        alike = [each for each in twice if each.lower() == twice[0].lower()]
        told = " and ".join(map(repr, dict.fromkeys(alike)))
        raise ChunkFailed(
            f"{job.name} returned several columns {told} for {datasetid!r}. Rename or drop all but "
            "one of them."
        )
    if job.batch > 1 and COLUMN not in columns:
        raise ChunkFailed(
            f"{job.name} has batch={job.batch}, and what it returned for "
            f"{datasetid!r} has no column {COLUMN!r}. Keep that column, or group by it."
        )


class Unmixed:
    """The rows that a job with a batch returned for one chunk alone, by the column that tells it.

    That is looked at in the pass that writes them.
    """

    def __init__(self, job: SparkJob, datasetid: str, dataid: str, df: "DataFrame") -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        self._job, self._datasetid, self._dataid, self._df = job, datasetid, dataid, df
        self._is_other = f"not (cast({quoted(COLUMN)} as string) <=> {literal(dataid)})"
        observation: Any = Observation()
        seen = df.observe(observation, F.expr(f"count_if({self._is_other}) as {_OTHERS}"))
        self._observed = Observed(seen, observation, "")
        self.frame = seen.drop(COLUMN)
        """The rows without that column, which is the chunk's directory."""

    def check(self) -> None:
        """Refuse rows of other chunks, once the rows are written."""
        count = self._observed.told().get(_OTHERS)
        if count is None:  # Spark did tasks again, and doesn't tell
            count = self._df.where(self._is_other).count()
        if count:
            raise ChunkFailed(
                f"{self._job.name} returned {count} rows for {self._datasetid!r} whose {COLUMN!r} "
                f"isn't that of the chunk, {printable(self._dataid)!r}. Keep that column as it is, "
                "or group by it."
            )
