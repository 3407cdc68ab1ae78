"""`dagster-daemon`, of which every loop turns twice a second, for tests that can't wait.

Usage: python -m tests.support.fast_daemon run …, with the arguments of dagster-daemon, which looks
at backfills every 30 s and at sensors every 5 s; no setting changes that.
"""

from dagster._daemon import controller, sensor
from dagster._daemon.cli import main

SECONDS = 0.5


class Queue(controller.QueuedRunCoordinatorDaemon):
    """The queue of runs, looked at more often than once a second."""

    def __init__(self, interval_seconds: float) -> None:
        super().__init__(min(SECONDS, interval_seconds))


def hurried(state: object, remote_sensor: sensor.RemoteSensor, *_: object) -> bool:
    """Let a sensor tick whenever the loop turns, however seldom it wants to."""
    elapsed = sensor.get_elapsed(state)  # type: ignore[arg-type]
    return elapsed is not None and elapsed < min(SECONDS, remote_sensor.min_interval_seconds)


if __name__ == "__main__":
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = SECONDS
    controller.THREAD_CHECK_INTERVAL = SECONDS
    controller.RELOAD_WORKSPACE_INTERVAL = 2
    controller.QueuedRunCoordinatorDaemon = Queue  # type: ignore[misc]
    sensor.MIN_INTERVAL_LOOP_TIME = SECONDS
    sensor.is_under_min_interval = hurried
    main()
