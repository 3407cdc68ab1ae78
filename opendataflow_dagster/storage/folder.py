"""A chunk of a folder: its directory, which appears whole or not at all, and the files in it.

`<root>/dataid=<escaped dataid>/` has the chunk's files, of which plain Spark, pandas and pyarrow
read the root as one dataset, partitioned by a column `dataid`. It is that name whatever the
dataset's `chunkcolumn`: a chunk's own columns stay in its files, and the column may be told later.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import Refused, Unreachable, WrongUse, what_installs
from ..formats import FILE_FORMATS, format_of, format_of_file
from ..formats.csv_options import UNDECLARED, CsvOptions
from ..formats.format import data_files, new_file
from ..location import obstacle, path_of
from ..util.system import locked, publish_lock

DATAID_COLUMN = "dataid"
"""The column that Spark, pandas and pyarrow take from the names of directories."""

STAGING = "_staging"
"""Where chunks are written; Spark and pyarrow pass over what begins with `_`."""

PACKS = "_packs"
"""Where `odf compact --pack` of earlier versions put many chunks into one file."""

BATCH = "_batch-"
"""How a directory begins in which many chunks are written together; their last generation follows.
"""

NOTE = "_odf.json"
"""The file in a chunk's directory with its store, generation, rows, format and columns."""

LONGEST = 255
"""Bytes of a name in a file system."""

_TRIES = 20
"""Others that may remove, when they are done, the directory that we are about to write to."""


# What Spark escapes in the directories that it partitions by, no more and no less: one directory
# called `dataid=a:b` would make the whole root unreadable for it.
_ODD = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")
_ESCAPED = re.compile("%([0-9A-F]{2})")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_OLD = ".old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def escaped(dataid: str) -> str:
    """A dataid as Spark escapes it in a directory's name."""
    return _ODD.sub(lambda odd: f"%{ord(odd[0]):02X}", dataid)


def unescaped(name: str) -> str:
    """The dataid that was escaped."""
    return _ESCAPED.sub(lambda code: chr(int(code[1], 16)), name)


def directory(dataid: str) -> str:
    """The name of a chunk's directory, if the dataid can be one."""
    name = f"{DATAID_COLUMN}={escaped(dataid)}"
    if dataid in ("", _NULL):
        raise Refused(
            f"Dataid {dataid!r} stands for NULL in a partitioned folder, so it can't name a "
            "chunk there. Use another dataid.",
            code="INVALID_LOCATION",
        )
    if len(os.fsencode(name)) > LONGEST:
        raise Refused(
            f"Dataid {dataid[:40] + '…'!r} needs a directory name of "
            f"{len(os.fsencode(name))} bytes, and a file system allows {LONGEST}. Use a "
            "shorter dataid.",
            code="INVALID_LOCATION",
        )
    return name


def chunk_path(root: str, dataid: str) -> str:
    """Where a chunk is published."""
    return os.path.join(root, directory(dataid))


def find(root: str, dataid: str, produced: str | None = None) -> str | None:
    """The file or directory of a chunk: where it was produced, if that is known within the root.

    Else its directory, or a script's name for it: the dataid, with or without an extension.
    """
    path = os.path.normpath(path_of(produced) or produced) if produced else root
    if path.startswith(os.path.normpath(root) + os.sep):
        return path if os.path.exists(path) else None
    names = [directory(dataid)]
    plain = {escaped(dataid), dataid} if dataid.strip(".") and dataid != STAGING else set()
    names += [
        each + end
        for each in plain
        if "/" not in each
        for end in ("", *(format.suffix for format in FILE_FORMATS))
    ]
    return next((path for each in names if os.path.exists(path := os.path.join(root, each))), None)


def alike(path: str, dataid: str) -> list[str]:
    """The files that a script would name after a chunk, if `path` is one of them."""
    name, end = os.path.splitext(path)
    ends = [format.suffix for format in FILE_FORMATS]
    if end not in ends or os.path.basename(name) not in (escaped(dataid), dataid):
        return []
    return [path, *(name + each for each in ends if each != end and os.path.isfile(name + each))]


def read_note(path: str) -> dict[str, Any]:
    """The note in a chunk's directory, or nothing."""
    try:
        with open(os.path.join(path, NOTE), encoding="utf-8") as file:
            note = json.load(file)
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def is_foreign(note: Mapping[str, Any], store: str) -> bool:
    """Whether another store wrote a note: its generations can't be compared with ours.

    A note without a store is of an earlier version, and taken for our own.
    """
    return bool(store) and note.get("store", store) != store


