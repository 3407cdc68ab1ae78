"""What several calls of `build_definitions` in one code location share: resources and sensors.

Dagster merges definitions only if things of the same name are the same object. So calls on the same
tables get one resource, one IO manager and one of each sensor. Each call adds a part; its
definitions carry the part's number as metadata, by which a tick finds the parts that were merged.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import dagster as dg

from ..flow.flow import Flow
from ..store.catalog import Catalog
from .events import OutsideOptions
from .io_manager import DataflowIOManager
from .launch import CatchUp, catch_up_of
from .resources import DataflowResource, LocationRegistration
from .sensors import Mirrored, reconcile_sensor, settlement_sensor
from .translator import DataflowTranslator

PART_ENTRY = "opendataflow/part-"
"""The prefix of the metadata that names a part of the definitions."""

_numbers = count(1)
_tables: dict[tuple, "SharedTables"] = {}
"""By the fields of the resource: what calls in this process share."""


class LocationPart(NamedTuple):
    """What one call of `build_definitions` adds to its code location."""

    translator: DataflowTranslator
    catalog: Catalog
    registration: LocationRegistration
    outside: OutsideOptions | None
    catch_up: CatchUp


class SharedTables:
    """The tables of some calls: their resource and sensors, and the parts of these calls."""

    def __init__(self, dataflow: DataflowResource) -> None:
        self.dataflow = dataflow
        self.parts: dict[str, LocationPart] = {}
        self._io_managers: dict[int, tuple[Any, DataflowIOManager]] = {}
        self._catch_up: dict[bool, dg.SensorDefinition] = {}

    @classmethod
    def of(cls, dataflow: DataflowResource) -> "SharedTables":
        """Return the tables shared by all resources with the same fields."""
        key = (type(dataflow), *(repr(dict(dataflow)[name]) for name in sorted(dict(dataflow))))
        return _tables.setdefault(key, cls(dataflow))

    def add(self, part: LocationPart, name: str) -> dict[str, str]:
        """Add a part; return the metadata that marks its definitions."""
        entry = f"{PART_ENTRY}{next(_numbers)}"
        self.parts[entry] = part
        return {entry: name}

    def merged(self, repository: dg.RepositoryDefinition | None) -> list[LocationPart]:
        """Return the parts merged in a code location; without a location, the last part."""
        entries = (repository.metadata if repository else None) or {}
        found = [part for entry, part in self.parts.items() if entry in entries]
        return found or list(self.parts.values())[-1:]

    def io_manager(self, pyspark: Any) -> DataflowIOManager:
        """Return the IO manager of all parts with the same Spark session."""
        if id(pyspark) not in self._io_managers:
            manager = DataflowIOManager(
                dataflow=self.dataflow, translator=LocationTranslator(self.parts), pyspark=pyspark
            )
            self._io_managers[id(pyspark)] = pyspark, manager
        return self._io_managers[id(pyspark)][1]

    def sensors(self, *, automatic: bool) -> list[dg.SensorDefinition]:
        """The sensors: those that follow the tables are on, the one that launches runs is off."""
        return [self._reconcile, self._settlement, self._launching(automatic)]

    @cached_property
    def _reconcile(self) -> dg.SensorDefinition:
        def mirrored(repository: dg.RepositoryDefinition | None) -> Mirrored:
            parts = self.merged(repository)
            names = LocationTranslator({str(number): part for number, part in enumerate(parts)})
            return Mirrored(
                parts[0].translator if len(parts) == 1 else names,
                [part.registration for part in parts],
                next((part.outside for part in parts if part.outside), None),
            )

        return reconcile_sensor(self.dataflow, mirrored=mirrored)

    @cached_property
    def _settlement(self) -> dg.SensorDefinition:
        return settlement_sensor(self.dataflow)

    def _launching(self, automatic: bool) -> dg.SensorDefinition:
        if automatic not in self._catch_up:
            status = dg.DefaultSensorStatus
            self._catch_up[automatic] = catch_up_of(
                lambda repository: [part.catch_up for part in self.merged(repository)],
                LaunchedAssets(lambda: list(self.parts.values())),
                default_status=status.RUNNING if automatic else status.STOPPED,
            )
        return self._catch_up[automatic]


class LocationTranslator(DataflowTranslator):
    """The names in a location: each dataset's come from the last part that has it.

    The last part names partitions: these names are equal for all parts on the same tables.
    """

    def __init__(self, parts: Mapping[str, LocationPart]) -> None:
        self._parts = parts
        windows = [part.translator.window for part in parts.values()]
        sizes = [size for size in windows if size is not None]
        self.window = max(sizes) if sizes and len(sizes) == len(windows) else None

    @property
    def _last(self) -> DataflowTranslator:
        return [*self._parts.values()][-1].translator

    def asset_key(self, datasetid: str) -> dg.AssetKey:
        for part in reversed([*self._parts.values()]):
            if datasetid in part.catalog.datasets:
                return part.translator.asset_key(datasetid)
        return self._last.asset_key(datasetid)

    def partition_key(self, dataid: str) -> str:
        return self._last.partition_key(dataid)

    def dataid(self, partition_key: str) -> str:
        return self._last.dataid(partition_key)

    def partitions_name(self, domain: str) -> str:
        return self._last.partitions_name(domain)

    def partitions_def(self, domain: str) -> dg.PartitionsDefinition:
        return self._last.partitions_def(domain)


class LaunchedAssets(dg.AssetSelection):
    """The assets that the catch-up sensor of a location launches, from all merged parts."""

    def __init__(self, parts: Callable[[], list[LocationPart]]) -> None:
        self._parts = parts

    def resolve_inner(self, asset_graph: Any, allow_missing: bool) -> AbstractSet[dg.AssetKey]:
        there = asset_graph.materializable_asset_keys
        targets = (target for part in self._parts() for target in part.catch_up.jobs.values())
        keys = {
            key
            for target in targets
            if isinstance(target, dg.AssetsDefinition)
            for key in target.keys
        }
        return keys & there


def flows_in(definitions: dg.Definitions) -> list[Flow]:
    """Return the flows from which these merged definitions were built."""
    return [
        part.registration.flow
        for shared in _tables.values()
        for entry, part in shared.parts.items()
        if entry in definitions.metadata and part.registration.flow
    ]
