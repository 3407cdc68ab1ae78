"""Formats that Spark alone writes and reads: ORC, and the tables of Delta and Iceberg."""

from collections.abc import Mapping
from typing import Any

from ..errors import WrongUse
from .format import Format, LossyValue, types_within


class SparkFormat(Format):
    """A format that only Spark knows."""

    needs_spark = True

    def __init__(self, name: str, title: str = "") -> None:
        self.name, self.title = name, title or name


class Orc(SparkFormat):
    """ORC: no collations, no names with a backtick, and one second that it can't hold."""

    has_collations = False
    lossy = tuple(
        LossyValue(
            (kind,),
            wrong,
            "a time within the last second before 1970",
            "Round it by date_trunc('second', {})",
        )
        for kind, wrong in (
            ("timestamp", "unix_micros({}) between -999999 and -1"),
            (
                "timestamp_ntz",
                "{0} > timestamp_ntz'1969-12-31 23:59:59' and "
                "{0} < timestamp_ntz'1970-01-01 00:00:00'",
            ),
        )
    )

    def count(self, path: str) -> int:
        from pyarrow import orc

        return orc.ORCFile(path).nrows

    def refuse_schema(self, schema: Mapping[str, Any]) -> None:
        for kind in types_within(schema):
            fields = kind.get("fields", ()) if isinstance(kind, Mapping) else ()
            if odd := next((field["name"] for field in fields if "`" in field["name"]), None):
                raise WrongUse(
                    f"A column is called {odd!r}, and in ORC Spark finds no values of a name with "
                    "a backtick. Rename it, or register the dataset with --format parquet."
                )


class Lake(SparkFormat):
    """A table of files that keeps its own versions; its jars come from elsewhere."""

    is_lake = True


ORC = Orc("orc", "ORC")
DELTA = Lake("delta", "Delta")
ICEBERG = Lake("iceberg", "Iceberg")
