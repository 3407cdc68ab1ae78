"""`odf pipeline run`: the next chunk of a pipeline, one transformation after the other."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk, Result
from ..config.settings import Settings
from ..errors import DataflowError
from ..model import Claim, Plan, Say
from ..runner.code_version import code_of
from ..runner.environment import JobEnvironment
from ..runner.produce import Maker, MakerRunner
from ..runner.run import Outcome, run_chunks
from ..spark.progress import working_on
from ..storage.files import need
from ..storage.read import failing
from ..store.claimable import NOTHING_CLAIMABLE, offer
from ..store.items import live_generations, new_run
from ..store.store import Store
from ..util.text import first_line, printable, typed
from .datasets import registered
from .destinations import destination_of, publish_result, refuse_loss, refuse_older
from .endpoints import Source
from .engine import Engine
from .jobs import in_order, is_read, makers_of, output_of, register, takes_items
from .project import Pipeline, Project
from .run_steps import Stepping
from .sources import source_of
from .step_frames import Buffer
from .transformation import TransformationError, supported_engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIGNALED = 128
"""Exit codes from here on are those of a run that a signal has stopped."""

TURNS = 50
"""How often a new run may be taken by another process before we have it."""


def code_of_pipeline(project: Project, pipeline: Pipeline) -> str | None:
    """The version of the files of a pipeline's transformations."""
    names = pipeline.transformations
    return code_of([str(project.transformation_file(pipeline.slug, name)) for name in names])


class PipelineWork(Maker):
    """Makes the runs of one pipeline, and publishes what the last transformation returns."""

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
        self._made: dict[int, Any] = {}

    def begin(self, chunk: Chunk) -> None:
        """Begin the work on a chunk, with a session that is there: its start is no step's time."""
        with failing(), self.engine.watched(self.pipeline.slug):
            self._chunk, self._begun = chunk, time.monotonic()

    def why_stop(self) -> str | None:
        """What is to end the work on the chunk in hand, of what is known of it."""
        if (chunk := self._chunk) is None:
            return None
        limit = chunk.claim.time_limit
        if limit is not None and time.monotonic() - self._begun > limit:
            return f"its time limit of {limit:g} s"
        return None if chunk.alive() else "another worker that has its claim"

    def compute(self, chunk: Chunk) -> Result:
        """Run the transformations of a chunk, and keep what the last one returned."""
        with working_on([chunk.claim]):
            self.begin(chunk)
            buffer = Buffer(self.project, self.pipeline.slug, chunk.generation)
            buffer.sweep(live_generations(self.store, self.pipeline.slug))
            stepping = Stepping(self.store, chunk.claim, self.engine, self.pipeline, say=self.say)
            item = stepping.item()
            if item is None:
                with failing():
                    refuse_older(self.store, self.destination, chunk)
                    self.refuse_loss()
            sources = open_sources(self.store, self.project, self.pipeline, chunk)
            frame = stepping.run(sources) if item is None else stepping.run_item(sources, item)
        self._made[chunk.generation] = frame, item is not None
        return Result()

    def refuse_loss(self) -> None:
        """Refuse a run that would take away what items have appended to a file."""
        refuse_loss(self.project, self.pipeline, self.destination)

    def publish(self, chunk: Chunk) -> Result:
        """Write the destination, and of a run that isn't an item's the output for people."""
        frame, is_item = self._made[chunk.generation]

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
        self._made.pop(claim.generation, None)
        self.engine.release()
        self._chunk = None

    def interrupt(self) -> None:
        self.engine.interrupt()

    def close(self) -> None:
        self.engine.close()


class PipelineRunner(MakerRunner[PipelineWork]):
    """Runs one pipeline: what waits for it, or a new run of one that waits for nobody."""

    awaits_others = False  # items in hand are `odf serve`'s

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
        engine = Engine(
            project,
            session,
            say=self.tell,
            stopping=lambda: self.stopping() or self.work.why_stop(),
        )
        self.work = PipelineWork(store, project, plans, slug, engine, say=say)

    def at_once(self) -> int:
        """One: of a pipeline, each run reads its sources as they are when it begins."""
        return 1

    def claim(self, owner: str, k: int = 1) -> tuple[list[Claim], JobEnvironment] | None:
        environment = self.environment()
        if not self._root:
            taken = super().claim(owner, k)
        else:
            claims = self._next(owner)
            taken = (claims, environment) if claims else None
        if taken is None and not self._begun:
            why = offer(self.store, self.jobid).obstacle
            self.tell(f"{self.jobid}: {printable(why)}; `odf why {typed(self.jobid)}` tells more")
            if why == NOTHING_CLAIMABLE:
                for line in unread(self.store, self.work.project, self.work.plan):
                    self.tell(line)
        self._begun = True
        return taken

    def _next(self, owner: str) -> list[Claim]:
        """What is to be made again, or was begun by nobody; without any of it, once, a new run."""
        self.store.recover(self.jobid)
        for _ in range(TURNS):
            dataid = self._waiting()
            if dataid is None:
                if self._begun or not self._begins:
                    return []
                self.work.refuse_loss()
                dataid = new_run(self.store, self.jobid)
            if claims := self.store.claim(self.jobid, owner=owner, only=dataid):
                return claims
            if self._waiting() == dataid:  # paused, or at its concurrency: it stays for later
                return []
        return []

    def _waiting(self) -> str | None:
        db = self.store.db
        rows, _ = db.insist(
            lambda: db.run("pipelines.waiting", jobid=self.jobid, items=self._items)
        )
        return rows[0][0] if rows else None


