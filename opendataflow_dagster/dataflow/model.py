"""The words of the product: statuses and their transitions, chunks, jobs, claims, facts."""

from typing import NamedTuple

PENDING, RUNNING, READY, FAILED = "PENDING", "RUNNING", "READY", "FAILED"
RESUBMIT, HOLD, ABSENT = "RESUBMIT", "HOLD", ""

SAME_AS = {"ERROR": FAILED, "RERUN": RESUBMIT}
"""Words of older versions and of other hands, and the status that each is read as."""

TRANSITIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "claim": {RUNNING: (ABSENT, PENDING, RESUBMIT)},
    "finish": {READY: (RUNNING,), FAILED: (RUNNING,), RESUBMIT: (RUNNING,)},
    "recover": {RESUBMIT: (RUNNING, FAILED), HOLD: (RUNNING,)},
    "ready": {READY: (ABSENT, PENDING, RESUBMIT, FAILED)},
    "resubmit": {RESUBMIT: (READY, FAILED, HOLD)},
    "hold": {HOLD: (ABSENT, PENDING, RESUBMIT, READY, FAILED)},
    "release": {status: (HOLD,) for status in (PENDING, RESUBMIT, READY, FAILED)},
}
"""Every legal transition of an OUT row: act → status after → statuses before.

`docs/statuses.md` draws it.
"""


def read_status(word: str | None) -> str:
    """The status that a word in the tables stands for: an unknown word holds the chunk."""
    if word in TRANSITIONS["hold"][HOLD] or word in (RUNNING, HOLD):
        return word or ABSENT
    return SAME_AS.get(word or "", HOLD)


class Claim(NamedTuple):
    """The exclusive right of one execution to produce one chunk."""

    jobid: str
    dataid: str
    generation: int
    owner: str
    attempts: int
    lease: float
    time_limit: float | None


class Fact(NamedTuple):
    """What is known of one produced chunk of a dataset."""

    datasetid: str
    dataid: str
    location: str | None = None
    rows: int | None = None
    bytes: int | None = None
    fingerprint: str | None = None
    validated: bool | None = None
    checks: str | None = None
    schema: str | None = None


class Plan(NamedTuple):
    """What a job reads and writes, and what its claims must take care of."""

    jobid: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    rivals: tuple[str, ...]
    limited: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs that have rows: `today` is a date, not data."""
        return tuple(datasetid for datasetid in self.inputs if datasetid != "today")

    @property
    def today(self) -> bool:
        return "today" in self.inputs

    @property
    def flaw(self) -> str:
        """Why this job can't be run at all, or nothing."""
        if not (self.inputs or self.outputs):
            return f"Job {self.jobid!r} isn't registered"
        if not self.outputs:
            return f"Job {self.jobid!r} writes no dataset, so nothing could tell what it has done"
        both = sorted(set(self.inputs) & set(self.outputs))
        if both:
            return (
                f"Job {self.jobid!r} reads and writes {both[0]!r}: it would run on its own result"
            )
        return ""


class Failure(NamedTuple):
    """How a failed claim was settled."""

    status: str
    retry_in: float | None


class Recovered(NamedTuple):
    """A chunk that was settled for a run that didn't come back."""

    jobid: str
    dataid: str
    status: str
    reason: str
