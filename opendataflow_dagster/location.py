"""What the place of a dataset is: a folder, a place without renames, or a table of a database."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from .errors import Refused
from .place import location, path_of, public
from .util.text import typed

FORMATS = ("parquet", "csv", "json")

DEFAULT_FORMAT = "parquet"

SPARK_FORMATS = ("orc", "delta", "iceberg")
"""Formats of a folder that Spark alone reads and writes."""

POSTGRES, SQLITE, JDBC = "postgres", "sqlite", "jdbc"
_DATABASES = {
    "postgres": POSTGRES,
    "postgresql": POSTGRES,
    "sqlite": SQLITE,
    "sqlite3": SQLITE,
    "jdbc": JDBC,
}
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


class Remote(NamedTuple):
    """A place without a rename that can be relied on: a chunk is a version that the tables name."""

    datasetid: str
    root: str
    format: str


class Table(NamedTuple):
    """A table; a chunk of it is the rows whose column has the dataid, or lies in its bounds."""

    datasetid: str
    location: str
    dialect: str
    database: str
    host: str
    schema: str
    name: str
    column: str
    user: str


def target_of(
    datasetid: str, columns: Mapping[str, str | None], format: str = DEFAULT_FORMAT
) -> Folder | Remote | Table:
    """The place that a dataset is registered with, if data can be read and written there.

    A path is a folder, unless its `format` or its looks say that it is a file of SQLite. A URL such
    as `s3a://` is remote, and one that begins with `jdbc:` is any database. A table on any other
    host, or with the format `postgresql`, is PostgreSQL's.
    """
    told = {name: value or "" for name, value in columns.items()}
    place, kind = location(columns), told.get("format", "").lower()
    if place is None:
        raise Refused(
            f"{datasetid!r} is registered without a place. "
            f"Run: odf dataset add {typed(datasetid)} --hostname /FOLDER",
            code="INVALID_LOCATION",
        )
    host, database = told.get("hostname", ""), told.get("database", "")
    if kind not in ("", *FORMATS, *SPARK_FORMATS, *_DATABASES):
        raise Refused(
            f"{datasetid!r} has the format {kind!r}, which isn't read or written here: choose "
            f"{', '.join((*FORMATS, *SPARK_FORMATS))}, postgresql, sqlite or jdbc. "
            f"Run: odf dataset add {typed(datasetid)} --format {DEFAULT_FORMAT}",
            code="INVALID_LOCATION",
        )
    dialect = _DATABASES.get(kind) or ("" if kind else _looks_like(host, database, told))
    if not dialect:
        if is_remote(place):
            return Remote(datasetid, place.rstrip("/"), kind or format)
        root = path_of(place)
        if root is None:
            raise _no_path(datasetid, place)
        return Folder(datasetid, os.path.abspath(root), kind or format, told.get("options", ""))
    if not told.get("tablename"):
        raise Refused(
            f"{datasetid!r} is in a database, and registered without a table. "
            f"Run: odf dataset add {typed(datasetid)} --tablename TABLE",
            code="INVALID_LOCATION",
        )
    if not told.get("chunkcolumn"):
        raise Refused(
            f"{datasetid!r} is a table, and no column tells which rows are a chunk. "
            f"Run: odf dataset add {typed(datasetid)} --chunkcolumn COLUMN",
            code="INVALID_LOCATION",
        )
    if dialect == JDBC and not host.startswith("jdbc:"):
        raise Refused(
            f"{datasetid!r} has the format jdbc, and its host {public(host)!r} is no URL of JDBC. "
            f"Run: odf dataset add {typed(datasetid)} --hostname jdbc:DRIVER://HOST/DATABASE",
            code="INVALID_LOCATION",
        )
    if dialect == SQLITE:
        path = path_of(_without(database or host, "sqlite:///", "/"))
        if path is None:
            raise _no_path(datasetid, place)
        host, database = "", os.path.abspath(path)
    if dialect == POSTGRES and public(host) != host:
        raise Refused(
            f"{datasetid!r} has a password in the URL of its host, where it isn't taken from. "
            f"Run: odf dataset add {typed(datasetid)} --hostname HOST:PORT --username USER "
            "--password",
            code="INVALID_LOCATION",
        )
    if dialect == POSTGRES:
        host = _without(host, "postgresql://", "").rstrip("/")
    return Table(
        datasetid,
        place,
        dialect,
        database,
        host,
        told.get("schemaname", ""),
        told["tablename"],
        told["chunkcolumn"],
        told.get("username", ""),
    )


def is_remote(place: str) -> bool:
    """Whether a place is published to by versions, since it has no rename to rely on."""
    return place.startswith((REMOTE, *(f"{scheme}://" for scheme in _REMOTE_SCHEMES)))


def is_packed(location: str | None) -> bool:
    """Whether a location is that of a chunk in a pack."""
    return location is not None and PACKED_CHUNK.fullmatch(location) is not None


def keeps_versions(columns: Mapping[str, str | None]) -> bool:
    """Whether a place keeps a chunk's version for whoever reads it: it may be made again meanwhile.

    The view `versioned_dataset` tells the same in the tables.
    """
    kind = (columns.get("format") or "").lower()
    return is_remote(location(columns) or "") and kind not in ("delta", "iceberg")


def address(place: str) -> str:
    """The URL by which Spark and Hadoop know a place."""
    return place.removeprefix(REMOTE)


def _looks_like(host: str, database: str, told: Mapping[str, str]) -> str:
    if host.startswith("jdbc:"):
        return JDBC
    if not told.get("tablename") or is_remote(host):
        return ""
    if host.startswith("sqlite:") or database.startswith("sqlite:"):
        return SQLITE
    path = path_of(host or database)
    if path is None:
        return POSTGRES
    return SQLITE if not host and (os.path.isfile(path) or path.endswith(_SUFFIXES)) else ""


def _without(text: str, prefix: str, by: str) -> str:
    return by + text.removeprefix(prefix).lstrip("/") if text.startswith(prefix) else text


def _no_path(datasetid: str, place: str) -> Refused:
    return Refused(
        f"{datasetid!r} is registered at {place}, which is no folder that can be reached here. "
        f"Run: odf dataset add {typed(datasetid)} --hostname /FOLDER",
        code="INVALID_LOCATION",
    )
