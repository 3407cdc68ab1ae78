"""A runner of chunks that are made in this process, by a `Maker`."""

import signal
import traceback
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Generic, TypeVar

from ..chunk import WARN
from ..model import READY, Claim, Stop
from ..store.job_policy import batch_size
from ..util.text import first_line, printable
from .environment import JobEnvironment
from .heartbeat import Pulse
from .maker import Maker, make
from .produce import Produced
from .run import COMPLETE, FAILED, INTERRUPTED, LOST, Result, Runner
from .script_runner import Scripts
from .waiting_claims import WaitingClaims

M = TypeVar("M", bound=Maker)


class MakerRunner(Runner, Generic[M]):
    """Makes the chunks of one job by `work`, and says what is said of a script."""

    secrets = False  # they are decrypted where a place is opened
    scripts: Scripts | None = None
    work: M

    def at_once(self) -> int:
        return self.work.at_once(batch_size(self.store, self.jobid))

    def run(
        self,
        claims: Sequence[Claim],
        environment: JobEnvironment,
        scripts: Scripts,
        *,
        stdin_null: bool = False,
    ) -> Generator[tuple[Claim, Result]]:
        """Make each claimed chunk, and settle it; what isn't begun is given back."""
        self.scripts, scripts.works_here = scripts, True
        with Pulse(self.store, claims[0].owner, say=self.tell) as pulse:
            if len(claims) == 1 or self.work.works_together:
                yield from self._make(claims, environment, pulse)
                return
            with WaitingClaims(
                self.store, claims, stopping=scripts.why_stopping, say=self.tell
            ) as waiting:
                while claim := waiting.next():
                    yield from self._make([claim], self.environment(), pulse)

    def _make(
        self, claims: Sequence[Claim], environment: JobEnvironment, pulse: Pulse
    ) -> Generator[tuple[Claim, Result]]:
        for claim in claims:
            self.tell(f"Launching {self.argv[0]} with dataid {printable(claim.dataid)}")
        making = make(
            self.store,
            claims,
            environment,
            self.work,
            pulse=pulse,
            interrupted=self.interruption,
            stopping=self.stopping,
        )
        with closing(making):
            for produced in making:
                yield produced.claim, self._told(produced, environment)

    def stopping(self) -> str | None:
        """The signal that is to end the run, if there was one."""
        number = self.scripts.stopping if self.scripts else None
        return None if number is None else signal.Signals(number).name

    def interruption(self, error: BaseException) -> Stop:
        """Why the work in hand was interrupted: the signal, or else the error."""
        why = self.scripts.why_stopping() if self.scripts else None
        return Stop(why or f"interrupted: {first_line(error)}")

    def _check(self) -> None:
        """What runs was loaded already."""

    def _told(self, produced: Produced, environment: JobEnvironment) -> Result:
        status, reason = produced.status, produced.reason
        if status == LOST:
            self.tell(reason)
            return Result(1, LOST, None, reason)
        trace: list[str] = []
        if produced.error and status != READY and not produced.interrupted:
            trace = "".join(traceback.format_exception(produced.error)).splitlines()
        how = COMPLETE if status == READY else INTERRUPTED if produced.interrupted else FAILED
        self._tell_end(how, reason, trace)
        for checked in produced.checks:
            if not checked.passed and checked.severity == WARN:
                self.tell(f"Warning: {checked.name}: {printable(checked.message)}")
        code = 0 if status == READY else 1
        return self._settled(
            produced.claim,
            environment,
            Result(code, status, produced.retry_in, reason, produced.interrupted),
        )