def put(
    root: str,
    dataid: str,
    generation: int,
    write: Callable[[str], Mapping[str, Any]],
    *,
    confirm: Callable[[], None],
    store: str = "",
) -> str:
    """Publish a chunk: `write` fills an empty directory and tells of it; a reader sees old or new.

    `confirm` raises if the claim isn't ours any more; it is asked right before the chunk appears.
    What a killed process left behind is cleared by the next publish of the same chunk.
    """
    staged = Staged(root, dataid, generation, store)
    try:
        staged.tell(write(staged.path))
        return staged.show(confirm)
    finally:
        staged.discard()


class Staged:
    """A staged chunk: an empty directory to write to, which isn't read yet."""

    def __init__(self, root: str, dataid: str, generation: int, store: str = "") -> None:
        self.root, self.dataid, self.generation = root, dataid, generation
        self.store = store
        self.final = chunk_path(root, dataid)
        self._staging = os.path.join(root, STAGING, directory(dataid))
        self.path = begin(self._staging, generation)
        _sweep(self._staging, self.final, generation, self.path)

    def tell(self, told: Mapping[str, Any]) -> None:
        """Write the note of what was written, and have all of it on the disk."""
        note = {"dataid": self.dataid, "generation": self.generation, **told}
        if self.store:
            note["store"] = self.store
        with open(os.path.join(self.path, NOTE), "w", encoding="utf-8") as file:
            json.dump(note, file, ensure_ascii=True)
        sync(self.path)

    def show(self, confirm: Callable[[], None]) -> str:
        """Put the directory in the place of the chunk, if the claim is still ours; where it is."""
        self.replace(confirm)
        _sweep(self._staging, self.final, self.generation, "")
        return self.final

    def replace(self, confirm: Callable[[], None]) -> None:
        """Show it, and keep what was in its place until `discard`."""
        with publish_lock(self._staging):
            _show(self.path, self.final, self.generation, confirm, self.store)
            # The files were synced before; now the name is. A power cut in between leaves the old
            # chunk.
            sync_one(self.root)

    def discard(self) -> None:
        """Remove what wasn't shown, or what was replaced."""
        discard(self.path)


def discard(path: str) -> None:
    """Remove a path below two of our directories, and those directories if they become empty."""
    remove(path)
    for empty in (above := os.path.dirname(path), os.path.dirname(above)):
        with suppress(OSError):  # somebody else is at work in it
            os.rmdir(empty)


def begin(staging: str, generation: int) -> str:
    """An empty directory for a claim to write to."""
    for left in reversed(range(_TRIES)):
        mine = os.path.join(staging, f"{generation}-{os.urandom(4).hex()}")
        try:
            os.makedirs(mine)
            return mine
        except FileNotFoundError as error:
            if not left:
                raise _unwritable(staging, error) from None
            time.sleep(0.01)  # who was done has removed the directory above in between
        except OSError as error:
            raise _unwritable(staging, error) from None
    raise AssertionError


def _unwritable(staging: str, error: OSError) -> Unreachable:
    why = obstacle(staging) or error.strerror or str(error)
    return Unreachable(
        f"Can't create {os.path.dirname(staging)}: {why}. Correct the dataset's "
        "location: odf dataset list"
    )


def _show(mine: str, final: str, generation: int, confirm: Callable[[], None], store: str) -> None:
    """Make a written chunk visible in one step; the old one is in its place then."""
    there = generation_of(final, store)
    # As late as can be: what remains between this and the rename is the time of the rename itself.
    confirm()
    if there > generation:
        raise _newer(final, there, generation)
    try:
        if os.path.lexists(final):
            _swap(mine, final)
        else:
            os.rename(mine, final)
    except FileNotFoundError:
        confirm()  # a newer claim has cleared away what this one wrote
        raise
    # Where the file system has no locks, a newer one may have come since we looked.
    if (there := generation_of(mine, store)) > generation:
        _swap(mine, final)
        confirm()
        raise _newer(final, there, generation)


def _newer(final: str, there: int, generation: int) -> Refused:
    return Refused(
        f"{final} has generation {there}, and this claim has {generation}: an older "
        "chunk can't replace a newer one. If the tables were created again since, "
        f"remove {NOTE} there.",
        code="INVALID_LOCATION",
    )


def _swap(mine: str, final: str) -> None:
    """Exchange two directories; where the system can't, in two steps, which a crash can part."""
    try:
        _exchange(mine, final)
        return
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise
    # Killed between these two, nothing has the chunk's name: in 74 kills that happened once, and
    # with the exchange in none of 78. The name that is left then tells `_sweep` to keep it.
    os.rename(final, mine + _OLD)
    try:
        os.rename(mine, final)
    except OSError:
        os.rename(mine + _OLD, final)
        raise
    os.rename(mine + _OLD, mine)


