"""Chunks as the values of plain assets: read when READY, published under a claim."""

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from ..chunk import Chunk, ChunkFailed, Place, Result
from ..errors import DataflowError, Refused
from ..explain.answers import by_question
from ..explain.explain import explain
from ..location import DEFAULT_FORMAT, Folder, ObjectStore, Table
from ..model import FAILED, READY, RESUBMIT, Claim, natural_key, new_owner
from ..runner.environment import job_environment
from ..runner.heartbeat import Pulse
from ..runner.produce import Produced, produce
from ..spark.chunks import publish_frame
from ..spark.session import is_spark_frame
from ..storage.chunks import Reading, ask, producers, publish, read, read_chunk, refusal, with_code
from ..store.store import Store
from ..util.text import first_line, first_of, printable, typed
from .events import RESUBMIT_TAG, data_version, prefixed, produced_event, run_log
from .resources import DataflowResource
from .step import interrupted, send_back
from .translator import DataflowTranslator, unescaped_word

MAX_NAMED_CHUNKS = 10
"""Chunks that an error names."""

SCHEMA_METADATA = "opendataflow/schema"
"""Asset metadata that says what to do with a Spark frame whose columns differ."""

_consumed: dict[tuple[str, str], dict[tuple[str, str], int | None]] = {}
"""(run, step) → (dataset, dataid) → the generation that this process read for it."""


