"""The tables as a Dagster resource: configured, or what `odf` would use here."""

import hashlib
import logging
import os
import threading
import time
from contextlib import suppress

import dagster as dg

from ..config.credentials import hand_on_by_multiprocessing, take_passkey
from ..config.settings import FOLDER, Settings, load_settings, make_folder
from ..errors import NoDatabase
from ..store.catalog import Catalog, read_catalog
from ..store.opening import open_from
from ..store.store import Store
from ..util.text import first_line

RESOURCE_KEY = "dataflow"
"""The key of the resource by which a step finds the tables."""

PYSPARK_KEY = "pyspark"
"""The key of the resource that has the session of Spark, in a project that brings its own."""

_log = logging.getLogger("opendataflow_dagster")
_lock = threading.Lock()
_stores: dict[tuple, Store] = {}
_kept: dict[str, str] = {}

# A code location loads this before what is written in it, a run before its functions.
take_passkey()
hand_on_by_multiprocessing()


class DataflowResource(dg.ConfigurableResource):
    """The tables of OpenDataFlow.

    What isn't set is what `odf` would use here: of the environment, of `dataflow.properties`, or
    else SQLite in `./.dataflow/`.
    """

    url: str | None = None
    schema_: str | None = None
    user: str | None = None
    config: str | None = None
    timezone: str | None = None

    @property
    def settings(self) -> Settings:
        """Where the tables are, by the fields, the environment and the file, in this order."""
        fields = {
            "DATAFLOW_URL": self.url,
            "DATAFLOW_SCHEMA": self.schema_,
            "DATAFLOW_USER": self.user,
            "DATAFLOW_TIMEZONE": self.timezone,
        }
        given = {name: value for name, field in fields.items() if (value := _value(field))}
        return load_settings(_value(self.config), {**os.environ, **given})

    @property
    def store(self) -> Store:
        """The store, opened on first use; all threads and steps of a process share it."""
        return self.patient_store()

    def patient_store(self, patience: float | None = None) -> Store:
        """The store of those who wait so many seconds at most for a database that went away."""
        found = self.settings
        key = (found.url, found.user, found.encrypted, found.schema, found.timezone, patience)
        with _lock:
            if key not in _stores:
                _stores[key] = open_from(found)
                if patience is not None:
                    _stores[key].db.patience = patience
            return _stores[key]

    def catalog(self) -> Catalog:
        """What is registered now; with the database away, what was when it was last read.

        So Dagster's pages open also then.
        """
        store = self.patient_store(0.0)
        path = self._kept_in()
        try:
            catalog = _read(store)
        except Exception as error:
            if not (isinstance(error, NoDatabase) or store.db.trouble(error)):
                raise
            catalog = _kept_catalog(path)
            if catalog is None:
                raise
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(os.path.getmtime(path)))
            _log.warning(
                "The database of OpenDataFlow can't be read: %s. What was registered at %s is "
                "shown.",
                first_line(error),
                written,
            )
            return catalog
        finally:
            store.db.drop()  # it is read seldom: keep no connection open for it
        _keep(path, catalog.to_json())
        return catalog

    def _kept_in(self) -> str:
        found = self.settings
        home = os.environ.get("DAGSTER_HOME")
        folder = os.path.join(home, "opendataflow") if home else FOLDER
        which = hashlib.sha256(f"{found.url}\n{found.schema}\n{found.user}".encode()).hexdigest()
        return os.path.join(os.path.abspath(folder), f"catalog-{which[:16]}.json")


def _value(field: str | None) -> str | None:
    """A field's value, also before Dagster has resolved what it says of the environment."""
    return field.get_value() if isinstance(field, dg.EnvVar) else field


def _read(store: Store) -> Catalog:
    """Read by a new connection if the one that there was is gone."""
    try:
        return read_catalog(store)
    except Exception as error:
        if store.db.trouble(error) != "gone":
            raise
    store.db.drop()
    return read_catalog(store)


def _kept_catalog(path: str) -> Catalog | None:
    try:
        with open(path, encoding="utf-8") as file:
            return Catalog.from_json(file.read())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: str, text: str) -> None:
    """Write what was read, unless it is there already; that it can't be written is no fault."""
    if _kept.get(path) == text and os.path.exists(path):
        return
    # Several code servers write it: each a file of its own, then a rename that readers don't see.
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        make_folder(os.path.dirname(path))
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
        _kept[path] = text
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