def _exchange(one: str, other: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "no exchange of names here")
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


def _sweep(staging: str, final: str, generation: int, mine: str) -> None:
    """Remove what publishes of this chunk that are over left behind, unless one is at its end."""
    with suppress(FileNotFoundError), locked(staging) as is_ours:
        for name in os.listdir(staging) if is_ours else ():
            path, number = os.path.join(staging, name), name.partition("-")[0]
            if path == mine or not number.isdigit() or int(number) > generation:
                continue
            if name.endswith(_OLD) and not os.path.lexists(final):
                continue  # the only whole chunk that there is
            remove_staged(path)


def remove_staged(path: str) -> None:
    """Remove a claim's directory, under a name that no publish exchanges with the chunk's.

    What is being removed would be removed from there, too, once it is exchanged.
    """
    above, name = os.path.split(path)
    gone = os.path.join(above, f"{name.partition('-')[0]}-{os.urandom(4).hex()}")
    with suppress(OSError):
        os.rename(path, gone)
        remove(gone)


def generation_of(path: str, store: str = "") -> int:
    """The claim of a store that wrote a chunk's directory; 0 if unknown, or of another store."""
    note = read_note(path)
    found = 0 if is_foreign(note, store) else note.get("generation")
    return found if isinstance(found, int) else 0


def sync(folder: str) -> None:
    """Have all that is in a folder on the disk."""
    for above, _, names in os.walk(folder):
        for name in names:
            sync_one(os.path.join(above, name))
        sync_one(above)


def sync_one(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: str) -> None:
    """Remove a file, a link or a whole directory."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


# --- the files of a chunk: a frame in some format, bytes, or files that are there ---


def write(obj: Any, folder: str, format: str) -> dict[str, Any]:
    """Write an object into an empty folder; what it says of it: rows, bytes, format, columns.

    A frame's index becomes columns if it has a name, and is left out if it hasn't.
    """
    told: dict[str, Any] = {"format": format}
    kind = format_of(format)
    path = new_file(folder, kind.suffix)
    if isinstance(obj, bytes):
        with open(path, "wb") as file:
            file.write(obj)
    elif isinstance(obj, Path):
        _copy(obj, folder)
    else:
        told["columns"] = {}
        if is_frame(obj):
            obj, told["columns"] = kind.prepared(flat(obj))
        table = as_table(obj)
        told["rows"] = table.num_rows
        kind.write(table, path)
        found = kind.count(path)
        if found != table.num_rows:
            raise OSError(f"{table.num_rows} rows were written to {path}, but it has {found}")
    told["bytes"] = sum(os.path.getsize(each) for each in data_files(folder))
    return told


def is_frame(obj: Any) -> bool:
    """Whether it is a frame of pandas, which isn't imported to find out."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(obj, pandas.DataFrame)


def as_table(obj: Any) -> Any:
    """A frame of pandas or Spark, or an Arrow table, as the latter."""
    pyarrow = need("pyarrow")
    if is_frame(obj):
        try:
            return pyarrow.Table.from_pandas(flat(obj), preserve_index=False)
        except pyarrow.ArrowException as error:
            raise WrongUse(
                f"The frame can't be written: {' '.join(map(str, error.args))}"
            ) from None
        except UnicodeEncodeError:
            raise WrongUse(
                "The frame has a text that isn't Unicode, so it can't be written as UTF-8. "
                "Correct it."
            ) from None
    if isinstance(obj, pyarrow.Table):
        return obj
    if hasattr(obj, "toArrow"):
        return obj.toArrow()
    kind = type(obj).__name__
    raise WrongUse(
        f"{'An' if kind[0] in 'AEIOaeio' else 'A'} {kind} can't be published. Return a "
        "DataFrame, an Arrow table, bytes, or the Path of a file or folder."
    )


def flat(frame: Any) -> Any:
    """A frame without an index, with texts as column names."""
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    return frame.rename(columns=str)


def read_frame(
    path: str,
    format: str,
    columns: Mapping[str, str] | None = None,
    options: CsvOptions = UNDECLARED,
) -> Any:
    """The frame in a chunk's files; its columns have the given dtypes.

    `options` describe CSV files from elsewhere.
    """
    pandas, columns = need("pandas"), columns or {}
    frames = [
        format_of_file(file, format).read_frame(file, columns, options) for file in data_files(path)
    ]
    if frames:
        frame = frames[0] if len(frames) == 1 else pandas.concat(frames, ignore_index=True)
    else:
        frame = pandas.DataFrame()
    return typed_as(frame, columns)


