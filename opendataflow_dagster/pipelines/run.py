"""`odf pipeline run`: the next chunk of a pipeline, one transformation after the other."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.settings import Settings
from ..errors import DataflowError, Refused, WrongUse
from ..formats import format_of
from ..location import JDBC, Folder, ObjectStore, Table, resolve
from ..model import Plan, Say
from ..runner.run import Outcome, run_chunks
from ..storage.folder import need
from ..store.store import Store
from ..util.text import first_line, printable
from .frames import registered
from .items import run_file
from .jobs import in_order, makers_of, register, takes_items
from .project import LOCAL, Pipeline, Project
from .runner import PipelineRunner
from .sources import source_of
from .task import processes
from .transformation import TransformationError, supported_engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIGNALED = 128
"""Exit codes from here on mean that a signal stopped the run."""


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

    With a `stream_file`, run it for each row of that CSV file as an item. Without `begins`, run
    only what waits. Without a `session`, one starts with the first transformation, and ends at the
    end.
    """
    with ExitStack() as stack:
        if session is None:
            session = stack.enter_context(engine_ready(settings, project, slug))
        plans = register(store, project, slug)
        store.recover(slug)
        check(store, project, project.pipeline(slug), plans[slug])
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

    A pipeline is skipped if one of its sources couldn't be produced. If it takes items, the waiting
    ones are processed. A signal ends everything.
    """
    broken: list[str] = []
    with ExitStack() as stack:
        if session is None:
            session = stack.enter_context(engine_ready(settings, project, project.name))
        for pipeline in in_order(project):
            slug = pipeline.slug
            makers = {maker for source in pipeline.sources for maker in makers_of(project, source)}
            try:
                if above := next((slug for slug in broken if slug in makers), None):
                    raise TransformationError(f"not run, because pipeline {above!r} failed.")
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


def refuse_impossible(settings: Settings, project: Project) -> None:
    """Refuse to begin where transformations can't run, given what is installed and configured."""
    if project.engine == LOCAL:
        for module in ("pandas", "pyarrow"):
            need(module, "pipelines")
        refuse_master(settings)
        return
    from ..spark.session import refuse_impossible as refuse_session

    for module in ("pandas", "pyarrow", "pyspark"):
        need(module, "pipelines")
    refuse_session(settings)


def refuse_master(settings: Settings) -> None:
    """Refuse the local engine if Spark is set to run elsewhere: one of the two is a mistake."""
    from ..spark.settings import MASTER, REMOTE, given_conf, is_local, public

    given = given_conf(settings, None)
    for key in (REMOTE, MASTER):
        if (address := given.get(key)) and (key == REMOTE or not is_local(address)):
            raise WrongUse(
                f"{key} is {public(address)}, but the local engine runs transformations on this "
                f"machine, without Spark. Remove {key}, or use Spark's engine: see `engine` in "
                "project.yml."
            )


@contextmanager
def engine_ready(
    settings: Settings, project: Project, name: str
) -> Iterator[Callable[[], "SparkSession"]]:
    """Get ready to run transformations, and clean up after use.

    The yielded function starts a Spark session when it is first called; the local engine never
    calls it, and has a process that loads pandas meanwhile.
    """
    from ..spark.session import let_go, spark_session

    started: list[SparkSession] = []

    def session() -> "SparkSession":
        if not started:
            started.append(spark_session(app=f"odf {name}", settings=settings))
        return started[0]

    try:
        if project.engine == LOCAL:
            processes.start()
        refuse_impossible(settings, project)
        yield session
    finally:
        processes.end()
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
    if project.engine == LOCAL:
        for slug in (*plan.outputs, *pipeline.sources):
            _refuse_place(store, project, slug)
    for slug in dict.fromkeys(pipeline.sources):
        if slug not in plan.reads:
            source_of(store, project, slug).version()


def _refuse_place(store: Store, project: Project, slug: str) -> None:
    """Refuse a place that only Spark can read and write."""
    row = registered(store, slug, project.root)
    where = None if row is None else resolve(slug, row.columns)
    if isinstance(where, ObjectStore):
        what = "an object store"
    elif isinstance(where, Table) and where.dialect == JDBC:
        what = "a database of JDBC"
    elif isinstance(where, Folder) and format_of(where.format).needs_spark:
        what = f"the format {where.format!r}"
    else:
        return
    raise Refused(
        f"{slug!r} is in {what}, which only Spark can read and write, but the engine is local. "
        f"Remove `engine: local` or --engine local, or register another location for {slug!r}.",
        code="INVALID_LOCATION",
    )