class DataflowIOManager(dg.ConfigurableIOManager):
    """Reads and writes chunks for plain assets that are partitioned by their dataset's domain.

    The annotation of an input decides how it is read: as a pandas frame (also without an
    annotation), a Spark frame, an Arrow table, bytes, or the chunk's location as `Path` or `str`.
    Several partitions are concatenated into one frame; `dict[str, …]`, or no annotation, gives them
    by partition key.

    An output is a frame, an Arrow table, bytes, or the Path of the data to publish; for several
    partitions, a dict by partition key. The chunk is claimed when the output is written: a chunk
    that is READY, or claimed by another worker, isn't written.

    Attributes:
        dataflow: The tables.
        pyspark: The resource with the Spark session; without it, the process's own.
        format: The format of files in a folder whose dataset is registered without one.

    Example:
        resources = {"io_manager": DataflowIOManager(dataflow=DataflowResource())}
    """

    dataflow: dg.ResourceDependency[DataflowResource]
    translator: dg.ResourceDependency[DataflowTranslator] = DataflowTranslator()  # type: ignore[assignment]
    pyspark: dg.ResourceDependency[Any] = None  # type: ignore[assignment]
    """The resource with the Spark session; without it, the process's own, as `odf` starts it."""
    format: str = DEFAULT_FORMAT
    """The format of a folder's files, if its dataset is registered without one."""

    def load_input(self, context: dg.InputContext) -> Any:
        with _one_line_failures(self.dataflow.store):
            return self._load(context, self.dataflow.store)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        with _one_line_failures(self.dataflow.store):
            self._publish_all(context, self.dataflow.store, obj)

    def _load(self, context: dg.InputContext, store: Store) -> Any:
        datasetid = self._dataset(context.asset_key, {})
        shape, kind = input_shape(context.dagster_type.typing_type)
        if not context.has_asset_partitions:
            raise Refused(
                f"Input {context.name!r} isn't partitioned, but dataset {datasetid!r} is read "
                "chunk by chunk. Partition the asset like the dataset's domain."
            )
        keys = self._in_order(context.asset_partition_keys)
        found: dict[str, Any] = {}
        readings: dict[str, Reading] = {}
        for key in keys:
            found[key], readings[key] = read_chunk(
                store,
                datasetid,
                self.translator.dataid(key),
                lambda reading: as_input(reading, reading.target(self.format), kind, self._session),
                format=self.format,
            )
        step = context.step_context
        consumed = _consumed.setdefault((step.run_id, step.step.key), {})
        for reading in readings.values():
            consumed[datasetid, reading.dataid] = reading.generation
        if len(keys) == 1:
            context.add_input_metadata(evidence(readings[keys[0]]))
        else:  # Dagster accepts no metadata for an input of several partitions
            context.log.info(consumption_line(datasetid, list(readings.values())))
        if shape == "dict" or (shape == "any" and len(keys) > 1):
            return found
        return found[keys[0]] if len(keys) == 1 else join_chunks(found, kind, context.name)

    def _publish_all(self, context: dg.OutputContext, store: Store, obj: Any) -> None:
        declared = dict(context.definition_metadata or {})
        datasetid = self._dataset(context.asset_key, declared)
        if not context.has_asset_partitions:
            raise Refused(
                f"Asset {context.asset_key.to_user_string()!r} isn't partitioned, but dataset "
                f"{datasetid!r} consists of chunks. Partition the asset like the dataset's domain."
            )
        jobid = _job(store, datasetid, declared)
        keys = self._in_order(context.asset_partition_keys)
        objects = {keys[0]: obj} if len(keys) == 1 else _by_key(obj, keys)
        step = (context.run_id, context.step_key)
        output = _Output(self, context, store, datasetid, jobid, _consumed.get(step, {}))
        bad = {}
        for key in keys:
            try:
                output.publish(key, objects[key])
            except DataflowError as error:
                bad[printable(key)] = with_code(error)
        _consumed.pop(step, None)
        if len(keys) > 1 and bad:
            named = first_of([f"{key}: {bad[key]}" for key in bad], MAX_NAMED_CHUNKS)
            summary = f"{len(bad)} of {len(keys)} chunks of {datasetid!r} weren't published:"
            raise dg.Failure("\n".join([summary, *named]), allow_retries=False)
        if bad:
            raise dg.Failure(next(iter(bad.values())), allow_retries=False)

    def _session(self) -> Any:
        if self.pyspark is not None:
            return self.pyspark.spark_session
        from ..spark.session import spark_session

        return spark_session(app="dagster", settings=self.dataflow.settings)

    def _in_order(self, keys: Iterable[str]) -> list[str]:
        """Sort partition keys by their dataids: Dagster gives them in any order."""
        return sorted(keys, key=lambda key: natural_key(self.translator.dataid(key)))

    def _dataset(self, key: dg.AssetKey, declared: Mapping[str, Any]) -> str:
        """Return the dataset of an asset: as its metadata or its key says."""
        if named := declared.get("opendataflow/dataset"):
            return str(getattr(named, "value", named))
        likely = unescaped_word(key.path[-1])
        if self.translator.asset_key(likely) == key:
            return likely
        for datasetid in self.dataflow.catalog().datasets:
            if self.translator.asset_key(datasetid) == key:
                return datasetid
        raise refusal(
            "NOT_REGISTERED",
            f"no dataset is named like asset {key.to_user_string()!r}",
            f"odf dataset add {typed(likely)} --hostname /FOLDER",
        )


