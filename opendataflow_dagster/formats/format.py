"""What each format says of itself, what formats share, and the formats that Spark alone knows."""

import os
from collections.abc import Iterator, Mapping, Sequence
from errno import ENOENT
from itertools import count
from typing import Any, BinaryIO, ClassVar, NamedTuple

from ..errors import WrongUse
from .csv_options import CsvOptions

TIME_PATTERN = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
"""How Spark writes a time as a text; by default, it stops at milliseconds, and zones at minutes."""


class Unfit(Exception):
    """The files can't be rewritten exactly as they are; the message says why."""


class LossyValue(NamedTuple):
    """Values of some types that come back as others; `{}` stands for the value, or the column."""

    kinds: tuple[str, ...]
    wrong: str
    what: str
    cure: str


TEXTS = ("string", "char", "varchar")
"""What Spark calls the types of texts."""

NOT_UTF8 = LossyValue(
    TEXTS,
    "not is_valid_utf8({})",
    "a text that isn't UTF-8",
    "Return it as binary by base64({}), decode it as what it is",
)


class Format:
    """A format of chunks' files: written, read, counted and merged without Spark.

    Schemas are those of Spark, as JSON has them. No method imports PySpark: what Spark has to know
    is said in attributes, and `spark/` asks for them.
    """

    name: str
    """What a dataset is registered with, and what Spark calls it."""

    title: str
    """Its name for people."""

    suffixes: tuple[str, ...] = ()
    """How its files' names end; the first one is that of new files."""

    needs_spark: bool = False
    """Whether only Spark writes and reads it."""

    in_spark: bool = True
    """Whether Spark writes and reads it."""

    is_text: bool = False
    """Whether its files are text: without types, and counted only by reading them whole."""

    is_delimited: bool = False
    """Whether a row is a line of values between delimiters, as in CSV.

    Then a value can have several lines, a row of one column without a value is an empty line, and a
    dataset's `options` declare how others write it.
    """

    is_lake: bool = False
    """Whether a dataset is one table that keeps its own versions, and not a folder of chunks."""

    can_merge: bool = False
    """Whether many files of a chunk can become few: `odf compact`."""

    has_collations: bool = True
    """Whether Spark can write a text that has a collation."""

    spark_reading: Mapping[str, str] = {}
    """The options of Spark's reader."""

    spark_writing: Mapping[str, str] = {}
    """The options of Spark's writer."""

    lossy: ClassVar[tuple[LossyValue, ...]] = ()
    """Values that would come back as others, which Spark's jobs are refused."""

    @property
    def suffix(self) -> str:
        return self.suffixes[0] if self.suffixes else f".{self.name}"

    # --- frames and Arrow tables ---

    def prepared(self, frame: Any) -> tuple[Any, dict[str, str]]:
        """A frame of pandas as it can be written, and column → dtype that it comes back with."""
        return frame, {
            name: str(dtype) for name, dtype in zip(frame.columns, frame.dtypes, strict=True)
        }

    def headed(self, frame: Any) -> Any:
        """A frame of pandas with the names that its columns have once they are read."""
        return frame

    def write(self, table: Any, path: str) -> None:
        """Write an Arrow table as one file; `WrongUse` for what the format can't hold."""
        raise NotImplementedError

    def read_frame(self, path: str, columns: Mapping[str, str], options: CsvOptions) -> Any:
        """The frame of pandas that one file is.

        Args:
            path: The file.
            columns: Column → dtype, of a file that `write` has written.
            options: How others write it, where that is declared.
        """
        raise NotImplementedError

    def read_table(self, path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
        """The Arrow table that one file is that Spark wrote: of its `schema`, `wanted` in Arrow."""
        raise NotImplementedError

    def dtypes(self, paths: Sequence[str], columns: Mapping[str, str]) -> Mapping[str, str]:
        """The columns of a written frame, with dtypes that only its files know."""
        return columns

    # --- files ---

    def count(self, path: str) -> int | None:
        """How many rows one file has, by the file alone; None: only Spark can tell."""
        return None

    def merge(self, paths: Sequence[str], folder: str, target: int) -> None:
        """Write the rows of files into an empty folder, in files of about the target's bytes.

        The same rows in the same order, of the same types; what can't be kept so is `Unfit`.
        """
        raise NotImplementedError

    # --- Spark ---

    def refuse_schema(self, schema: Mapping[str, Any]) -> None:
        """Refuse a Spark frame whose values would change when they are read back."""


class TextFormat(Format):
    """A format whose rows are lines."""

    is_text = True
    can_merge = True

    def heading(self, path: str) -> bytes:
        """What a file begins with before its rows."""
        return b""

    def merge(self, paths: Sequence[str], folder: str, target: int) -> None:
        """Append files to each other; all must begin with the same heading."""
        odd = [path for path in paths if not path.endswith(self.suffixes)]
        if odd:
            raise Unfit(f"{os.path.basename(odd[0])} isn't plain text")
        head = self.heading(paths[0])
        out: BinaryIO | None = None
        written = count()
        try:
            for path in paths:
                if os.path.getsize(path) == 0:
                    continue
                with open(path, "rb") as source:
                    if source.read(len(head)) != head:
                        raise Unfit("its files have different columns")
                    if out is None or out.tell() >= target:
                        if out is not None:
                            out.close()
                        path = new_file(folder, self.suffix, next(written))
                        out = open(path, "wb")  # noqa: SIM115
                        out.write(head)
                    last = b"\n"
                    while piece := source.read(2**20):
                        out.write(piece)
                        last = piece[-1:]
                    if last != b"\n":
                        out.write(b"\n")
            if out is None:
                open(new_file(folder, self.suffix), "wb").close()
        finally:
            if out is not None:
                out.close()


def types_within(kind: Any) -> Iterator[Any]:
    """A type of Spark, as JSON has it, and those of which it consists."""
    kinds = [kind]
    while kinds:
        yield (kind := kinds.pop())
        if isinstance(kind, Mapping):
            parts = ("elementType", "keyType", "valueType")
            kinds += [kind[part] for part in parts if part in kind]
            kinds += [field["type"] for field in kind.get("fields", ())]


def data_files(path: str) -> list[str]:
    """The files of a chunk, without those that tell of it."""
    if os.path.isfile(path):
        return [path]
    found, before = [], os.stat(path).st_ino
    for above, folders, names in os.walk(path):
        folders[:] = [each for each in folders if each[0] not in "_."]
        found += [os.path.join(above, each) for each in names if each[0] not in "_."]
    if os.stat(path).st_ino != before:
        raise FileNotFoundError(ENOENT, "replaced while it was listed", path)
    return sorted(found)


def new_file(folder: str, suffix: str, number: int = 0) -> str:
    """A name that no earlier file of the chunk has had; by their names, files are in order.

    Who has listed the old files and opens them by name, as Spark does, fails then; it doesn't read
    the new ones by the sizes of the old.
    """
    return os.path.join(folder, f"part-{number:05d}-{os.urandom(4).hex()}{suffix}")


# --- formats that Spark alone writes and reads: ORC, and the tables of Delta and Iceberg ---


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
                    f"Column {odd!r} has a backtick in its name, and Spark can't read it from ORC. "
                    "Rename it, or register the dataset with --format parquet."
                )


class Lake(SparkFormat):
    """A table of files that keeps its own versions; its jars come from elsewhere."""

    is_lake = True


ORC = Orc("orc", "ORC")
DELTA = Lake("delta", "Delta")
ICEBERG = Lake("iceberg", "Iceberg")
