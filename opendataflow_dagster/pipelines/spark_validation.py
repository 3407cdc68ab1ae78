"""Validating transformations of Spark's own frames: on a session of this process."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .compare import Difference, differences
from .convert import as_pandas
from .engine import Engine
from .project import Project
from .transformation import Transformation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Native:
    """A transformation of Spark's own frames, called like one of pandas' frames."""

    def __init__(self, project: Project, transformation: Transformation) -> None:
        self.project, self.of = project, transformation

    def __call__(self, frames: Sequence[Any], item: Any) -> tuple[Any, str]:
        """The frame, as one of pandas, that it makes of some, and what it printed."""
        with Engine(self.project, _session) as engine:
            ran = engine.run(self.of.pipeline, self.of.name, frames, item)
            return as_pandas(ran.frame), ran.printed

    def differences(self, expected: Any, got: Any) -> Iterator[Difference]:
        """What differs; rows may come in any order, as Spark promises none."""
        if next(differences(expected, got), None) is not None:
            yield from differences(_in_order(expected), _in_order(got))


def _session() -> "SparkSession":
    from ..spark.session import spark_session

    return spark_session(app="odf validate", short=True)


def _in_order(frame: Any) -> Any:
    """The rows in an order that depends on nothing but what is in them."""
    columns = sorted(frame.columns, key=str)
    keys = [[_key(cell) for cell in frame[column]] for column in columns]
    places = sorted(range(len(frame)), key=lambda place: [key[place] for key in keys])
    return frame.iloc[places]


def _key(cell: Any) -> str:
    import pandas

    if pandas.api.types.is_scalar(cell) and pandas.isna(cell):
        return ""
    if isinstance(cell, int | float):  # 1 and 1.0 are the same
        return f"{cell:.9g}"
    return str(cell)
