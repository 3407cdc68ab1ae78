"""Runs the chunks of one pipeline: transforms, records each step, publishes."""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk, ChunkFailed, Result
from ..config.settings import make_folder
from ..errors import DataflowError, SessionError
from ..model import FAILED, READY, RUNNING, Claim, Plan, Say
from ..runner.environment import JobEnvironment
from ..runner.produce import Maker, MakerRunner
from ..runner.script import code_of
from ..spark.progress import working_on
from ..storage.chunks import failing, with_code
from ..storage.folder import is_frame
from ..store.claims import NOTHING_CLAIMABLE, offer
from ..store.history import Step, record
from ..store.items import cleaned_away, live_generations, new_run, payloads
from ..store.store import Store
from ..util.text import first_line, printable, typed
from .destinations import destination_of, publish_result, refuse_loss, refuse_older
from .engine import Engine, ItemRan, Ran, engine_for
from .frames import Source, registered
from .jobs import is_read, output_of
from .project import WORK_FOLDER, Pipeline, Project
from .sources import InMemory, Once, source_of
from .task import dumped, loaded
from .transformation import NO_STREAM, PANDAS, TransformationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


CLEANED = "its payload was cleaned away: post the item again"
"""Why an item can't be produced again."""


MAX_CLAIM_TRIES = 50
"""How often another process may claim a new run before this one gives up."""


class StepRunner:
    """Runs the transformations of one chunk, and records how each of them ended."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        engine: Engine,
        pipeline: Pipeline,
        *,
        say: Say = lambda line: None,
    ) -> None:
        self.store, self.claim, self.engine, self.pipeline = store, claim, engine, pipeline
        self.say = say

    def item(self) -> str | None:
        """The JSON of the chunk's item, if it is one."""
        chunk = self.claim.jobid, [self.claim.dataid]
        texts = payloads(self.store, *chunk)
        if not texts and cleaned_away(self.store, *chunk):
            raise ChunkFailed(CLEANED)
        return texts.get(self.claim.dataid)

    def run(self, sources: Sequence[Source]) -> Any:
        """Return the last transformation's result; each gets its predecessor's result first."""
        names = self.pipeline.transformations
        # Only the first step reads the first source; later ones get the previous result instead.
        shelves = [InMemory(again=bool(at) and len(names) > 1) for at in range(len(sources))]
        frames: list[Any] = [Once(*pair) for pair in zip(sources, shelves, strict=True)]
        try:
            for number, name in enumerate(names, 1):
                frames[:1] = [self.step(number, name, frames).frame]
        finally:
            for shelf in shelves:
                shelf.clear()
        return frames[0]

    def run_item(self, sources: Sequence[Source], item: str) -> Any:
        """Do the same for one item, on its own copies of the sources."""
        began = self.store.now()
        names = self.pipeline.transformations
        with failing():
            [ran] = self.engine.run_items(
                self.pipeline.slug,
                names,
                list(sources),
                [json.loads(item)],
                chained=False,
                limit=self.claim.time_limit,
            )
        record(self.store, steps_of(self.claim, ran, began))
        if not ran.ok:
            for step in ran.steps:
                if not step.ok:
                    say_printed(self.say, step.transformation, step.printed, step.trace)
            raise ChunkFailed(reason_of_item(ran))
        return ran.frame

    def step(
        self,
        number: int,
        name: str,
        frames: Sequence[Any],
        stream: Any = NO_STREAM,
        *,
        keep: Callable[[Any], None] = lambda frame: None,
    ) -> Ran:
        """Run one transformation and record how it ended; a failure raises `ChunkFailed`.

        `keep` stores the frame, and fails the transformation if it can't.
        """
        store, claim = self.store, self.claim
        step = Step(claim.jobid, claim.dataid, claim.generation, number, name, RUNNING, store.now())
        record(store, [step])

        def ended(status: str, **more: Any) -> None:
            record(store, [step._replace(status=status, ended=store.now(), **more)])

        printed = ""
        try:
            ran = self.engine.run(self.pipeline.slug, name, frames, stream)
            printed = ran.printed
            keep(ran.frame)
        except TransformationError as error:
            error.printed = error.printed or printed
            say_printed(self.say, name, error.printed, error.trace)
            ended(FAILED, reason=str(error), stdout=error.printed, traceback=error.trace)
            raise ChunkFailed(f"{name}: {error}") from error
        except SessionError as error:  # not the fault of any chunk
            ended(FAILED, reason=str(error), stdout=printed)
            raise
        except DataflowError as error:  # a source's: sources are read on demand
            ended(FAILED, reason=with_code(error), stdout=printed)
            raise ChunkFailed(with_code(error)) from error
        except BaseException as error:
            with suppress(Exception):  # a cancellation doesn't wait for the history
                ended(FAILED, reason=f"interrupted: {first_line(error)}")
            raise
        ended(READY, rows=ran.rows, stdout=ran.printed)
        of = len(self.pipeline.transformations)
        many = "1 row" if ran.rows == 1 else f"{ran.rows} rows"
        self.say(f"Step {number} of {of}, {printable(name)}: {many} in {ran.seconds:.1f} s")
        say_printed(self.say, name, ran.printed)
        return ran


