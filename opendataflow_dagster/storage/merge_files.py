"""Many files of one chunk as one, or as few: the same rows in the same order, of the same types.

It needs no Spark. What pyarrow can't write as it was (variants, two kinds of timestamps in one
file) is left as it is, with the reason.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, BinaryIO

from .files import data_files, new_file

SPARK_ROWS = b"org.apache.spark.sql.parquet.row.metadata"
"""The entry of a Parquet footer from which Spark takes the columns and their types."""

MERGEABLE = ("parquet", "csv", "json")

_GROUP = re.compile(r"^ *(\w+) group field_id=\S+ (.*?)(?: \((\w+).*\))? \{$", re.MULTILINE)
"""A nested column as a Parquet schema is printed, and what it stands for, such as `List`."""

_PIECE = 64 * 2**20
"""Bytes in memory that make a row group."""


class Unfit(Exception):
    """The files can't be rewritten exactly as they are; the message says why."""


def merge(paths: Sequence[str], folder: str, format: str, target: int) -> None:
    """Write the rows of files into an empty folder, in files of about the target's bytes."""
    if format == "parquet":
        _merge_parquet(paths, folder, target)
    else:
        _merge_lines(paths, folder, format, target)


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


def _merge_parquet(paths: Sequence[str], folder: str, target: int) -> None:
    schema, options = common_schema(paths), writing_options(paths[0])
    written = []
    rows = _pieces(paths, schema)
    piece = next(rows, None)
    while piece is not None or not written:
        written.append(path := new_file(folder, ".parquet", len(written)))
        piece = _fill(path, schema, options, piece, rows, target)
        check_types(path, paths[0])
    for left, right in _aligned(_all(paths), _all(data_files(folder))):
        if right is None or left is None or not same(left, right):
            raise Unfit("its rows aren't the same after they were written anew")


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
    """The rows of files, in tables that make good row groups."""
    import pyarrow

    held, size = [], 0
    for table in _all(paths):
        if table.num_rows:
            held.append(table)
            size += table.nbytes
        if size >= _PIECE:
            yield pyarrow.concat_tables(held).cast(schema)
            held, size = [], 0
    if held:
        yield pyarrow.concat_tables(held).cast(schema)


def _all(paths: Sequence[str]) -> Iterator[Any]:
    return (table for path in paths for table in batches(path))


def _aligned(one: Iterator[Any], other: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Two streams of tables in pairs of as many rows; None stands for a stream that ended."""
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
    import pyarrow.types as types

    compute = _compute()

    if isinstance(one, _chunked()):  # too large for one array
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


def _chunked() -> Any:
    import pyarrow

    return pyarrow.ChunkedArray


def _merge_lines(paths: Sequence[str], folder: str, format: str, target: int) -> None:
    """Append files of lines to each other; of CSV, the first line of each must be the same."""
    odd = [path for path in paths if not path.endswith((".csv", ".json", ".jsonl"))]
    if odd:
        raise Unfit(f"{os.path.basename(odd[0])} isn't plain text")
    head = _heading(paths[0]) if format == "csv" else b""
    out: BinaryIO | None = None
    written = count()
    try:
        for path in paths:
            if os.path.getsize(path) == 0:
                continue
            with open(path, "rb") as source:
                if format == "csv" and source.read(len(head)) != head:
                    raise Unfit("its files have different columns")
                if out is None or out.tell() >= target:
                    if out is not None:
                        out.close()
                    path = new_file(folder, f".{format}", next(written))
                    out = open(path, "wb")  # noqa: SIM115
                    out.write(head)
                last = b"\n"
                while piece := source.read(2**20):
                    out.write(piece)
                    last = piece[-1:]
                if last != b"\n":
                    out.write(b"\n")
        if out is None:
            open(new_file(folder, f".{format}"), "wb").close()
    finally:
        if out is not None:
            out.close()


def _heading(path: str) -> bytes:
    """The first record of a CSV file: a line break within quotes doesn't end it."""
    head, quotes = b"", 0
    with open(path, "rb") as file:
        for line in file:
            head += line
            quotes += line.count(b'"')
            if quotes % 2 == 0:
                break
    return head if head.endswith(b"\n") or not head else head + b"\n"
