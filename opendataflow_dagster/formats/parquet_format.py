"""Parquet: what Spark, pandas and Arrow have, it holds."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .csv_options import CsvOptions
from .format import Format, Unfit, data_files, new_file

SPARK_ROWS = b"org.apache.spark.sql.parquet.row.metadata"
"""The entry of a Parquet footer from which Spark takes the columns and their types."""

_GROUP = re.compile(r"^ *(\w+) group field_id=\S+ (.*?)(?: \((\w+).*\))? \{$", re.MULTILINE)
"""A nested column as a Parquet schema is printed, and what it stands for, such as `List`."""

_ROW_GROUP_BYTES = 64 * 2**20
"""Bytes in memory that make a row group."""


class Parquet(Format):
    """Parquet, whose footers have the row counts and types."""

    name, title = "parquet", "Parquet"
    suffixes = (".parquet",)
    can_merge = True

    def write(self, table: Any, path: str) -> None:
        import pyarrow
        import pyarrow.parquet as parquet

        try:  # Spark reads no nanoseconds
            parquet.write_table(
                table, path, coerce_timestamps="us", allow_truncated_timestamps=False
            )
        except pyarrow.ArrowInvalid:  # they would be lost, or it is another error that comes again
            parquet.write_table(table, path)

    def read_frame(self, path: str, columns: Mapping[str, str], options: CsvOptions) -> Any:
        import pyarrow.parquet

        # Of this file alone: a reader of paths would add a column for the directory's name.
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read().to_pandas()

    def read_table(self, path: str, schema: Mapping[str, Any], wanted: Any) -> Any:
        import pyarrow.parquet

        # In nanoseconds, years before 1678 and after 2262 would become others: Spark's unit is us.
        with pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            return file.read()

    def count(self, path: str) -> int:
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows

    def merge(self, paths: Sequence[str], folder: str, target: int) -> None:
        """Write files of the same types, and compare all rows with the original ones.

        Types that pyarrow can't preserve (variants, two kinds of timestamps) raise `Unfit`.
        """
        schema, options = common_schema(paths), writing_options(paths[0])
        written = []
        rows = _pieces(paths, schema)
        piece = next(rows, None)
        while piece is not None or not written:
            written.append(path := new_file(folder, self.suffix, len(written)))
            piece = _fill(path, schema, options, piece, rows, target)
            check_types(path, paths[0])
        for left, right in _aligned(_all(paths), _all(data_files(folder))):
            if right is None or left is None or not same(left, right):
                raise Unfit("its rows differ after they were rewritten")


PARQUET = Parquet()


def common_schema(paths: Sequence[str]) -> Any:
    """The Arrow schema that Parquet files share, metadata included."""
    import pyarrow.parquet

    schema, leaves = None, None
    for path in paths:
        with pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            found, found_leaves = file.schema_arrow, _leaves(file.schema)
        if schema is None:
            schema, leaves = found, found_leaves
        elif not found.equals(schema, check_metadata=True) or found_leaves != leaves:
            raise Unfit("its files have different columns or types")
    return schema


def batches(path: str) -> Iterator[Any]:
    """The rows of a Parquet file as tables of a row group each."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def writing_options(path: str) -> dict[str, Any]:
    """How pyarrow has to write what it reads of a file, for the types to be the same."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        kinds = {
            (leaf.physical_type == "INT96")
            for leaf in map(file.schema.column, range(len(file.schema)))
            if leaf.physical_type == "INT96" or leaf.logical_type.type == "TIMESTAMP"
        }
        arrow = b"ARROW:schema" in (file.metadata.metadata or {})
    if len(kinds) == 2:
        raise Unfit("it has timestamps of two kinds, INT96 and others")
    return {
        "use_deprecated_int96_timestamps": kinds == {True},
        "store_decimal_as_integer": True,
        "store_schema": arrow,
    }


def check_types(path: str, like: str, without: Sequence[str] = ()) -> None:
    """Make sure that a written Parquet file has the types of another, `without` some columns."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as new, pyarrow.parquet.ParquetFile(like) as old:
        expected = [leaf for leaf in _leaves(old.schema) if leaf[0] not in without]
        if _leaves(new.schema) != expected:
            raise Unfit("it has types that are written only by who wrote them, such as variants")


def same(one: Any, other: Any) -> bool:
    """Whether two Arrow tables hold the same, NaN included, which equals nothing elsewhere."""
    return one.num_rows == other.num_rows and all(
        _same(left.combine_chunks(), right.combine_chunks())
        for left, right in zip(one.columns, other.columns, strict=True)
    )


