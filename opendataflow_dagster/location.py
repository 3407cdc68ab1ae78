"""What the place of a dataset is: a folder, a place without renames, or a table of a database."""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .config.settings import redact
from .errors import Refused
from .util.text import typed

PARTS = ("hostname", "database", "schemaname", "tablename")

_DATABASE = re.compile(r"(?i)jdbc:|[\w+]*sql[\w+]*://")


def place_of(row: Mapping[str, Any]) -> str | None:
    """`host/database/schema.table`, or a folder, of the parts that a row of `dataset` has.

    A password in the URL of a database is left out.
    """
    host, database, schema, table = (
        public(str(row[part])) if row.get(part) else "" for part in PARTS
    )
    name = ".".join(part for part in (schema, table) if part)
    return "/".join(part for part in (host, database, name) if part) or None


def public(place: str) -> str:
    """A place without the password that may be in the URL of a database."""
    return redact(place) if _DATABASE.match(place) else place


def obstacle(path: str) -> str | None:
    """Return what prevents a folder from being created: a file or a broken link in its path."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if os.path.isdir(path):
        return None
    if os.path.islink(path) and not os.path.exists(path):
        return f"{path} is a link to {os.readlink(path)}, which isn't there: is it mounted?"
    return f"{path} is a file"


def path_of(place: str) -> str | None:
    """The path on this machine that a place is, if it is one."""
    if place.startswith("file:"):
        return "/" + place.removeprefix("file:").lstrip("/")
    if place.startswith(("/", "./", "../", "~/")) or place in (".", "..", "~"):
        return os.path.expanduser(place)
    return None


def is_relative(place: str) -> bool:
    """Whether a place is relative to a folder: for a pipeline, that of its project."""
    return place.startswith(("./", "../")) or place in (".", "..")


def place_to_look(place: str | None, produced: str | None) -> str | None:
    """Where to look for a dataset: a relative place is found by where a chunk was produced."""
    if produced and (place is None or (is_relative(place) and is_within(produced, place))):
        return produced
    return place


def is_missing(place: str) -> bool:
    """Whether a place is on this machine and isn't there; a table in a file is where that is."""
    path = path_of(place)
    return path is not None and not (
        os.path.exists(path) or os.path.isfile(os.path.dirname(path.rstrip("/")))
    )


def is_within(produced: str, configured: str) -> bool:
    """Whether a chunk was produced in the place that is configured now, if that can be told."""
    if is_relative(configured):
        parts = [part for part in os.path.normpath(configured).split("/") if part.strip(".")]
        return f"/{'/'.join(parts)}/".replace("//", "/") in f"{path_of(produced) or produced}/"
    produced = path_of(produced) or public(produced)
    configured = path_of(configured) or public(configured)
    return produced.rstrip("/") == configured.rstrip("/") or produced.startswith(
        configured.rstrip("/") + "/"
    )


DEFAULT_FORMAT = "parquet"
"""The format of files, if a dataset is registered without one; `formats` lists all."""

POSTGRES, SQLITE, JDBC = "postgres", "sqlite", "jdbc"
_DATABASES = {
    "postgres": POSTGRES,
    "postgresql": POSTGRES,
    "sqlite": SQLITE,
    "sqlite3": SQLITE,
    "jdbc": JDBC,
}
BIGQUERY = "bigquery"
_SELECT = re.compile(r"(\s|\(|--[^\n]*\n|/\*.*?\*/)*(select|with)\b", re.IGNORECASE | re.DOTALL)
_SUFFIXES = (".db", ".sqlite", ".sqlite3")

PACKED_CHUNK = re.compile(r"(.*/_packs/pack-[0-9a-f]+\.parquet)#dataid=(.*)", re.DOTALL)
"""The location of a chunk in a pack: the pack's path, and the escaped dataid."""

REMOTE = "remote+"
"""Before a URL: what is there is published as in an object store, such as `remote+file:///mnt/x`."""

_REMOTE_SCHEMES = (
    "s3a",
    "s3",
    "s3n",
    "gs",
    "abfss",
    "abfs",
    "wasbs",
    "wasb",
    "adl",
    "oss",
    "cosn",
    "obs",
    "hdfs",
    "webhdfs",
    "viewfs",
)


class Folder(NamedTuple):
    """A folder whose chunks are directories with files of this format."""

    datasetid: str
    root: str
    format: str
    options: str = ""
    """What is declared of files that others put there."""


class ObjectStore(NamedTuple):
    """A place without a rename that can be relied on: a chunk is a version that the tables name."""

    datasetid: str
    root: str
    format: str