class _Output:
    """An asset's value to be published as chunks of a dataset."""

    def __init__(
        self,
        manager: DataflowIOManager,
        context: dg.OutputContext,
        store: Store,
        datasetid: str,
        jobid: str,
        consumed: Mapping[tuple[str, str], int | None],
    ) -> None:
        self.manager, self.context, self.store = manager, context, store
        self.datasetid, self.jobid, self.consumed = datasetid, jobid, consumed
        self.execution = _execution()
        self.resubmits = context.step_context.run_tags.get(RESUBMIT_TAG, "").lower() == "true"

    def publish(self, key: str, obj: Any) -> None:
        """Claim a chunk, publish it, and make it READY; or raise why that failed."""
        dataid = self.manager.translator.dataid(key)
        # Checked before the claim, since the value was computed without one. `_compare` checks
        # again under the claim, which locks the inputs.
        self._still_the_same(dataid)
        if self.resubmits:
            send_back(self.store, self.jobid, dataid, self.context.run_id)
        plan, runid = self.store.plan(self.jobid), self.context.run_id
        environment, _ = self.store.db.insist(
            lambda: job_environment(self.store, plan, secrets=False)
        )
        owner = f"{new_owner()} of run {runid}"  # so that history names the run

        def claim() -> list[Claim]:
            return self.store.claim_or_recover(self.jobid, owner=owner, only=dataid, runid=runid)

        with Pulse(self.store, owner, runid=runid, jobid=self.jobid, say=self._say) as pulse:
            claims = claim()
            while claims:
                produced = produce(
                    self.store,
                    claims[0],
                    environment,
                    self._compare,
                    pulse=pulse,
                    publish=lambda chunk: self._write(chunk, obj),
                    interrupted=lambda error: interrupted(
                        self.context.step_context.instance, runid, error
                    ),
                )
                # The policy grants another attempt without a delay.
                claims = claim() if produced.status == RESUBMIT else []
                if not claims:
                    self._report(produced, key)
                    return
        raise self._refused(dataid)

    def _write(self, chunk: Chunk, obj: Any) -> dict[str, Result]:
        place = chunk.outputs[self.datasetid]
        store, format = self.store, self.manager.format
        if is_spark_frame(obj):
            obj = self._fit(obj, chunk.dataid)
            say = self.context.log.info
            return {self.datasetid: publish_frame(store, place, chunk, obj, format=format, say=say)}
        return {self.datasetid: publish(store, place, chunk, obj, format=format)}

    def _fit(self, df: Any, dataid: str) -> Any:
        """Fit a Spark frame to the schema of the dataset's last chunk, as the asset declares."""
        from ..spark.evidence import LastChunks, fit
        from ..spark.schema import SAME, SCHEMAS

        declared = (self.context.definition_metadata or {}).get(SCHEMA_METADATA, SAME)
        rule = str(getattr(declared, "value", declared))
        if rule not in SCHEMAS:
            raise ChunkFailed(
                f"{SCHEMA_METADATA} is {rule!r}: choose from {', '.join(map(repr, SCHEMAS))}."
            )
        how = f'give the asset the metadata {{{{"{SCHEMA_METADATA}": "{{}}"}}}}'
        return fit(df, LastChunks(self.store, self.datasetid), dataid, rule, how)

    def _compare(self, chunk: Chunk) -> None:
        """Fail the chunk if the inputs that the claim has locked differ from what was read."""
        for datasetid, place in chunk.inputs.items():
            was = self.consumed.get((datasetid, chunk.dataid), place.generation)
            if was != place.generation:
                raise ChunkFailed(_replaced_text(datasetid, was, place.generation))

    def _still_the_same(self, dataid: str) -> None:
        """Refuse, before a claim, a value that was computed from data since replaced."""
        for (datasetid, read_dataid), was in self.consumed.items():
            if read_dataid == dataid and datasetid in self.store.plan(self.jobid).reads:
                now = ask(self.store, datasetid, dataid, self.manager.format).generation
                if was != now:
                    text = _replaced_text(datasetid, was, now)
                    raise refusal("DATA_NOT_READY", f"{text}: launch the run again")

    def _refused(self, dataid: str) -> Refused:
        answer, _ = self.store.db.insist(lambda: explain(self.store, self.jobid, dataid))
        if not answer.reasons:
            text = f"another worker was about to change chunk {dataid!r} of {self.jobid!r}"
            return refusal("LOCKED", f"{text}: launch the run again")
        first = answer.reasons[0]
        found = refusal(first.code, first.text, answer.action)
        if first.code != "ALREADY_DONE":
            return found
        return Refused(
            f'{found} — or launch with the run tag {RESUBMIT_TAG}: "true". Nothing was written.',
            code=first.code,
        )

    def _report(self, produced: Produced, key: str) -> None:
        """Pass the evidence to Dagster's event, or raise what went wrong."""
        if produced.status != READY:
            if produced.error:
                self.context.log.error("Publishing failed", exc_info=produced.error)
            again = f" It is due again in {produced.retry_in:g} s." if produced.retry_in else ""
            act = f"odf resubmit {typed(self.jobid, produced.claim.dataid)}"
            more = "" if again or produced.status != FAILED else f" Run: {act}"
            raise DataflowError(f"{produced.status}: {produced.reason.rstrip('.')}.{again}{more}")
        [fact] = [fact for fact in produced.facts if fact.datasetid == self.datasetid]
        log = run_log(self.context.run_id)
        event = produced_event(produced, fact, key, self.manager.translator, log)
        if self.execution is None:
            self.context.add_output_metadata(dict(event.metadata))
            return
        asset = self.context.asset_key
        self.execution.add_asset_metadata(event.metadata, asset_key=asset, partition_key=key)
        if len(self.context.asset_partition_keys) == 1:  # a step can report only one version
            version = dg.DataVersion(data_version(fact.fingerprint, produced.claim.generation))
            self.execution.set_data_version(asset, version)

    def _say(self, message: str) -> None:
        self.context.log.warning(message)