def typed_as(frame: Any, columns: Mapping[str, str]) -> Any:
    """The frame with these columns at least, of these dtypes as far as that can be."""
    for name, dtype in columns.items():
        if name not in frame:
            frame[name] = None
        if dtype and str(frame[name].dtype) != dtype:
            with suppress(TypeError, ValueError):  # then it is as the format tells it
                frame[name] = frame[name].astype(dtype)
    return frame


def read_table(
    path: str,
    format: str,
    columns: Mapping[str, str] | None = None,
    options: CsvOptions = UNDECLARED,
) -> Any:
    """The same as an Arrow table."""
    pyarrow = need("pyarrow")
    return pyarrow.Table.from_pandas(
        read_frame(path, format, columns, options), preserve_index=False
    )


def read_bytes(path: str) -> bytes:
    """The one file that a chunk is."""
    found = data_files(path)
    if len(found) != 1:
        raise Refused(
            f"{path} has {len(found)} files, so it can't be read as bytes. "
            "Annotate the input as pathlib.Path, and read the files.",
            code="INVALID_LOCATION",
        )
    return Path(found[0]).read_bytes()


def need(module: str, extra: str | None = None) -> Any:
    """A library that only code with frames needs; `extra` installs it, too."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module or (line := what_installs(error, extra)) is None:
            raise
        raise WrongUse(line) from None


def _copy(source: Path, folder: str) -> None:
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copyfile(source, new_file(folder, source.suffix))
    else:
        raise WrongUse(f"The job returned the path {source}, which doesn't exist.")


# --- files that Spark wrote, read without it: with the types that their note tells ---


_PLAIN = {
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "boolean": "bool_",
    "binary": "binary",
    "date": "date32",
    "void": "null",
}


def read_with_schema(path: str, format: str, schema: Mapping[str, Any]) -> Any:
    """The rows of a chunk as an Arrow table; `schema` is Spark's, as JSON has it."""
    pyarrow = need("pyarrow")
    wanted, kind = arrow_schema(schema), format_of(format)
    files = [file for file in data_files(path) if os.path.getsize(file)]
    found = [conform(kind.read_table(file, schema, wanted), wanted) for file in files]
    return pyarrow.concat_tables(found) if found else wanted.empty_table()


def nullable_frame(table: Any) -> Any:
    """The table for pandas: integers stay such beside none, and a map is a dict."""
    pandas, pyarrow = need("pandas"), need("pyarrow")
    whole = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if pyarrow.types.is_integer(column.type) and column.null_count
    ]
    made = table.to_pandas(integer_object_nulls=True, maps_as_pydicts="strict")
    for name in whole:
        made[name] = made[name].astype(pandas.Int64Dtype())
    return made


def conform(table: Any, wanted: Any) -> Any:
    """The table with these types: an instant that is kept without its zone is in UTC."""
    columns = []
    for field in wanted:
        column = table[field.name]
        if column.type != field.type:
            with suppress(need("pyarrow").ArrowException):  # then it is as the file tells it
                column = column.cast(field.type)
        columns.append(column)
    return need("pyarrow").table(columns, names=wanted.names)


def arrow_schema(schema: Mapping[str, Any]) -> Any:
    pyarrow = need("pyarrow")
    return pyarrow.schema([(each["name"], arrow_type(each["type"])) for each in schema["fields"]])


def arrow_type(kind: Any) -> Any:
    """Arrow's type for one of Spark's, as JSON has it."""
    pyarrow = need("pyarrow")
    if isinstance(kind, Mapping):
        match kind["type"]:
            case "struct":
                return pyarrow.struct(
                    [(each["name"], arrow_type(each["type"])) for each in kind["fields"]]
                )
            case "array":
                return pyarrow.list_(arrow_type(kind["elementType"]))
            case "map":
                return pyarrow.map_(arrow_type(kind["keyType"]), arrow_type(kind["valueType"]))
            case _:
                return arrow_type(kind.get("sqlType", "string"))
    name, _, sizes = kind.rstrip(")").partition("(")
    if name == "decimal":
        return pyarrow.decimal128(*(int(each) for each in sizes.split(",")))
    if name == "timestamp":
        return pyarrow.timestamp("us", "UTC")
    if name == "timestamp_ntz":
        return pyarrow.timestamp("us")
    return getattr(pyarrow, _PLAIN.get(name, "string"))()