def steps_of(claim: Claim, ran: ItemRan, began: float) -> list[Step]:
    """The history of an item whose transformations began at a time of the database's clock."""
    history = []
    for number, step in enumerate(ran.steps, 1):
        ended = began + step.seconds
        history.append(
            Step(
                claim.jobid,
                claim.dataid,
                claim.generation,
                number,
                step.transformation,
                READY if step.ok else FAILED,
                began,
                ended,
                step.rows,
                step.printed,
                step.trace or None,
                step.reason or None,
            )
        )
        began = ended
    return history


def reason_of_item(ran: ItemRan) -> str:
    """Return why an item failed: the transformation, and its error in a line."""
    for step in ran.steps:
        if not step.ok:
            return f"{step.transformation}: {step.reason}"
    return "it ended without a result"


def say_printed(say: Say, name: str, printed: str, trace: str = "") -> None:
    """Report what a transformation printed, and its traceback."""
    if printed.strip():
        say(f"{printable(name)} printed:")
        for line in printed.strip("\n").splitlines():
            say(f"    {printable(line)}")
    for line in trace.rstrip("\n").splitlines():
        say(f"    {printable(line)}")


# --- the chunks of one pipeline, one after the other ---


def code_of_pipeline(project: Project, pipeline: Pipeline) -> str | None:
    """Return the version of the files of a pipeline's transformations."""
    names = pipeline.transformations
    return code_of([str(project.transformation_file(pipeline.slug, name)) for name in names])


class PipelineWork(Maker):
    """Produces the chunks of one pipeline: publishes the result of its last transformation."""

    def __init__(
        self,
        store: Store,
        project: Project,
        plans: Mapping[str, Plan],
        slug: str,
        engine: Engine,
        *,
        say: Say = lambda line: None,
    ) -> None:
        super().__init__(self.compute, self.publish)
        self.store, self.project, self.engine, self.say = store, project, engine, say
        self.pipeline, self.plan = project.pipeline(slug), plans[slug]
        self.code = code_of_pipeline(project, self.pipeline)
        self.destination = destination_of(
            store,
            project,
            self.pipeline,
            self.plan,
            read_by_others=is_read(project, plans, slug),
            say=say,
        )
        self._chunk: Chunk | None = None
        self._begun = 0.0
        self._frames: dict[int, tuple[Any, bool]] = {}
        """By generation: the last transformation's result, and whether it is an item's."""

    def begin(self, chunk: Chunk) -> None:
        """Begin the work on a chunk, and start the session: its start counts for no step."""
        with failing(), self.engine.watched(self.pipeline.slug):
            self._chunk, self._begun = chunk, time.monotonic()

    def why_stop(self) -> str | None:
        """Return why the work on the current chunk has to end: its time limit, or a lost claim."""
        if (chunk := self._chunk) is None:
            return None
        limit = chunk.claim.time_limit
        if limit is not None and time.monotonic() - self._begun > limit:
            return f"its time limit of {limit:g} s"
        return None if chunk.alive() else "another worker that has its claim"

    def compute(self, chunk: Chunk) -> Result:
        """Run the transformations of a chunk, and keep the last one's result."""
        with working_on([chunk.claim]):
            self.begin(chunk)
            buffer = Buffer(self.project, self.pipeline.slug, chunk.generation)
            buffer.sweep(live_generations(self.store, self.pipeline.slug))
            steps = StepRunner(self.store, chunk.claim, self.engine, self.pipeline, say=self.say)
            item = steps.item()
            if item is None:
                with failing():
                    refuse_older(self.store, self.destination, chunk)
                    self.refuse_loss()
            sources = open_sources(self.store, self.project, self.pipeline, chunk)
            frame = steps.run(sources) if item is None else steps.run_item(sources, item)
        self._frames[chunk.generation] = frame, item is not None
        return Result()

    def refuse_loss(self) -> None:
        """Refuse a run that would overwrite what items appended to a file."""
        refuse_loss(self.project, self.pipeline, self.destination)

    def publish(self, chunk: Chunk) -> Result:
        """Write the destination, and `output/<slug>.csv` unless the chunk is an item."""
        frame, is_item = self._frames[chunk.generation]

        with failing(), self.engine.telling(), working_on([chunk.claim]):
            return publish_result(
                self.store,
                self.project,
                self.pipeline,
                self.destination,
                frame,
                chunk,
                is_item=is_item,
                say=self.say,
            )

    def forget(self, claim: Claim) -> None:
        self._frames.pop(claim.generation, None)
        self.engine.release()
        self._chunk = None

    def interrupt(self) -> None:
        self.engine.interrupt()

    def close(self) -> None:
        self.engine.close()


