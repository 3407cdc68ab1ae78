"""Where a dataset is, as far as its registration tells, and whether that can be seen from here."""

import os
import re
from collections.abc import Mapping
from typing import Any

from .config.settings import redact

PARTS = ("hostname", "database", "schemaname", "tablename")

_DATABASE = re.compile(r"(?i)jdbc:|[\w+]*sql[\w+]*://")


def location(row: Mapping[str, Any]) -> str | None:
    """`host/database/schema.table`, or a folder, of the parts that a row of `dataset` has.

    A password that is in the URL of a database isn't told.
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
    """What keeps a folder from being made: a file, or a link that leads nowhere, on its way."""
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
    """Whether a place is looked for from some folder: of a pipeline's, that is its project's."""
    return place.startswith(("./", "../")) or place in (".", "..")


def seen(place: str | None, produced: str | None) -> str | None:
    """Where to look for a dataset; of a relative place, where a chunk of it was produced tells."""
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
        parts = [each for each in os.path.normpath(configured).split("/") if each.strip(".")]
        return f"/{'/'.join(parts)}/".replace("//", "/") in f"{path_of(produced) or produced}/"
    produced = path_of(produced) or public(produced)
    configured = path_of(configured) or public(configured)
    return produced.rstrip("/") == configured.rstrip("/") or produced.startswith(
        configured.rstrip("/") + "/"
    )
