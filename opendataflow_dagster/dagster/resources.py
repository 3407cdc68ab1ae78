"""The tables as a Dagster resource, and what a code location needs in them.

The resource is configured, or the one that `odf` would use here. What the tables lack for a code
location is registered if the settings say so, and reported otherwise.
"""

import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import lru_cache
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import dagster as dg

from ..config.credentials import hand_on_by_multiprocessing, take_passkey
from ..config.settings import BUILT_IN, FOLDER, Settings, load_settings, make_folder
from ..errors import DataflowError, NoDatabase
from ..flow.apply import apply_flow
from ..flow.catalog import catalog_of
from ..flow.flow import FILE, Flow, refuse_without_flow, settings_of
from ..flow.flow import VARIABLE as TARGET_VARIABLE
from ..flow.plan import ADD, FlowPlan, plan_flow
from ..model import Plan
from ..store import open_from, operations, registry
from ..store.catalog import Catalog, read_catalog, read_jobs
from ..store.store import Store, is_registered
from ..util.text import first_line, first_of, printable

RESOURCE_KEY = "dataflow"
"""The key of the resource with the tables."""

PYSPARK_KEY = "pyspark"
"""The key of the resource with the Spark session, in a project that brings its own."""

FILL_SECONDS = 20.0
"""Seconds a tick may spend on the chunks of jobs that it just registered; later ticks finish."""

MAX_NAMED_JOBS = 5

_log = logging.getLogger("opendataflow_dagster")
_lock = threading.Lock()
_stores: dict[tuple, Store] = {}
_kept: dict[str, str] = {}


class EphemeralTables(NamedTuple):
    """A test's temporary folder for the tables, removed with the process, and datasets' folders."""

    folder: TemporaryDirectory[str]
    places: Mapping[str, str]


_ephemeral: dict[str, EphemeralTables] = {}
"""By URL, which Dagster's copies of a resource share."""


# A code location imports this before its own code, and a run before its functions.
take_passkey()
hand_on_by_multiprocessing()


class DataflowResource(dg.ConfigurableResource):
    """The tables of OpenDataFlow, as a Dagster resource.

    Fields that aren't set come from where `odf` reads them: the target of `./flow.yml` that
    DATAFLOW_TARGET names, the environment, `dataflow.properties`, or else SQLite in `./.dataflow/`.

    Attributes:
        url: The database, such as `postgresql://host/db` or `sqlite:///flow.db`.
        schema_: The schema of the tables on PostgreSQL.
        user: The user of the database.
        config: The path of `dataflow.properties`.
        timezone: The time zone in which days begin, for jobs that read `today`.

    Example:
        dataflow = DataflowResource(url=dg.EnvVar("DATAFLOW_URL"))
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
        """Create tables for a test, which are removed with the process.

        They are an SQLite file in a temporary folder. A run registers its job if it isn't
        registered yet. Every dataset is a folder: whatever its place is in production, a test
        neither reads nor writes there.

        Args:
            flow: The datasets and jobs to register, or the file that declares them.
            ready: By dataset, chunks that are READY from the start.
            places: By dataset, its folder; by default, one in the temporary folder.

        Example:
            dataflow = DataflowResource.ephemeral("flow.yml", ready={"sales": ["2026-03-01"]})
            assert dataflow.materialize([check], partition_key="2026-03-01").success
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
        if os.environ.get(TARGET_VARIABLE) and not (given or _value(self.config)):
            return _settings_of_target()
        return load_settings(_value(self.config), {**os.environ, **given})

    @property
    def store(self) -> Store:
        """The store, opened on first use and shared by all threads and steps of a process."""
        return self.patient_store()

    def patient_store(self, patience: float | None = None) -> Store:
        """The store, with a limit in seconds on how long it waits during a database outage."""
        found = self.settings
        key = (found.url, found.user, found.encrypted, found.schema, found.timezone, patience)
        with _lock:
            if key not in _stores:
                _stores[key] = open_from(found)
                if patience is not None:
                    _stores[key].db.patience = patience
            return _stores[key]

    def catalog(self) -> Catalog:
        """What is registered now; during a database outage, the result of the last read.

        So Dagster's pages open during an outage, too.
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
            store.db.drop()  # it is read rarely, so no connection stays open for it
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
            partition_key: The chunk; without one, all chunks that can be claimed now are produced.
            resources: Further resources that the assets need.
            instance: Dagster's instance; by default, an empty one in memory.
            options: More arguments of `dg.materialize`, such as `raise_on_error=False`.
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
        """Register a job of a catalog in ephemeral tables; False if these aren't ephemeral."""
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
        """Register a dataset of ephemeral tables as a folder of its format, unless it exists."""
        if is_registered(self.store, datasetid):
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
    """Return a field's value, even before Dagster has resolved its environment variable."""
    return field.get_value() if isinstance(field, dg.EnvVar) else field


def _settings_of_target() -> Settings:
    refuse_without_flow(os.environ[TARGET_VARIABLE])
    return settings_of(_load_flow(os.stat(FILE).st_mtime_ns))


@lru_cache(maxsize=1)
def _load_flow(changed_at: int) -> Flow:
    """The flow of this folder, read again when its file has changed."""
    return Flow.load(FILE)


def _read(store: Store) -> Catalog:
    """Read the catalog; reconnect if the connection is lost."""
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
    """Save what was read, unless it is already saved; a failure to save is ignored."""
    if _kept.get(path) == text and os.path.exists(path):
        return
    # Several code servers write here: each writes its own file and renames it, unseen by readers.
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