class Table(NamedTuple):
    """A table; a chunk of it is the rows whose column has the dataid, or lies in its bounds.

    One whose `column` is empty isn't kept by chunks, and its `name` may be a SELECT.
    """

    datasetid: str
    location: str
    dialect: str
    database: str
    host: str
    schema: str
    name: str
    column: str
    user: str


class CsvFile(NamedTuple):
    """One CSV file, as people keep them."""

    datasetid: str
    path: str
    options: str = ""


class BigQueryTable(NamedTuple):
    """A table of BigQuery, or a SELECT; without a host, Google's own."""

    datasetid: str
    location: str
    host: str
    project: str
    dataset: str
    name: str


ChunkPlace = Folder | ObjectStore | Table
"""A place that keeps chunks apart."""

DataPlace = CsvFile | BigQueryTable | ChunkPlace
"""Any place that a dataset's row can name."""


def columns_of(row: Mapping[str, Any]) -> dict[str, str | None]:
    """The columns of a row of `dataset` as texts, in lower case whatever the database returns."""
    return {name.lower(): None if value is None else str(value) for name, value in row.items()}


def resolve(datasetid: str, columns: Mapping[str, str | None]) -> DataPlace:
    """The place that a dataset's row names, whether or not it keeps chunks apart.

    A path without a table that ends in `.csv`, or is a file, is one CSV file; the format `bigquery`
    is a table there. Everything else is as `chunk_place` says, but a table needs no `chunkcolumn`.

    Args:
        datasetid: The dataset, for messages.
        columns: Its row, by names in lower case.
    """
    values = {name: value or "" for name, value in columns.items()}
    kind, name = values.get("format", "").lower(), values.get("tablename", "")
    if kind == BIGQUERY:
        return _big_query(datasetid, values)
    if not name and kind in ("", "csv") and (file := _csv_file(datasetid, values)):
        return file
    # What isn't kept by chunks has no column that names them; `chunk_place` insists on one.
    stand_ins = {"chunkcolumn": values.get("chunkcolumn") or "-"}
    if is_select(name):
        stand_ins["tablename"] = "(SELECT)"  # a place is shown in messages, and a query is long
    found = chunk_place(datasetid, {**columns, **stand_ins})
    if isinstance(found, Table):
        return found._replace(name=name, column=values.get("chunkcolumn", ""))
    return found


def chunk_place(
    datasetid: str, columns: Mapping[str, str | None], format: str = DEFAULT_FORMAT
) -> ChunkPlace:
    """The place that a dataset's row names, if it keeps chunks apart.

    A path is a folder, unless its `format` or its looks say that it is a file of SQLite. A URL such
    as `s3a://` is an object store, and one that begins with `jdbc:` is any database. A table on any
    other host, or with the format `postgresql`, is PostgreSQL's.

    Args:
        datasetid: The dataset, for messages.
        columns: Its row, by names in lower case.
        format: The format of files, if the row has none.
    """
    from .formats import FORMATS  # not for `odf run`, which only asks where a dataset is

    values = {name: value or "" for name, value in columns.items()}
    place, kind = place_of(columns), values.get("format", "").lower()
    if place is None:
        raise _refused(datasetid, "is registered without a place", "--hostname /FOLDER")
    if kind not in ("", *(format.name for format in FORMATS), *_DATABASES):
        choices = ", ".join(format.name for format in FORMATS)
        raise _refused(
            datasetid,
            f"has the format {kind!r}, which isn't read or written here: choose {choices}, "
            "postgresql, sqlite or jdbc",
            f"--format {DEFAULT_FORMAT}",
        )
    dialect = _DATABASES.get(kind) or ("" if kind else _dialect_by_looks(values))
    if dialect:
        return _table(datasetid, values, place, dialect)
    if is_remote(place):
        return ObjectStore(datasetid, place.rstrip("/"), kind or format)
    root = path_of(place)
    if root is None:
        raise _no_path(datasetid, place)
    return Folder(datasetid, os.path.abspath(root), kind or format, values.get("options", ""))


def is_select(text: str) -> bool:
    """Whether a `tablename` is a query instead."""
    return _SELECT.match(text) is not None


def is_remote(place: str) -> bool:
    """Whether a place is published to by versions, since it has no rename to rely on."""
    return place.startswith((REMOTE, *(f"{scheme}://" for scheme in _REMOTE_SCHEMES)))


def is_packed(location: str | None) -> bool:
    """Whether a location is that of a chunk in a pack."""
    return location is not None and PACKED_CHUNK.fullmatch(location) is not None


