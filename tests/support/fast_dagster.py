"""Dagster's programs for tests, which can't wait, and which start and ask them many hundred times.

Usage: python -m tests.support.fast_dagster daemon|forking|spawning …, with the arguments of
`dagster-daemon` or `dagster`. The daemon's loops turn every second: it looks at backfills every
30 s and at sensors every 5 s otherwise, and no setting changes that. A forking code server forks
the processes of runs from one that has imported Dagster, instead of starting each anew.
"""

import multiprocessing
import sys
from functools import cache
from typing import Any

import alembic.command
import dagster._core.storage.sql
import dagster_postgres.utils
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory

SECONDS = 1.0


def keep_what_instances_need() -> None:
    """Let the instances of this process share connections, and what is read of Dagster's tables.

    Each tick of a sensor makes an instance: it would read a hundred files of revisions, or connect
    to PostgreSQL thirty times, which takes ten times as long as all else.
    """
    for module in (alembic.command, dagster._core.storage.sql):
        module.ScriptDirectory = _KeptScripts  # type: ignore[attr-defined,misc]
    dagster_postgres.utils.create_engine = _create_engine


class _KeptScripts:
    @staticmethod
    def from_config(config: Config) -> ScriptDirectory:
        return _scripts(config.config_file_name, config.get_main_option("script_location"))


@cache
def _scripts(ini: str, location: str) -> ScriptDirectory:
    config = Config(ini)
    config.set_main_option("script_location", location)
    return ScriptDirectory.from_config(config)


def _create_engine(url: str, *, poolclass: Any = None, **more: Any) -> sqlalchemy.Engine:
    if poolclass is not sqlalchemy.NullPool:
        return sqlalchemy.create_engine(url, poolclass=poolclass, **more)
    return _engine(url, **more)


@cache
def _engine(url: str, **more: Any) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(url, pool_pre_ping=True, max_overflow=-1, **more)


def run_daemon() -> None:
    from dagster._daemon import controller, sensor
    from dagster._daemon.cli import main

    class Queue(controller.QueuedRunCoordinatorDaemon):
        """The queue of runs, polled as often as everything else."""

        def __init__(self, interval_seconds: float) -> None:
            super().__init__(min(SECONDS, interval_seconds))

    def hurried(state: object, remote_sensor: sensor.RemoteSensor, *_: object) -> bool:
        """Let a sensor tick whenever the loop turns, however rarely it wants to."""
        elapsed = sensor.get_elapsed(state)  # type: ignore[arg-type]
        return elapsed is not None and elapsed < min(SECONDS, remote_sensor.min_interval_seconds)

    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = SECONDS  # type: ignore[assignment]
    controller.THREAD_CHECK_INTERVAL = SECONDS  # type: ignore[assignment]
    controller.RELOAD_WORKSPACE_INTERVAL = 2
    controller.QueuedRunCoordinatorDaemon = Queue  # type: ignore[misc]
    sensor.MIN_INTERVAL_LOOP_TIME = SECONDS  # type: ignore[assignment]
    sensor.is_under_min_interval = hurried
    main()


def run_code_server(*, forking: bool) -> None:
    import dagster._grpc.server
    from dagster._cli import main

    if forking:
        ours = "opendataflow_dagster.dagster.build"
        multiprocessing.set_forkserver_preload(["dagster._cli", ours, __spec__.name])
        dagster._grpc.server.multiprocessing = _Forking()  # type: ignore[attr-defined]
    main()


class _Forking:
    """Make `multiprocessing` use a fork server wherever spawning is requested."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, _: str) -> Any:
        return multiprocessing.get_context("forkserver")


if __name__ == "__main__":
    keep_what_instances_need()
    program = sys.argv.pop(1)
    run_daemon() if program == "daemon" else run_code_server(forking=program == "forking")
elif "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    keep_what_instances_need()