def _fill(
    path: str, schema: Any, options: dict[str, Any], piece: Any, rows: Iterator[Any], target: int
) -> Any:
    """Write pieces until the file is large enough; the first that isn't in it."""
    import pyarrow.parquet

    with (
        open(path, "wb") as file,
        pyarrow.parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        while piece is not None:
            writer.write_table(piece)
            piece = next(rows, None)
            if file.tell() >= target:
                break
        keep_metadata(writer, schema.metadata)
    return piece


def keep_metadata(writer: Any, metadata: Mapping[bytes, bytes] | None) -> None:
    """Write what a footer has to tell besides; where Arrow's schema isn't stored, nothing else is.

    Whoever looks for Arrow's schema takes its types for those of the file.
    """
    if metadata:
        writer.add_key_value_metadata(metadata)


def _pieces(paths: Sequence[str], schema: Any) -> Iterator[Any]:
    """Yield the rows of files, in tables of a good row group size."""
    import pyarrow

    held, size = [], 0
    for table in _all(paths):
        if table.num_rows:
            held.append(table)
            size += table.nbytes
        if size >= _ROW_GROUP_BYTES:
            yield pyarrow.concat_tables(held).cast(schema)
            held, size = [], 0
    if held:
        yield pyarrow.concat_tables(held).cast(schema)


def _all(paths: Sequence[str]) -> Iterator[Any]:
    return (table for path in paths for table in batches(path))


def _aligned(one: Iterator[Any], other: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield two streams of tables in pairs of equal length; None for a stream that has ended."""
    left = right = None
    while True:
        while left is None or not left.num_rows:
            left = next(one, None)
            if left is None:
                break
        while right is None or not right.num_rows:
            right = next(other, None)
            if right is None:
                break
        if left is None or right is None:
            if left is not right:
                yield left, right
            return
        rows = min(left.num_rows, right.num_rows)
        yield left.slice(0, rows), right.slice(0, rows)
        left, right = left.slice(rows), right.slice(rows)


def _leaves(schema: Any) -> list[tuple]:
    """The columns of a Parquet schema as they are stored; a decimal, as what it stands for."""
    leaves: list[tuple] = [(name, "", *kind) for name, *kind in _GROUP.findall(str(schema))[1:]]
    for number in range(len(schema)):
        leaf = schema.column(number)
        decimal = leaf.logical_type.type == "DECIMAL"
        leaves.append(
            (
                leaf.path,
                leaf.max_definition_level,
                leaf.max_repetition_level,
                "" if decimal else leaf.physical_type,
                str(leaf.logical_type),
            )
        )
    return leaves


def _same(one: Any, other: Any) -> bool:
    import pyarrow
    from pyarrow import types

    compute = _compute()

    if isinstance(one, pyarrow.ChunkedArray):  # too large for one array
        pairs = zip(one.chunks, other.chunks, strict=False)
        return [*map(len, one.chunks)] == [*map(len, other.chunks)] and all(
            _same(*pair) for pair in pairs
        )
    kind = one.type
    if kind != other.type or not one.is_valid().equals(other.is_valid()):
        return False
    if types.is_dictionary(kind):
        return _same(one.dictionary_decode(), other.dictionary_decode())
    if types.is_struct(kind):
        return all(
            _same(compute.struct_field(one, [n]), compute.struct_field(other, [n]))
            for n in range(kind.num_fields)
        )
    if types.is_map(kind):
        return (
            _offsets(one).equals(_offsets(other))
            and _same(_rows_of(one, one.keys), _rows_of(other, other.keys))
            and _same(_rows_of(one, one.items), _rows_of(other, other.items))
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = compute.list_value_length(one), compute.list_value_length(other)
        return lengths[0].equals(lengths[1]) and _same(one.flatten(), other.flatten())
    if types.is_floating(kind):
        import pyarrow

        width = {16: pyarrow.int16(), 32: pyarrow.int32(), 64: pyarrow.int64()}[kind.bit_width]
        pair = [compute.fill_null(each, 0.0).view(width) for each in (one, other)]
        return pair[0].equals(pair[1])
    return one.equals(other)


def _compute() -> Any:
    import pyarrow.compute

    return pyarrow.compute


def _offsets(maps: Any) -> Any:
    return _compute().subtract(maps.offsets, maps.offsets[0])


def _rows_of(maps: Any, values: Any) -> Any:
    """The keys or items that lie within a slice of maps."""
    first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    return values.slice(first, last - first)