def _job(store: Store, datasetid: str, declared: Mapping[str, Any]) -> str:
    """Return the job of an asset: as its metadata says, or the only one that writes the dataset."""
    named, known = declared.get("opendataflow/job"), producers(store, datasetid)
    found = [str(getattr(named, "value", named))] if named else known
    if not found or not set(found) <= set(known):
        who = f"job {found[0]!r} isn't" if found else "no job is"
        name = typed(found[0]) if found else "JOB"
        raise refusal(
            "NOT_REGISTERED",
            f"{who} registered to write {datasetid!r}",
            f"odf job add {name} --in DATASET --out {typed(datasetid)}",
        )
    if len(found) > 1:
        raise Refused(
            f"Jobs {', '.join(map(repr, found))} write {datasetid!r}. Choose the asset's job "
            'with the metadata {"opendataflow/job": "…"}.'
        )
    outputs = store.plan(found[0]).outputs
    if len(outputs) > 1:
        raise Refused(
            f"Job {found[0]!r} writes {', '.join(outputs)}, which become READY together, but an "
            "asset has one value. Use @dataflow_assets for this job."
        )
    return found[0]


def _by_key(obj: Any, keys: list[str]) -> Mapping[str, Any]:
    if isinstance(obj, Mapping) and set(obj) == set(keys):
        return obj
    raise Refused(
        f"The run is for {len(keys)} partitions, and the asset returned a {type(obj).__name__} "
        "that isn't a dict with these partition keys. Return one, or launch a run for each: "
        "backfill_policy=dg.BackfillPolicy.multi_run()."
    )


def _replaced_text(datasetid: str, was: int | None, now: int | None) -> str:
    return (
        f"{datasetid!r} was replaced while this chunk was produced from it: generation "
        f"{was or 'unknown'} was read, and {now or 'another'} is current"
    )


def _execution() -> dg.AssetExecutionContext | None:
    """The running step; None in a test that calls the IO manager directly."""
    try:
        return dg.AssetExecutionContext.get()
    except dg.DagsterInvariantViolationError:
        return None


@contextmanager
def _one_line_failures(store: Store) -> Iterator[None]:
    """Turn errors of the tables, or an outage, into a failure with one clear line."""
    try:
        yield
    except DataflowError as error:
        raise dg.Failure(with_code(error), allow_retries=False) from None
    except Exception as error:
        if store.db.trouble(error) != "gone":
            raise
        reason = f"The database of OpenDataFlow is away: {first_line(error)}. Run: odf doctor"
        raise dg.Failure(reason, allow_retries=False) from None


# A chunk as an asset's input: in the shape that its annotation asks for, with the evidence.


MAX_LOGGED_CHUNKS = 200
"""Chunks of one input that the log lists."""


