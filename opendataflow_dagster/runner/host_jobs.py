"""The jobs that a host may run, how each stands, and when it is offered to the workers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import DataflowError
from ..model import ChunkOutcome
from ..store.watch import Outlook
from .script import Scripts

NOTICE_SECONDS = 0.05
"""Seconds in which the database sends at most one notice: what came later is looked for."""

REST_SECONDS = 30.0
"""Seconds for which a job that can't be run is left alone."""

LONGEST_VAIN_SECONDS = 5.0
"""Seconds, at most, until a job is tried again whose claims got nothing, though they should."""

ALONE_SECONDS = 1.0
"""Seconds between two starts of what does all of a job by itself: it takes seconds to begin."""

TODAY_SECONDS = 60.0
"""Seconds after which a job that reads `today` is tried, though nothing says that it may run."""


TellClaimed = Callable[[Sequence[str]], object]
"""What is told which chunks were claimed."""

TellEnded = Callable[[str, ChunkOutcome], object]
"""What is told how a chunk ended."""


class ChunksFailed(DataflowError):
    """Chunks of a program that runs all of a job have failed, and others may have been made."""


class JobStep(Protocol):
    """What a worker does for a job: claim something and run it; whether there was anything."""

    def __call__(
        self,
        owner: str,
        scripts: Scripts,
        claimed: TellClaimed,
        ended: TellEnded,
    ) -> bool: ...


@dataclass
class HostJob:
    """A job that this host may run.

    Args:
        jobid: Its id.
        step: Makes what a worker does for it, the first time that there is something to do.
        reads_today: Whether it reads `today`.
        is_shared: Whether Dagster may start it, too: then it waits while a run of Dagster does.
        is_alone: Whether one worker at a time does all that there is.
        begins_runs: Whether `every_minutes` begins new chunks, as of a pipeline.
    """

    jobid: str
    step: Callable[[], JobStep]
    reads_today: bool = False
    is_shared: bool = False
    is_alone: bool = False
    begins_runs: bool = False


@dataclass
class JobState:
    """How a job stands on this host."""

    job: HostJob
    outlook: Outlook | None = None
    offered: int = 0
    """How many chunks workers may still try to claim before the next look."""
    busy: int = 0
    done: int = 0
    failed: int = 0
    interrupted: int = 0
    trouble: str = ""
    """Why it can't be run, if so."""
    served_at: float = 0.0
    rest_until: float = 0.0
    vain: int = 0
    """Claims in a row that got nothing."""
    today: str | None = None
    today_at: float = 0.0
    closed_period: int | None = None
    """The period of `every_minutes` in which all has been done."""
    opens_in: float | None = None
    """Seconds until the next one, if that is waited for."""
    step: JobStep | None = None
    is_gone: bool = False
    running: dict[str, float] = field(default_factory=dict)

    @property
    def waits_for_runs(self) -> bool:
        """Whether runs of Dagster have it in hand, and nothing says who starts it."""
        return bool(self.job.is_shared and self.outlook and self.outlook.of_runs)

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it can be claimed, or will be without somebody's doing."""
        if self.trouble:
            return not self.busy
        found = self.outlook
        if found is None or self.busy or self.offered:
            return False
        waits = found.is_queued or found.live or found.retry_in is not None
        return not waits and (bool(found.held) or not found.claimable)

    def offer(self, found: Outlook, today: str, local: float | None) -> float:
        """Offer to the workers what may be claimed; seconds until the next look at the latest.

        Args:
            found: How the job stands.
            today: The date.
            local: Seconds since 1970 by the clock on the wall; None if `every_minutes` is ignored.
        """
        now = time.monotonic()
        self.outlook, self.offered, self.opens_in = found, found.free, None
        if self.job.reads_today and not (found.claimable or found.live or found.held):
            # Nobody has judged today's chunk of a job that reads nothing else: a claim does.
            self.offered = int(self.today != today or now >= self.today_at + TODAY_SECONDS)
        if found.every_minutes and local is not None and not self.job.begins_runs:
            self._heed_period(found.every_minutes * 60, local)
        if self.waits_for_runs or (self.job.is_alone and self.busy):
            self.offered = 0
        look_in = float("inf") if self.opens_in is None else self.opens_in
        if self.offered and self.rest_until > now:
            self.offered = 0
            look_in = self.rest_until - now
        if found.retry_in is not None:
            look_in = min(look_in, max(found.retry_in, NOTICE_SECONDS))
        return look_in

    def _heed_period(self, seconds: float, local: float) -> None:
        """Offer something only until all has been done once in each period."""
        period = int(local // seconds)
        if self.closed_period == period:
            if self.offered:
                self.offered, self.opens_in = 0, (period + 1) * seconds - local
        elif not (self.offered or self.busy or (self.outlook and self.outlook.live)):
            self.closed_period = period

    def rest_in_vain(self) -> None:
        """Others were faster, or something is locked: try again, ever later."""
        self.vain += 1
        self._rest(min(LONGEST_VAIN_SECONDS, NOTICE_SECONDS * 2 ** min(self.vain, 10)))

    def rest_after_failures(self) -> None:
        """Start a program whose chunks failed again, ever later: it may fail for all of them."""
        self.vain += 1
        self._rest(min(REST_SECONDS, ALONE_SECONDS * 2 ** min(self.vain, 10)))

    def _rest(self, seconds: float) -> None:
        self.rest_until = time.monotonic() + seconds
