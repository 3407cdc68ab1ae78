"""Which version the tables are of, and what a program of another version may do with them."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from ..errors import DataflowError, NoDatabase, Refused

BASELINE = 3
"""The last version that didn't number itself reliably: one migration brings all older ones here."""


class TooOld(Refused):
    """This program is too old to claim from these tables."""

    code = "TOO_OLD"


class Versions(NamedTuple):
    """What `dataflow_meta` says of the tables; of version 0 are the original's, and none."""

    version: int = 0
    oldest_client: int = 0
    triggers: int = 0
    """The version of the program whose `odf init` ran last."""

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str]]) -> Self:
        """From rows of `dataflow_meta`; before version 4 there was only the row `schema`."""
        numbers = {name: int(value) for name, value in rows if value.isdigit()}
        stamped = numbers.get("schema", 0)
        return cls(numbers.get("version", stamped), numbers.get("oldest_client", 0), stamped)

    def unusable(self, program: int, where: str) -> NoDatabase | None:
        """What forbids a program any use of the tables: they lack what its statements name."""
        if self.version >= program:
            return None
        if not self.version:
            return NoDatabase(no_tables(where))
        return NoDatabase(
            f"The tables in {where} are of version {self.version}, and this program needs "
            f"{program}: run `odf init`, which upgrades them and keeps every row."
        )

    def unclaimable(self, program: int, where: str) -> DataflowError | None:
        """What forbids a program to take new claims; those that it has it may renew and settle."""
        if program < self.oldest_client:
            return TooOld(
                f"This program is of version {program}, and the tables in {where} need at least "
                f"{self.oldest_client}: upgrade opendataflow-dagster on this host. Until then it "
                "settles what it has claimed, and claims nothing more."
            )
        if self.triggers != self.version:
            return NoDatabase(
                f"The tables in {where} are of version {self.version}, but since then the "
                f"`odf init` of version {self.triggers} has rewritten their triggers: "
                f"run {self.repair(program)}."
            )
        return None

    def repair(self, program: int) -> str:
        """Which `odf init` writes the triggers of this version again."""
        if program >= self.version:
            return "`odf init`"
        return f"`odf init` on a host whose program is of version {self.version} or newer"


def no_tables(where: str) -> str:
    return (
        f"The tables in {where} aren't there, or aren't upgraded yet. "
        "Run `odf init`: it creates or upgrades them, and keeps every row."
    )
