"""What Parquet hasn't of a frame of Spark or pandas-on-Spark: its labels, and pandas' own types."""

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEVEL, COLUMN, KEY = "index {}", "column {}", "key {}"


class Labels(NamedTuple):
    """What `frame` needs to make of `rows` the frame that they are of."""

    columns: Any
    levels: list[Any] | None
    """The names of the levels of the index; None of a frame of Spark."""
    kinds: dict[str, Any]
    """The type of each level and column that Spark would take for another."""

    def frame(self, rows: "DataFrame") -> Any:
        """The frame that `labelled` was given."""
        if self.levels is None:
            return rows.toDF(*self.columns)
        import pandas

        index = [LEVEL.format(at) for at in range(len(self.levels))]
        # The index is set twice: as one, a level has the type of Spark's column for good.
        keys = {KEY.format(at): rows[level] for at, level in enumerate(index)}
        made: Any = rows.withColumns(keys).pandas_api(index_col=list(keys))
        for name, kind in self.kinds.items():
            if not isinstance(kind, pandas.CategoricalDtype):
                made[name] = made[name].astype(kind)
                continue
            codes = pandas.CategoricalDtype(range(len(kind.categories)), kind.ordered)
            made[name] = made[name].astype(codes).cat.rename_categories(kind.categories)
        made = made.set_index(index)
        made.columns, made.index.names = self.columns, self.levels
        return made


def labelled(frame: Any) -> tuple["DataFrame", Labels]:
    """The rows of a frame under names that any file can have, and what is left out of them.

    Of a category the rows have the code: its values may be of any type.
    """
    names = [COLUMN.format(at) for at in range(len(frame.columns))]
    if not type(frame).__module__.startswith("pyspark.pandas"):
        return frame.toDF(*names), Labels(frame.columns, None, {})
    import pandas

    plain, levels = frame.copy(), list(frame.index.names)
    plain.columns = names
    plain.index.names = [LEVEL.format(at) for at in range(len(levels))]
    plain = plain.reset_index()
    own = pandas.api.extensions.ExtensionDtype
    kinds = {name: kind for name, kind in plain.dtypes.items() if isinstance(kind, own)}
    with warnings.catch_warnings(action="ignore"):  # it advises against what is wanted here
        return plain.to_spark(), Labels(frame.columns, levels, kinds)
