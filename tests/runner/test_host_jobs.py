"""When a host offers a job to its workers."""

import time

from opendataflow_dagster.runner.catch_up import HostJob, JobState
from opendataflow_dagster.store.claims import Outlook

NOON = 12 * 3600.0
IDLE = Outlook("job", 0, False, 0, 0, 0, None, None, False, None, None)


def state(**options: bool) -> JobState:
    def step() -> None:
        raise AssertionError("nothing is run here")

    return JobState(HostJob("job", step, **options))  # type: ignore[arg-type]


def test_every_minutes_runs_all_there_is_once_in_each_period() -> None:
    job = state()
    some = IDLE._replace(claimable=3, every_minutes=15)
    none = IDLE._replace(every_minutes=15)

    job.offer(some, "", NOON + 60)
    assert job.offered == 3  # at the start, whatever the time is
    job.offer(none, "", NOON + 70)
    assert job.offer(some, "", NOON + 80) == 820  # what comes later waits for the next period
    assert job.offered == 0
    job.offer(some, "", NOON + 901)
    assert job.offered == 3
    job.offer(none._replace(live=1), "", NOON + 902)  # another host is at it still
    job.offer(some, "", NOON + 903)
    assert job.offered == 3
    job.offer(some, "", None)  # until idle
    assert job.offered == 3


def test_today_is_tried_once_a_day_though_nothing_says_that_it_may_run() -> None:
    job = state(reads_today=True)
    job.offer(IDLE, "2026-11-20", NOON)
    assert job.offered == 1
    job.today, job.today_at = "2026-11-20", time.monotonic()
    job.offer(IDLE, "2026-11-20", NOON)
    assert job.offered == 0
    job.offer(IDLE, "2026-11-21", NOON)
    assert job.offered == 1
    job.offer(IDLE._replace(is_paused=True), "2026-11-21", NOON)
    assert job.offered == 0


def test_what_is_waited_for_before_a_job_is_finished() -> None:
    job = state()
    assert not job.is_finished  # nobody has looked
    for waits in ({"live": 1}, {"retry_in": 5.0}, {"is_queued": True}, {"claimable": 1}):
        job.offer(IDLE._replace(**waits), "", None)
        assert not job.is_finished, waits
    job.offer(IDLE, "", None)
    assert job.is_finished
    job.offer(IDLE._replace(claimable=9, concurrency=0), "", None)
    assert job.is_finished
    assert job.outlook
    assert job.outlook.held == "concurrency 0"


def test_a_job_without_chunks_is_tried_less_and_less_often() -> None:
    job, pauses = state(), []
    for _ in range(9):
        job.rest_in_vain()
        pauses.append(round(job.rest_until - time.monotonic(), 2))
    assert pauses == sorted(pauses)
    assert 0.05 < pauses[0] <= 0.1
    assert 4.9 < pauses[-1] <= 5
    assert 4.8 < job.offer(IDLE._replace(claimable=1), "", None) <= 5
    assert job.offered == 0


def test_a_shared_job_waits_for_runs_of_dagster() -> None:
    found = IDLE._replace(claimable=2, live=1, of_runs=1)
    shared, own = state(is_shared=True), state()
    for job in (shared, own):
        job.offer(found, "", None)
    assert (shared.offered, own.offered) == (0, 2)
