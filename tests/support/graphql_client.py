"""What the UI asks Dagster's webserver, asked by tests: the same GraphQL, word for word."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import requests

ERROR = "__typename ... on PythonError { message stack }"
STATUSES = """
... on DefaultPartitionStatuses {
  materializedPartitions failedPartitions unmaterializedPartitions materializingPartitions
}
"""
EVENT = """
runId timestamp partition
tags { key value }
metadataEntries {
  label
  ... on TextMetadataEntry { text } ... on MarkdownMetadataEntry { mdStr }
  ... on IntMetadataEntry { intValue intRepr } ... on FloatMetadataEntry { floatValue }
  ... on BoolMetadataEntry { boolValue } ... on JsonMetadataEntry { jsonString }
  ... on PathMetadataEntry { path } ... on UrlMetadataEntry { url }
  ... on TimestampMetadataEntry { time: timestamp }
}
"""
T = TypeVar("T")
OVER = {"SUCCESS", "FAILURE", "CANCELED"}
BACKFILL_OVER = {"COMPLETED", "COMPLETED_SUCCESS", "COMPLETED_FAILED", "FAILED", "CANCELED"}


class GraphQLError(AssertionError):
    """The webserver answered, but with an error."""


class Grid(NamedTuple):
    """Keys of an asset's partitions, by the colour that the UI gives them."""

    green: frozenset[str] = frozenset()
    red: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    blue: frozenset[str] = frozenset()

    @property
    def failed_and_missing(self) -> list[str]:
        """What the UI's checkbox "Backfill only failed and missing partitions" selects."""
        return sorted(self.red | self.missing)


class Counts(NamedTuple):
    """What a backfill says about one of its assets."""

    targeted: int
    in_progress: int
    materialized: int
    failed: int


class Event(NamedTuple):
    """A materialization or an observation."""

    run: str
    partition: str | None
    tags: dict[str, str]
    metadata: dict[str, Any]