class PipelineRunner(MakerRunner[PipelineWork]):
    """Runs one pipeline: its claimable chunks, or a new run if it has no upstream inputs."""

    awaits_others = False  # items that are RUNNING belong to `odf serve`

    def __init__(
        self,
        store: Store,
        project: Project,
        plans: Mapping[str, Plan],
        slug: str,
        session: Callable[[], "SparkSession"],
        *,
        say: Say,
        environ: Mapping[str, str],
        items: bool = False,
        begins: bool = True,
    ) -> None:
        super().__init__(store, slug, [slug], say=say, environ=environ)
        self._root, self._items, self._begun = not plans[slug].reads, items, False
        self._begins = begins
        engine = engine_for(
            project,
            session,
            say=self.tell,
            stopping=lambda: self.stopping() or self.work.why_stop(),
        )
        self.work = PipelineWork(store, project, plans, slug, engine, say=say)

    def at_once(self) -> int:
        """One: each run of a pipeline reads its sources as they are when it begins."""
        return 1

    def claim(self, owner: str, k: int = 1) -> tuple[list[Claim], JobEnvironment] | None:
        environment = self.environment()
        if not self._root:
            claimed = super().claim(owner, k)
        else:
            claims = self._next(owner)
            claimed = (claims, environment) if claims else None
        if claimed is None and not self._begun:
            obstacle = offer(self.store, self.jobid).obstacle
            self.tell(f"{self.jobid}: {printable(obstacle)}; see `odf why {typed(self.jobid)}`")
            if obstacle == NOTHING_CLAIMABLE:
                for line in unread(self.store, self.work.project, self.work.plan):
                    self.tell(line)
        self._begun = True
        return claimed

    def _next(self, owner: str) -> list[Claim]:
        """Return the next waiting chunk; if there is none, a new run, but only once."""
        self.store.recover(self.jobid)
        for _ in range(MAX_CLAIM_TRIES):
            dataid = self._waiting()
            if dataid is None:
                if self._begun or not self._begins:
                    return []
                self.work.refuse_loss()
                dataid = new_run(self.store, self.jobid)
            if claims := self.store.claim(self.jobid, owner=owner, only=dataid):
                return claims
            if self._waiting() == dataid:  # paused, or at its concurrency limit
                return []
        return []

    def _waiting(self) -> str | None:
        db = self.store.db
        rows = db.fetch("pipelines.waiting", jobid=self.jobid, items=self._items)
        return rows[0][0] if rows else None


def open_sources(store: Store, project: Project, pipeline: Pipeline, chunk: Chunk) -> list[Source]:
    """Return the sources of a pipeline for a chunk, in declared order; nothing is read yet."""
    return [
        source_of(store, project, slug, chunk.inputs.get(slug), chunk.dataid)
        for slug in pipeline.sources
    ]


def unread(store: Store, project: Project, plan: Plan) -> Iterator[str]:
    """Yield a line for each file in sources/ that isn't read: a pipeline writes that source."""
    for slug in plan.inputs:
        file = project.source_file(slug)
        makers = [pipeline.slug for pipeline in project.pipelines if output_of(pipeline) == slug]
        if makers and file.is_file() and registered(store, slug, project.root) is None:
            yield printable(
                f"{file.relative_to(project.root)} isn't read: pipeline {makers[0]!r} produces it. "
                f"Run: odf pipeline run {typed(makers[0])}"
            )