def keeps_versions(columns: Mapping[str, str | None]) -> bool:
    """Whether a place keeps the version that a job reads while the chunk is produced again.

    The view `versioned_dataset` says the same in the tables.
    """
    if not is_remote(place_of(columns) or ""):
        return False
    from .formats import format_of

    return not format_of((columns.get("format") or "").lower()).is_lake


def address(place: str) -> str:
    """The URL by which Spark and Hadoop know a place."""
    return place.removeprefix(REMOTE)


def _table(datasetid: str, values: Mapping[str, str], place: str, dialect: str) -> Table:
    host, database = values.get("hostname", ""), values.get("database", "")
    if not values.get("tablename"):
        what = "is in a database, and registered without a table"
        raise _refused(datasetid, what, "--tablename TABLE")
    if not values.get("chunkcolumn"):
        what = "is a table, and no column tells which rows are a chunk"
        raise _refused(datasetid, what, "--chunkcolumn COLUMN")
    if dialect == JDBC and not host.startswith("jdbc:"):
        what = f"has the format jdbc, and its host {public(host)!r} is no URL of JDBC"
        raise _refused(datasetid, what, "--hostname jdbc:DRIVER://HOST/DATABASE")
    if dialect == SQLITE:
        path = path_of(_without(database or host, "sqlite:///", "/"))
        if path is None:
            raise _no_path(datasetid, place)
        host, database = "", os.path.abspath(path)
    if dialect == POSTGRES:
        if public(host) != host:
            what = "has a password in the URL of its host, where it isn't taken from"
            raise _refused(datasetid, what, "--hostname HOST:PORT --username USER --password")
        host = _without(host, "postgresql://", "").rstrip("/")
    return Table(
        datasetid,
        place,
        dialect,
        database,
        host,
        values.get("schemaname", ""),
        values["tablename"],
        values["chunkcolumn"],
        values.get("username", ""),
    )


def _dialect_by_looks(values: Mapping[str, str]) -> str:
    """The database that a row without a format means; nothing if it means a folder."""
    host, database = values.get("hostname", ""), values.get("database", "")
    if host.startswith("jdbc:"):
        return JDBC
    if not values.get("tablename") or is_remote(host):
        return ""
    if host.startswith("sqlite:") or database.startswith("sqlite:"):
        return SQLITE
    path = path_of(host or database)
    if path is None:
        return POSTGRES
    return SQLITE if not host and (os.path.isfile(path) or path.endswith(_SUFFIXES)) else ""


def _csv_file(datasetid: str, values: Mapping[str, str]) -> CsvFile | None:
    place = place_of(values) or ""
    path = path_of(place)
    if path:
        is_file = os.path.isfile(path) or path.lower().endswith(".csv")
        if not is_file or os.path.isdir(path):
            return None
        return CsvFile(datasetid, os.path.abspath(path), values.get("options", ""))
    if "://" in place or not place.lower().endswith(".csv"):
        return None
    what = f"is registered at {place}, which is the name of a host and not a path"
    raise _refused(datasetid, what, f"--hostname {typed('/path/' + place)}")


def _big_query(datasetid: str, values: Mapping[str, str]) -> BigQueryTable:
    project, dataset, name = (
        values.get(column, "") for column in ("database", "schemaname", "tablename")
    )
    needed = {"database": "project", "tablename": "table"}
    if not is_select(name):
        needed["schemaname"] = "dataset"
    for column, part in needed.items():
        if not values.get(column):
            what = f"is in BigQuery, and registered without its {part}"
            raise _refused(datasetid, what, f"--{column} NAME")
    host = values.get("hostname", "").rstrip("/")
    table = "(SELECT)" if is_select(name) else name
    path = ".".join(part for part in (project, dataset, table) if part)
    return BigQueryTable(datasetid, f"{host or BIGQUERY}/{path}", host, project, dataset, name)


def _without(text: str, prefix: str, by: str) -> str:
    return by + text.removeprefix(prefix).lstrip("/") if text.startswith(prefix) else text


def _no_path(datasetid: str, place: str) -> Refused:
    what = f"is registered at {place}, which is no folder that can be reached here"
    return _refused(datasetid, what, "--hostname /FOLDER")


def _refused(datasetid: str, what: str, options: str) -> Refused:
    """What is wrong with a dataset's row, and the command that corrects it."""
    return Refused(
        f"{datasetid!r} {what}. Run: odf dataset add {typed(datasetid)} {options}",
        code="INVALID_LOCATION",
    )
