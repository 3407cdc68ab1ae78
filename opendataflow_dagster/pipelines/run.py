"""`odf pipeline run`: the next chunk of a pipeline, one transformation after the other."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.settings import Settings
from ..errors import DataflowError
from ..model import Plan, Say
from ..runner.run import Outcome, run_chunks
from ..storage.files import need
from ..store.store import Store
from ..util.text import first_line, printable
from .item_file import run_file
from .jobs import in_order, makers_of, register, takes_items
from .project import Pipeline, Project
from .runner import PipelineRunner
from .sources import source_of
from .transformation import TransformationError, supported_engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIGNALED = 128
"""Exit codes from here on are those of a run that a signal has stopped."""


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
            return run_file(runner, stream_file)
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
            makers = {maker for source in pipeline.sources for maker in makers_of(project, source)}
            try:
                if above := next((slug for slug in broken if slug in makers), None):
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
        for spark in started:
            let_go(spark)


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
