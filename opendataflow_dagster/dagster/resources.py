"""The tables as a Dagster resource: configured, or what `odf` would use here."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import dagster as dg

from ..config.credentials import hand_on_by_multiprocessing, take_passkey
from ..config.settings import FOLDER, Settings, load_settings, make_folder
from ..errors import NoDatabase
from ..flow.catalog import catalog_of
from ..flow.flow import Flow
from ..store import open_from, operations, registry
from ..store.catalog import Catalog, read_catalog
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


class EphemeralTables(NamedTuple):
    """The temporary folder of a test's tables, removed with the process, and datasets' folders."""

    folder: TemporaryDirectory[str]
    places: Mapping[str, str]


_ephemeral: dict[str, EphemeralTables] = {}
"""By their URL, which Dagster's copies of a resource share."""


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

    @classmethod
    def ephemeral(
        cls,
        flow: Flow | str | os.PathLike[str] | None = None,
        *,
        ready: Mapping[str, Iterable[str]] = MappingProxyType({}),
        places: Mapping[str, str | os.PathLike[str]] = MappingProxyType({}),
    ) -> Self:
        """Tables for a test: of its own, and gone with the process.

        They are a file of SQLite in a temporary folder. A job that a run needs and that isn't
        registered is registered by the run. Every dataset is a folder: whatever its place is in
        production, a test neither reads nor writes there.

        Args:
            flow: The datasets and jobs that are registered, or the file that declares them.
            ready: By dataset, chunks that were produced already.
            places: By dataset, its folder; by default one within the temporary folder.
        """
        folder = TemporaryDirectory(prefix="odf-ephemeral-")
        resource = cls(url=f"sqlite:///{folder.name}/dataflow.db")
        given = {datasetid: os.fspath(path) for datasetid, path in places.items()}
        _ephemeral[resource.settings.url] = EphemeralTables(folder, given)
        resource.store.init()
        if flow is not None:
            catalog = catalog_of(flow if isinstance(flow, Flow) else Flow.load(flow))
            for jobid in catalog.jobs:
                resource.register_in_test(catalog, jobid)
        for datasetid, dataids in ready.items():
            resource._add_folder(datasetid, {})
            operations.ready(resource.store, datasetid, list(dataids))
        return resource

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

    def materialize(
        self,
        assets: Sequence[dg.AssetsDefinition],
        partition_key: str | None = None,
        *,
        resources: Mapping[str, Any] = MappingProxyType({}),
        instance: dg.DagsterInstance | None = None,
        **options: Any,
    ) -> dg.ExecuteInProcessResult:
        """Materialize assets in this process, with these tables: for tests.

        Dagster itself refuses a partition that its instance doesn't know; this adds it first.

        Args:
            assets: The assets, such as those of `@dataflow_assets`.
            partition_key: The chunk; without one, all that can be claimed now are made.
            resources: What the assets need besides `dataflow`.
            instance: Dagster's instance, by default an empty one in memory.
            options: What else `dg.materialize` takes, such as `raise_on_error=False`.
        """
        with ExitStack() as stack:
            if instance is None:
                instance = stack.enter_context(dg.DagsterInstance.ephemeral())
            kinds = {asset.partitions_def for asset in assets}
            for kind in kinds if partition_key is not None else ():
                if isinstance(kind, dg.DynamicPartitionsDefinition) and kind.name:
                    instance.add_dynamic_partitions(kind.name, [partition_key])  # pyright: ignore[reportArgumentType]
            return dg.materialize(
                assets,
                partition_key=partition_key,
                resources={RESOURCE_KEY: self, **resources},
                instance=instance,
                **options,
            )

    def register_in_test(self, catalog: Catalog, jobid: str) -> bool:
        """Register a job of a catalog in ephemeral tables; whether these are such."""
        if not (_ephemeral and self.settings.url in _ephemeral):
            return False
        plan = catalog.jobs[jobid]
        for datasetid in (*plan.reads, *plan.outputs):
            self._add_folder(datasetid, catalog.datasets[datasetid].columns)
        registry.add_job(self.store, jobid, plan.inputs, plan.outputs, dict(plan.environment))
        dials = catalog.policies.get(jobid, {})
        registry.set_policy(
            self.store,
            jobid,
            {name: str(value) for name, value in dials.items() if value is not None},
        )
        return True

    def _add_folder(self, datasetid: str, columns: Mapping[str, str | None]) -> None:
        """Register a dataset of ephemeral tables, as a folder of its format, if it isn't yet."""
        if operations.is_registered(self.store, datasetid):
            return
        tables = _ephemeral[self.settings.url]
        place = tables.places.get(datasetid)
        if place is None:
            place = os.path.join(tables.folder.name, quote(datasetid, safe=" "))
        os.makedirs(place, exist_ok=True)
        kept = {name: columns.get(name) for name in ("format", "options")}
        registry.add_dataset(self.store, datasetid, hostname=os.path.abspath(place), **kept)

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