def input_shape(annotation: Any) -> tuple[str, str]:
    """Return how an annotation wants a chunk (alone, in a `dict`, or `any`), and as which type."""
    origin = typing.get_origin(annotation)
    if annotation in (dict, Mapping) or origin in (dict, Mapping):
        values = typing.get_args(annotation)
        return "dict", input_shape(values[1] if len(values) == 2 else Any)[1]
    if annotation in (None, Any, object):
        return "any", "pandas"
    package = getattr(annotation, "__module__", "").partition(".")[0]
    kinds = {
        ("pandas", "DataFrame"): "pandas",
        ("pyspark", "DataFrame"): "spark",
        ("pyarrow", "Table"): "arrow",
    }
    kind = kinds.get((package, getattr(annotation, "__name__", "")))
    kind = kind or {bytes: "bytes", str: "str"}.get(annotation)
    if kind is None and isinstance(annotation, type) and issubclass(annotation, Path):
        kind = "path"
    if kind is None:
        raise Refused(
            f"A chunk can't be read as {getattr(annotation, '__name__', annotation)}. Annotate the "
            "input as DataFrame of pandas or Spark, pyarrow.Table, bytes, Path, str, or dict."
        )
    return "one", kind


def as_input(
    reading: Reading, target: Folder | ObjectStore | Table, kind: str, session: Callable[[], Any]
) -> Any:
    """Return a chunk in the form that the input wants; Spark starts only for Spark frames."""
    if kind == "spark":
        return _spark(reading, target, session)
    if kind in ("path", "str"):
        place = read(reading, target, "path")
        return Path(place) if kind == "path" else place
    return read(reading, target, kind)


def _spark(
    reading: Reading, target: Folder | ObjectStore | Table, session: Callable[[], Any]
) -> Any:
    from ..spark.chunks import read_chunk_frame

    fact = reading.fact
    place = Place(
        reading.datasetid,
        reading.columns,
        fact.get("location"),
        reading.generation,
        fact.get("rows"),
        fact.get("fingerprint"),
        store=reading.store,
    )
    return read_chunk_frame(
        session(),
        place,
        reading.dataid,
        reading.password,
        lambda: reading.bounds,
        getattr(target, "format", DEFAULT_FORMAT),
    )


def join_chunks(found: Mapping[str, Any], kind: str, name: str) -> Any:
    """Combine several chunks, by their partition keys, into one."""
    parts = list(found.values())
    if kind == "pandas":
        import pandas

        return pandas.concat(parts, ignore_index=True)
    if kind == "arrow":
        import pyarrow

        return pyarrow.concat_tables(parts, promote_options="default")
    if kind == "spark":
        return _unite_frames(found, name)
    raise Refused(
        f"Input {name!r} is {len(parts)} chunks, which can't be combined. Annotate it as "
        "dict[str, …] to get a chunk per partition key."
    )


def _unite_frames(found: Mapping[str, Any], name: str) -> Any:
    """Combine Spark chunks into a frame with the columns of all: a schema may have been merged."""
    from ..spark.schema import compare, fitted, merged, schema_text

    texts = {key: schema_text(part.schema) for key, part in found.items()}
    whole = next(iter(texts.values()))
    for key, text in texts.items():
        if differences := compare(whole, text):
            both = merged(whole, text)
            if both is None:
                raise Refused(
                    f"Input {name!r} is {len(found)} chunks, which can't be combined: in chunk "
                    f"{printable(key)!r}, {'; '.join(differences)}. Annotate it as "
                    "dict[str, DataFrame] to get a chunk per partition key."
                )
            whole = both
    united = None
    for key, part in found.items():
        frame = fitted(part, whole) if compare(whole, texts[key]) else part
        united = frame if united is None else united.unionByName(frame)
    return united


def evidence(reading: Reading) -> dict[str, Any]:
    """Return the metadata of an input: which generation was read, and the five answers about it."""
    entries = {
        "dataset": reading.datasetid,
        "dataid": reading.dataid,
        "generation": reading.generation or 0,
    }
    for name in ("rows", "fingerprint"):
        if reading.fact.get(name) is not None:
            entries[name] = reading.fact[name]
    return prefixed(entries | by_question(reading.answers))


def consumption_line(datasetid: str, readings: list[Reading]) -> str:
    """List the generations that were consumed, in a line."""
    named = [f"{printable(reading.dataid)} ({reading.generation or 0})" for reading in readings]
    listed = ", ".join(first_of(named, MAX_LOGGED_CHUNKS))
    return f"Read {len(readings)} chunks of {datasetid} (generation): {listed}"
