"""A runner of chunks that are made in this process, by a `Maker`."""

import signal
import traceback
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from .chunk import WARN
from .environment import JobEnvironment
from .maker import Maker, make
from .model import READY, Claim
from .names import printable
from .process import Scripts
from .produce import Produced
from .pulse import Pulse
from .runjob import LOST, Result, Runner

M = TypeVar("M", bound=Maker)


class MakerRunner(Runner, Generic[M]):
    """Makes the chunks of one job by `work`, and says what is said of a script."""

    secrets = False  # they are decrypted where a place is opened
    scripts: Scripts | None = None
    work: M

    def claim(self, owner: str, k: int = 1) -> tuple[list[Claim], JobEnvironment] | None:
        return super().claim(owner, max(k, self.work.batch))

    def run(
        self, claims: Sequence[Claim], environment: JobEnvironment, scripts: Scripts, *,
        stdin_null: bool = False,
    ) -> Iterator[tuple[Claim, Result]]:  # fmt: skip
        """Make each claimed chunk, and settle it."""
        self.scripts = scripts
        for claim in claims:
            self.tell(f"Launching {self.argv[0]} with dataid {printable(claim.dataid)}")
        with Pulse(self.store, claims[0].owner, say=self.tell) as pulse:
            for produced in make(self.store, claims, environment, self.work, pulse=pulse):
                yield produced.claim, self._told(produced, environment)

    def stopping(self) -> str | None:
        """The signal that is to end the run, if there was one."""
        number = self.scripts.stopping if self.scripts else None
        return None if number is None else signal.Signals(number).name

    def _check(self) -> None:
        """What runs was loaded already."""

    def _told(self, produced: Produced, environment: JobEnvironment) -> Result:
        status, reason = produced.status, produced.reason
        if status == LOST:
            self.tell(reason)
            return Result(1, LOST, None, reason)
        trace: list[str] = []
        if produced.error and status != READY:
            trace = "".join(traceback.format_exception(produced.error)).splitlines()
        self._tell_end(status, reason, trace)
        for checked in produced.checks:
            if not checked.passed and checked.severity == WARN:
                self.tell(f"Warning: {checked.name}: {printable(checked.message)}")
        code = 0 if status == READY else 1
        return self._settled(
            produced.claim, environment, Result(code, status, produced.retry_in, reason)
        )
