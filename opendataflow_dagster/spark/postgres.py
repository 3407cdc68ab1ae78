"""Tables of PostgreSQL: a chunk of one as a DataFrame, and a DataFrame as a chunk of one."""

from .postgres_read import looking, read_rows
from .postgres_write import StagedRows, drop, leftovers

__all__ = ["StagedRows", "drop", "leftovers", "looking", "read_rows"]
