"""The formats of chunks' files: a class for each, and the list of all.

A new format is a module with a class, and a line in `FORMATS`.
"""

import os

from .format import DELTA, ICEBERG, ORC, Format, SparkFormat
from .parquet_format import PARQUET
from .text_formats import CSV, JSON

FORMATS: tuple[Format, ...] = (PARQUET, CSV, JSON, ORC, DELTA, ICEBERG)
"""Every format that a dataset can be registered with; messages list them in this order."""

FILE_FORMATS = tuple(format for format in FORMATS if not format.needs_spark)
"""Those that are written and read without Spark."""

_BY_NAME = {format.name: format for format in FORMATS}
_BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}


def format_of(name: str) -> Format:
    """The format of a name; one that isn't listed is Spark's, if its jars are configured."""
    return _BY_NAME.get(name) or SparkFormat(name)


def format_of_file(path: str, name: str) -> Format:
    """The format that a file's name ends with, or else the one of this name."""
    return _BY_SUFFIX.get(os.path.splitext(path)[1].lower()) or format_of(name)