# The frame that one step of a run passes to the next, which may be in another process.


MAX_ORDERED_PARTS = 200
"""Parts of a frame whose order is kept: the plan that restores it grows with them."""


class Buffer:
    """The folder of one claim in which the steps of its run store their results.

    A pandas frame is pickled, with its exact index and types. A Spark frame is Parquet that its
    executors write and read: on a cluster they share the folder. Its columns are named 0, 1, …
    there, since Parquet can't hold every name; the names are stored beside it.
    """

    def __init__(self, project: Project, slug: str, generation: int) -> None:
        self._project = project
        self.home = project.root / WORK_FOLDER / slug
        self.folder = self.home / str(generation)

    def keep(self, number: int | str, frame: Any) -> None:
        """Store the frame of step `number`."""
        if is_frame(frame):
            self.write(f"{number}.pickle", dumped(frame, self._project.root))
            return
        rows = frame.toDF(*map(str, range(len(frame.columns))))
        rows.write.mode("overwrite").parquet(f"file://{self.folder / f'{number}.parquet'}")
        self.write(f"{number}.columns", json.dumps(frame.columns).encode())

    def frame(self, number: int | str, session: Callable[[], "SparkSession"]) -> Any:
        """Return the frame of step `number`."""
        pickled = self.folder / f"{number}.pickle"
        if pickled.exists():
            return loaded(pickled.read_bytes(), self._project.root)
        columns = json.loads((self.folder / f"{number}.columns").read_bytes())
        return _in_order(session(), self.folder / f"{number}.parquet").toDF(*columns)

    def write(self, name: str, data: bytes) -> None:
        """Store something else for later steps."""
        try:
            make_folder(self.folder)
            (self.folder / name).write_bytes(data)
        except OSError as error:
            raise DataflowError(
                f"The frame between two steps can't be kept in {self.folder}: {error.strerror}. "
                "Make room there, or make that folder writable."
            ) from None

    def drop(self, number: int) -> None:
        """Remove what the next step and later ones don't need."""
        for path in self.folder.glob(f"{number}.*"):
            _remove(path)

    def clear(self) -> None:
        """Remove everything of this claim; the run is over."""
        _remove(self.folder)

    def sweep(self, alive: Collection[int]) -> None:
        """Remove what killed runs have left: everything of claims that aren't `alive`."""
        with suppress(OSError):
            for name in os.listdir(self.home):
                if name.isdigit() and int(name) not in alive:
                    _remove(self.home / name)


class InBuffer:
    """The shelf of one source in the folder of a claim, where later steps find it."""

    def __init__(
        self, buffer: Buffer, at: int, session: Callable[[], "SparkSession"], *, again: bool
    ) -> None:
        self._buffer, self._session, self._again = buffer, session, again
        self._name = f"source {at}"

    @property
    def version(self) -> str | None:
        with suppress(FileNotFoundError):
            return self._path("version").read_text(encoding="utf-8")
        return None

    @version.setter
    def version(self, version: str | None) -> None:
        if version is not None:
            self._buffer.write(f"{self._name}.version", version.encode())

    def has(self, kind: str) -> bool:
        return self._path("pickle" if kind == PANDAS else "columns").exists()

    def frame(self, kind: str) -> Any:
        return self._buffer.frame(self._name, self._session)

    def keep(self, kind: str, frame: Any) -> Any:
        if not self._again:
            return frame
        self._buffer.keep(self._name, frame)
        return frame if kind == PANDAS else self.frame(kind)

    def _path(self, ending: str) -> Path:
        return self._buffer.folder / f"{self._name}.{ending}"


def _in_order(spark: "SparkSession", place: Path) -> Any:
    """Read what was written, in the order of its parts: Spark would read the largest first."""
    parts = sorted(place.glob("part-*.parquet"))
    if not 1 < len(parts) <= MAX_ORDERED_PARTS:
        return spark.read.parquet(f"file://{place}")
    df = spark.read.parquet(f"file://{parts[0]}")
    for part in parts[1:]:
        df = df.union(spark.read.parquet(f"file://{part}"))
    return df


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