class Client:
    """A webserver's GraphQL, for one code location."""

    def __init__(self, url: str, location: str) -> None:
        self.url = url
        self.location = location
        self._session = requests.Session()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def repository(self) -> dict[str, str]:
        """The selector of the location's only repository."""
        return {"repositoryName": "__repository__", "repositoryLocationName": self.location}

    def ask(self, query: str, /, timeout: float = 60, **variables: Any) -> Any:
        """Return the only field that a query asks for; raise if it or anything is an error."""
        answer = self._session.post(
            f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=timeout
        ).json()
        if answer.get("errors"):
            raise GraphQLError(str(answer["errors"])[:3000])
        [value] = answer["data"].values()
        kind = value.get("__typename", "") if isinstance(value, dict) else ""
        if kind.endswith(("Error", "Failure", "NotFound", "Invalid", "Conflict")):
            raise GraphQLError(str(value)[:3000])
        return value

    def page(self, path: str = "/") -> int:
        """The HTTP status of a page of the UI."""
        return self._session.get(self.url + path, timeout=60).status_code

    # code locations

    def location_problem(self) -> str | None:
        """Return why the location isn't loaded; None if it is."""
        entry = self.ask(
            "query($name: String!) { workspaceLocationEntryOrError(name: $name) { __typename "
            "... on WorkspaceLocationEntry { loadStatus locationOrLoadError { "
            + ERROR
            + " } } } }",
            name=self.location,
        )
        if entry is None:
            return "no such location"
        where = entry["locationOrLoadError"]
        if entry["loadStatus"] != "LOADED" or where is None:
            return entry["loadStatus"]
        return where["message"] if where["__typename"] == "PythonError" else None

    def reload_location(self) -> None:
        """Press Reload."""
        self.ask(
            "mutation($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) "
            "{ "
            + ERROR
            + " ... on WorkspaceLocationEntry { id locationOrLoadError { "
            + ERROR
            + " } } } }",
            name=self.location,
        )

    def assets(self) -> list[str]:
        """Keys of all assets that the location defines, as paths."""
        nodes = self.ask("{ assetNodes { assetKey { path } } }")
        return sorted("/".join(node["assetKey"]["path"]) for node in nodes)

    # partitions

    def grid(self, asset: str) -> Grid:
        """The partitions of an asset, as its page's grid gets them."""
        node = self.ask(
            "query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { __typename "
            "... on AssetNode { assetPartitionStatuses { __typename " + STATUSES + "} } } }",
            key=key(asset),
        )
        found = node["assetPartitionStatuses"]
        green, red, other, blue = (
            frozenset(found[name + "Partitions"])
            for name in ("materialized", "failed", "unmaterialized", "materializing")
        )
        return Grid(green, red, other - red - blue, blue)

    def partitions(self, asset: str) -> list[str]:
        """Partition keys of an asset, in the order of the UI."""
        node = self.ask(
            "query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { __typename "
            "... on AssetNode { partitionKeys } } }",
            key=key(asset),
        )
        return node["partitionKeys"]

    def latest(self, asset: str, partitions: Sequence[str] | None = None) -> dict[str, Event]:
        """The latest materialization of each partition."""
        node = self.ask(
            "query($key: AssetKeyInput!, $only: [String!]) { assetNodeOrError(assetKey: $key) { "
            "__typename ... on AssetNode { latestMaterializationByPartition(partitions: $only) { "
            + EVENT
            + "} } } }",
            key=key(asset),
            only=partitions,
        )
        found = [event(each) for each in node["latestMaterializationByPartition"] if each]
        return {each.partition or "": each for each in found}

    def materializations(self, asset: str, partition: str, limit: int = 100) -> list[Event]:
        """All materializations of a partition, the latest first."""
        node = self.ask(
            "query($key: AssetKeyInput!, $only: [String!], $limit: Int) { "
            "assetNodeOrError(assetKey: $key) { __typename ... on AssetNode { "
            "assetMaterializations(partitions: $only, limit: $limit) { " + EVENT + "} } } }",
            key=key(asset),
            only=[partition],
            limit=limit,
        )
        return [event(each) for each in node["assetMaterializations"]]

    def stale_status(self, asset: str, partition: str) -> str:
        """Return what lineage says about a partition: FRESH, STALE or MISSING."""
        node = self.ask(
            "query($key: AssetKeyInput!, $partition: String!) { assetNodeOrError(assetKey: $key) { "
            "__typename ... on AssetNode { staleStatus(partition: $partition) } } }",
            key=key(asset),
            partition=partition,
        )
        return node["staleStatus"]

    def told_by(self, run: str, asset: str, partition: str) -> Event:
        """What a run reported about a partition; a slow tick may have reported it since, too."""
        [told] = [each for each in self.materializations(asset, partition) if each.run == run]
        return told

    def add_partition(self, name: str, partition: str) -> None:
        """Add a key, as the UI's dialog "Add a partition" does."""
        self.ask(
            "mutation($name: String!, $key: String!, $where: RepositorySelector!) { "
            "addDynamicPartition(partitionsDefName: $name, partitionKey: $key, "
            "repositorySelector: $where) { " + ERROR + " } }",
            name=name,
            key=partition,
            where=self.repository,
        )

    def delete_partitions(self, name: str, partitions: Sequence[str], wipe: bool = False) -> None:
        """Delete keys; with `wipe`, what was reported of them too."""
        self.ask(
            "mutation($name: String!, $keys: [String!]!, $where: RepositorySelector!, "
            "$wipe: Boolean) { deleteDynamicPartitions(partitionsDefName: $name, "
            "partitionKeys: $keys, repositorySelector: $where, wipeMaterializations: $wipe) { "
            + ERROR
            + " } }",
            name=name,
            keys=list(partitions),
            where=self.repository,
            wipe=wipe,
        )

    def wipe(self, *assets: str) -> None:
        """Forget all materializations of assets: "Wipe materializations" in the UI."""
        self.ask(
            "mutation($what: [PartitionsByAssetSelector!]!) { "
            "wipeAssets(assetPartitionRanges: $what) { __typename "
            "... on UnsupportedOperationError { message } ... on PythonError { message } } }",
            what=[{"assetKey": key(asset)} for asset in assets],
        )

    def report(self, asset: str, partitions: Sequence[str] = ()) -> None:
        """Report materializations without a run: "Report materialization events" in the UI."""
        self.ask(
            "mutation($what: ReportRunlessAssetEventsParams!) { "
            "reportRunlessAssetEvents(eventParams: $what) { " + ERROR + " } }",
            what={
                "eventType": "ASSET_MATERIALIZATION",
                "assetKey": key(asset),
                "partitionKeys": list(partitions) or None,
            },
        )

    # runs

    def launch(
        self,
        assets: Iterable[str],
        partition: str | None = None,
        *,
        through: str | None = None,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        job: str = "__ASSET_JOB",
    ) -> str:
        """Launch a run of assets and return its id: of one partition, or the range `through`."""
        tags = dict(tags or {})
        if partition is not None and through is None:
            tags["dagster/partition"] = partition
        elif partition is not None and through is not None:
            tags["dagster/asset_partition_range_start"] = partition
            tags["dagster/asset_partition_range_end"] = through
        answer = self.ask(
            "mutation($what: ExecutionParams!) { launchRun(executionParams: $what) { "
            + ERROR
            + " ... on InvalidSubsetError { message } ... on RunConfigValidationInvalid "
            "{ errors { message } } ... on LaunchRunSuccess { run { id } } } }",
            what={
                "selector": {
                    **self.repository,
                    "jobName": job,
                    "assetSelection": [key(asset) for asset in assets],
                },
                "runConfigData": config or {},
                "executionMetadata": {"tags": pairs(tags)},
            },
        )
        return answer["run"]["id"]

    def terminate(self, run: str, *, now: bool = False) -> None:
        """Terminate a run; `now` is the UI's "force termination"."""
        self.ask(
            "mutation($run: String!, $policy: TerminateRunPolicy) { "
            "terminateRun(runId: $run, terminatePolicy: $policy) { "
            + ERROR
            + " ... on TerminateRunFailure { message } } }",
            run=run,
            policy="MARK_AS_CANCELED_IMMEDIATELY" if now else "SAFE_TERMINATE",
        )

    def delete_run(self, run: str) -> None:
        """Delete a run and its events."""
        self.ask("mutation($run: String!) { deleteRun(runId: $run) { " + ERROR + " } }", run=run)

    def run(self, run: str) -> dict[str, Any]:
        """Status, tags and steps of a run."""
        found = self.ask(
            "query($run: ID!) { runOrError(runId: $run) { __typename ... on Run { id status "
            "tags { key value } assetSelection { path } startTime endTime canTerminate } } }",
            run=run,
        )
        return found | {"tags": {tag["key"]: tag["value"] for tag in found["tags"]}}

    def run_status(self, run: str) -> str:
        """The status of a run."""
        return self.run(run)["status"]

    def runs(self, *statuses: str, tags: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Runs, the latest first, by status and tags."""
        found = self.ask(
            "query($filter: RunsFilter) { runsOrError(filter: $filter, limit: 1000) { __typename "
            "... on Runs { results { id status tags { key value } } } } }",
            filter={"statuses": list(statuses) or None, "tags": pairs(tags or {}) or None},
        )["results"]
        return [
            each | {"tags": {tag["key"]: tag["value"] for tag in each["tags"]}} for each in found
        ]

    def messages(self, run: str) -> list[str]:
        """What a run's page lists: the type of each event and its message."""
        found = self.ask(
            "query($run: ID!) { logsForRun(runId: $run) { __typename ... on EventConnection { "
            "events { __typename ... on MessageEvent { message eventType } "
            "... on ErrorEvent { error { message cause { message } } } } } } }",
            run=run,
        )["events"]
        return [
            f"{each.get('eventType')} {each.get('message')} {each.get('error') or ''}"
            for each in found
        ]

    def finished(self, run: str, timeout: float = 60) -> str:
        """Wait for the end of a run and return how it ended."""
        what = f"run {run} ends"
        return wait_for(lambda: self.run_status(run), OVER.__contains__, timeout, what)

    # backfills

    def backfill(
        self,
        assets: Iterable[str],
        partitions: Sequence[str] | None,
        *,
        ranges: Iterable[tuple[str, str]] = (),
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Launch a backfill of partitions, or all (None), or `ranges` of keys; return its id."""
        keys = [key(asset) for asset in assets]
        spans = [{"start": start, "end": end} for start, end in ranges]
        what: dict[str, Any] = {"tags": pairs(tags or {})}
        if spans:
            what["partitionsByAssets"] = [
                {"assetKey": each, "partitions": {"ranges": spans}} for each in keys
            ]
        elif partitions is None:
            what |= {"assetSelection": keys, "allPartitions": True}
        else:
            what |= {"assetSelection": keys, "partitionNames": list(partitions)}
        answer = self.ask(
            "mutation($what: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: "
            "$what) { " + ERROR + " ... on PartitionKeysNotFoundError { message } "
            "... on InvalidSubsetError { message } ... on LaunchBackfillSuccess { backfillId } } }",
            what=what,
        )
        return answer["backfillId"]

    def backfill_status(self, backfill: str) -> str:
        """The status of a backfill."""
        return self._backfill(backfill, "status")["status"]

    def backfill_counts(self, backfill: str) -> dict[str, Counts]:
        """Return a backfill page's counts for each asset."""
        found = self._backfill(
            backfill,
            "assetBackfillData { assetBackfillStatuses { ... on AssetPartitionsStatusCounts { "
            "assetKey { path } numPartitionsTargeted numPartitionsInProgress "
            "numPartitionsMaterialized numPartitionsFailed } } }",
        )["assetBackfillData"]
        return {
            "/".join(each["assetKey"]["path"]): Counts(
                each["numPartitionsTargeted"],
                each["numPartitionsInProgress"],
                each["numPartitionsMaterialized"],
                each["numPartitionsFailed"],
            )
            for each in found["assetBackfillStatuses"]
            if each
        }

    def backfill_runs(self, backfill: str) -> list[str]:
        """Ids of a backfill's runs."""
        return [each["id"] for each in self._backfill(backfill, "runs { id }")["runs"]]

    def backfill_finished(self, backfill: str, timeout: float = 60) -> str:
        """Wait for the end of a backfill and return how it ended."""
        what = f"backfill {backfill} ends"
        look: Callable[[], str] = lambda: self.backfill_status(backfill)  # noqa: E731
        return wait_for(look, BACKFILL_OVER.__contains__, timeout, what)

    def cancel_backfill(self, backfill: str) -> None:
        """Cancel a backfill and its runs."""
        self.ask(
            "mutation($id: String!) { cancelPartitionBackfill(backfillId: $id) { " + ERROR + " } }",
            id=backfill,
        )

    def _backfill(self, backfill: str, fields: str) -> dict[str, Any]:
        return self.ask(
            "query($id: String!) { partitionBackfillOrError(backfillId: $id) { "
            + ERROR
            + " ... on PartitionBackfill { "
            + fields
            + " } } }",
            id=backfill,
        )

    # sensors and schedules

    def sensors(self) -> dict[str, str]:
        """Return RUNNING or STOPPED for each sensor."""
        found = self.ask(
            "query($where: RepositorySelector!) { sensorsOrError(repositorySelector: $where) { "
            + ERROR
            + " ... on Sensors { results { name sensorState { status } } } } }",
            where=self.repository,
        )
        return {each["name"]: each["sensorState"]["status"] for each in found["results"]}

    def start_sensor(self, name: str) -> None:
        """Switch a sensor on."""
        self.ask(
            "mutation($which: SensorSelector!) { startSensor(sensorSelector: $which) { "
            + ERROR
            + " } }",
            which={**self.repository, "sensorName": name},
        )

    def stop_sensor(self, name: str) -> None:
        """Switch a sensor off, until it stays off.

        Dagster loses the switch when a tick ends at this moment: the daemon writes back the
        sensor's whole state as it was when it read it.
        """
        for _ in range(5):
            state = self._sensor(name, "id sensorState { id }")["sensorState"]
            self.ask(
                "mutation($id: String!) { stopSensor(id: $id) { " + ERROR + " } }", id=state["id"]
            )
            time.sleep(0.2)
            if self.sensors()[name] == "STOPPED":
                return
        raise AssertionError(f"sensor {name} can't be stopped")

    def ticks(self, name: str, limit: int = 20) -> list[dict[str, Any]]:
        """Ticks of a sensor, the latest first."""
        fields = (
            "sensorState { ticks(limit: " + str(limit) + ") { tickId status timestamp endTimestamp "
            "runIds skipReason cursor error { message stack cause { message } } } }"
        )
        return self._sensor(name, fields)["sensorState"]["ticks"]

    def next_tick(self, name: str, timeout: float = 40) -> dict[str, Any]:
        """Wait for the end of a tick that begins after this call, and return it."""
        asked = time.time()

        def look() -> dict[str, Any] | None:
            return next(iter(self.ticks(name, 1)), None)

        return wait_for(
            look,
            lambda tick: tick and tick["timestamp"] >= asked and tick["status"] != "STARTED",
            timeout,
            f"sensor {name} ticks",
        )

    def _sensor(self, name: str, fields: str) -> dict[str, Any]:
        return self.ask(
            "query($which: SensorSelector!) { sensorOrError(sensorSelector: $which) { "
            + ERROR
            + " ... on Sensor { "
            + fields
            + " } } }",
            which={**self.repository, "sensorName": name},
        )

    # asset checks

    def checks(self, asset: str, check: str, limit: int = 100) -> list[dict[str, Any]]:
        """Evaluations of an asset's check, the latest first."""
        return self.ask(
            "query($key: AssetKeyInput!, $check: String!, $limit: Int!) { "
            "assetCheckExecutions(assetKey: $key, checkName: $check, limit: $limit) { "
            "status partition runId evaluation { success severity description } } }",
            key=key(asset),
            check=check,
            limit=limit,
        )


def wait_for(
    look: Callable[[], T],
    wanted: Callable[[T], Any] = bool,
    timeout: float = 30,
    what: str = "it",
    every: float = 0.1,
) -> T:
    """Look until what is seen is `wanted`, and return it; the error says what was seen last.

    The longer it takes, the more seldom it looks: each look is work for whoever is waited for.
    """
    timeout *= 2  # where something else keeps the machine busy
    began = time.monotonic()
    while True:
        seen: Any
        try:
            seen = look()
            if wanted(seen):
                return seen
        except requests.RequestException as error:  # the webserver is starting, or was killed
            seen = error
        waited = time.monotonic() - began
        if waited > timeout:
            raise AssertionError(f"{what}: not within {timeout} s. Seen last: {seen!r}")
        time.sleep(max(every, min(waited / 20, 1.0)))


def key(asset: str) -> dict[str, list[str]]:
    """An asset's key, from its path."""
    return {"path": asset.split("/")}


def pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as GraphQL takes them."""
    return [{"key": name, "value": value} for name, value in tags.items()]


def event(found: Mapping[str, Any]) -> Event:
    """An event, from what the webserver says of it."""
    return Event(
        found["runId"],
        found["partition"],
        {tag["key"]: tag["value"] for tag in found["tags"]},
        dict(entries(found["metadataEntries"])),
    )


def entries(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Names and values of metadata."""
    for entry in found:
        rest = [value for name, value in entry.items() if name not in ("label", "intRepr")]
        yield entry["label"], rest[0] if rest else None