def run_pipeline(
    store: Store,
    project: Project,
    slug: str,
    settings: Settings,
    *,
    say: Say,
    environ: Mapping[str, str],
    stream_file: Path | None = None,
    all_chunks: bool = False,
    begins: bool = True,
    session: Callable[[], "SparkSession"] | None = None,
) -> Outcome:
    """Run a pipeline for its next chunk, or with `all_chunks` until nothing is left.

    With a `stream_file`, for each row of that CSV file as an item. Without `begins`, only what
    waits is run. Without a `session`, one is started with the first transformation, and ended.
    """
    if session is None:
        refuse_impossible(settings)
    plans = register(store, project, slug)
    store.recover(slug)
    check(store, project, project.pipeline(slug), plans[slug])
    with ExitStack() as stack:
        session = session or stack.enter_context(session_when_needed(settings, slug))
        runner = PipelineRunner(
            store,
            project,
            plans,
            slug,
            session,
            say=say,
            environ=environ,
            items=all_chunks,
            begins=begins,
        )
        stack.callback(runner.work.close)
        if stream_file is not None:
            from .stream import run_stream

            return run_stream(runner, stream_file)
        return run_chunks(runner, all_chunks=all_chunks)


def run_project(
    store: Store,
    project: Project,
    settings: Settings,
    *,
    say: Say,
    environ: Mapping[str, str],
    session: Callable[[], "SparkSession"] | None = None,
) -> Iterator[tuple[str, Outcome]]:
    """Run all pipelines of a project until nothing is left, each after those that it reads.

    One whose source couldn't be made isn't run. Of one that takes items, those that wait are made.
    A signal ends it all.
    """
    if session is None:
        refuse_impossible(settings)
    broken: list[str] = []
    with ExitStack() as stack:
        session = session or stack.enter_context(session_when_needed(settings, project.name))
        for pipeline in in_order(project):
            slug = pipeline.slug
            makers = {each for source in pipeline.sources for each in makers_of(project, source)}
            try:
                if above := next((each for each in broken if each in makers), None):
                    raise TransformationError(f"not run, since pipeline {above!r} has failed.")
                outcome = run_pipeline(
                    store,
                    project,
                    slug,
                    settings,
                    say=say,
                    environ=environ,
                    all_chunks=True,
                    begins=not takes_items(project, pipeline),
                    session=session,
                )
            except DataflowError as error:
                if store.db.trouble(error):
                    raise
                say(printable(f"{slug}: {first_line(error)}."))
                outcome = Outcome(1)
            if outcome.code == 1:
                broken.append(slug)
            yield slug, outcome
            if outcome.code >= SIGNALED:
                return


def refuse_impossible(settings: Settings) -> None:
    """Refuse to begin where the transformations can't run, since something isn't installed."""
    from ..spark.session import refuse_impossible as refuse_session

    for module in ("pandas", "pyarrow", "pyspark"):
        need(module, "pipelines")
    refuse_session(settings)


@contextmanager
def session_when_needed(settings: Settings, name: str) -> Iterator[Callable[[], "SparkSession"]]:
    """A function that starts a session of Spark when it is first called; it is ended after use."""
    from ..spark.session import let_go, spark_session

    started: list[SparkSession] = []

    def session() -> "SparkSession":
        if not started:
            started.append(spark_session(app=f"odf {name}", settings=settings))
        return started[0]

    try:
        yield session
    finally:
        for each in started:
            let_go(each)


def check(store: Store, project: Project, pipeline: Pipeline, plan: Plan) -> None:
    """Refuse, before anything is claimed, a pipeline whose files are missing or not supported."""
    for name in pipeline.transformations:
        file = project.transformation_file(pipeline.slug, name)
        if not os.path.isfile(file):
            shown = file.relative_to(project.root)
            raise TransformationError(f"{shown} doesn't exist, but project.yml names it.")
        supported_engine(project, pipeline.slug, name)
    for slug in dict.fromkeys(pipeline.sources):
        if slug not in plan.reads:
            source_of(store, project, slug).version()


def unread(store: Store, project: Project, plan: Plan) -> Iterator[str]:
    """A line for each file in sources/ that isn't read, since a pipeline makes the source."""
    for slug in plan.inputs:
        file = project.source_file(slug)
        makers = [each.slug for each in project.pipelines if output_of(each) == slug]
        if makers and file.is_file() and registered(store, slug, project.root) is None:
            yield printable(
                f"{file.relative_to(project.root)} is not read: pipeline {makers[0]!r} makes it. "
                f"Run: odf pipeline run {typed(makers[0])}"
            )


def open_sources(store: Store, project: Project, pipeline: Pipeline, chunk: Chunk) -> list[Source]:
    """The sources of a pipeline for a chunk, in declared order; nothing is read yet."""
    return [
        source_of(store, project, slug, chunk.inputs.get(slug), chunk.dataid)
        for slug in pipeline.sources
    ]