class LocationRegistration(NamedTuple):
    """What a code location needs in the tables, as far as its code says."""

    flow: Flow | None = None
    command: str = ""
    """The command that registers the flow."""
    apply: bool | None = None
    """Whether a tick registers what the flow declares; None: only in the embedded SQLite."""
    left_out: Mapping[str, str] = {}
    """Job → why it was left out when the location was loaded."""
    unread: str = ""
    """Why the tables couldn't be read when the location was loaded."""

    def bring_up(self, dataflow: DataflowResource, store: Store) -> str:
        """Register what is missing from the tables, or report it in a line; "" if nothing is.

        This only ever adds: a person has to change what is registered with other values.
        """
        lines = [self._left_out(store)]
        if self.flow is not None:
            try:
                lines.append(self._bring_up(self.flow, dataflow, store))
            except DataflowError as error:
                if isinstance(error, NoDatabase) or store.db.trouble(error):
                    raise
                lines.append(f"Flow {self.flow.name!r} isn't applied: {first_line(error)}.")
        return " ".join(filter(None, lines))

    def _bring_up(self, flow: Flow, dataflow: DataflowResource, store: Store) -> str:
        applies = self._applies(dataflow)
        if _has_no_tables(dataflow):
            if not applies:
                raise NoDatabase(f"{store.db.where} has no tables yet. Run: {self.command}")
            store.init()
        plan, added = plan_flow(store, flow), ""
        if applies and plan.count(ADD):
            done = apply_flow(store, flow, additions=True)
            store.fill(seconds=FILL_SECONDS)
            added = f"Flow {flow.name!r}: {_names(done)} registered. "
            plan = plan_flow(store, flow)
        if not plan.changes:
            return added.rstrip()
        # A person has to resolve conflicts: applying them would be refused.
        command = self.command.replace("apply", "plan", 1) if plan.conflicts else self.command
        return (
            f"{added}The tables differ from flow {flow.name!r}: {plan.summary} "
            f"({_names(plan)}). Run: {command}."
        )

    def _applies(self, dataflow: DataflowResource) -> bool:
        return dataflow.settings.origin == BUILT_IN if self.apply is None else self.apply

    def _left_out(self, store: Store) -> str:
        """Return a line about the jobs that were left out, if any."""
        if self.unread:
            return f"When this code location was loaded, {self.unread}. Reload it."
        if not self.left_out:
            return ""
        there = {jobid for jobid, plan in read_jobs(store).items() if not plan.flaw}
        come = sorted(there & self.left_out.keys())
        lines = [line for jobid, line in sorted(self.left_out.items()) if jobid not in come]
        if come:
            names = ", ".join(map(repr, come))
            lines.append(f"{names}: registered meanwhile. Reload this code location")
        return f"{'. '.join(first_of(lines, MAX_NAMED_JOBS))}."


def refuse_unapplied(dataflow: DataflowResource, catalog: Catalog, jobid: str) -> None:
    """Refuse to run a job whose registration lacks something that its flow declares."""
    if not catalog.registered_by:
        return
    try:
        if dataflow.register_in_test(catalog, jobid):
            return
        lacking = _lacking(dataflow, catalog.jobs[jobid])
    except DataflowError as error:
        lacking = str(error)
        if not (isinstance(error, NoDatabase) and "odf init" in lacking):
            raise dg.Failure(lacking, allow_retries=False) from None
    if lacking:
        raise dg.Failure(f"{lacking} Run: {catalog.registered_by}", allow_retries=False)


def _lacking(dataflow: DataflowResource, wanted: Plan) -> str:
    """Return what a job's registration lacks, as a sentence; additional inputs are allowed."""
    store, job = dataflow.store, f"Job {wanted.jobid!r}"
    if _has_no_tables(dataflow):
        return f"{job} isn't registered: {store.db.where} has no tables yet."
    plan = store.db.insist(lambda: store.read_plan(wanted.jobid))[0]
    if {*wanted.inputs} <= {*plan.inputs} and plan.outputs == wanted.outputs:
        return ""
    if not (plan.inputs or plan.outputs):
        return f"{job} isn't registered in {store.db.where}."
    return (
        f"{job} is registered with {_links(plan)} in {store.db.where}, and its flow says "
        f"{_links(wanted)}."
    )


def _links(plan: Plan) -> str:
    return f"in {', '.join(plan.inputs) or 'nothing'} and out {', '.join(plan.outputs)}"


def _names(plan: FlowPlan) -> str:
    """Return the changes of a plan, briefly: `dataset sales, job check and 3 more`."""
    names = [f"{change.kind} {printable(change.name)}" for change in plan.changes]
    more = f" and {len(names) - MAX_NAMED_JOBS} more" if len(names) > MAX_NAMED_JOBS else ""
    return ", ".join(names[:MAX_NAMED_JOBS]) + more


def _has_no_tables(dataflow: DataflowResource) -> bool:
    """Whether the tables belong in an SQLite file that doesn't exist or is still empty."""
    path = dataflow.settings.url.removeprefix("sqlite:///")
    if path == dataflow.settings.url:
        return False
    if not os.path.exists(path):
        return True
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as db,
    ):
        return db.execute("select count(*) from sqlite_master").fetchone() == (0,)
    return False
