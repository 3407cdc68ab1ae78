"""The body of a step: the chunks of a run, one by one, each as the tables allow."""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import dagster as dg

from ..errors import DataflowError
from ..model import READY, RESUBMIT, Claim
from ..runner.heartbeat import Pulse
from ..runner.maker import Maker, make
from ..runner.produce import Produced
from ..runner.run import LOST, nothing_to_do
from ..runner.waiting_claims import WaitingClaims
from ..store.job_policy import batch_size
from ..store.store import Store
from ..util.text import printable
from .checks import ChunkCheck, evaluation
from .events import made
from .resources import DataflowResource
from .step_claim import DIAL_POLL, Claimer, asked, explained
from .translator import DataflowTranslator

BATCH = "opendataflow/batch"
DEFAULT_BATCH = 500

NAMED = 10
"""How many chunks the reason of a failed run names."""

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation


class Stopped(BaseException):
    """A script was ended by a signal that this process got."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_chunks(
    context: dg.AssetExecutionContext,
    dataflow: DataflowResource,
    jobid: str,
    translator: DataflowTranslator,
    maker: Maker,
    checks: Sequence[ChunkCheck] = (),
    *,
    secrets: bool = False,
) -> Iterator[Event]:
    """Make the chunks that a run asks for, or else those that the tables offer; one bad one fails
    itself only, and the run at its end.

    `secrets` puts the passwords into the environment, as scripts expect it.
    """
    try:
        run = _Run(context, dataflow.store, jobid, translator, maker, checks, secrets)
    except DataflowError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    stop: Stopped | None = None
    try:
        with Pulse(
            run.store, run.owner, runid=context.run.run_id, jobid=jobid, say=run.say
        ) as run.pulse:
            keys = asked(context)
            yield from run.offered() if keys is None else run.asked(keys)
        run.conclude()
    except (dg.Failure, GeneratorExit):
        raise
    except Exception as error:
        reason = explained(run.store, error)
        if reason is None:
            raise
        raise dg.Failure(reason, allow_retries=False) from None
    except BaseException as error:
        run.give_up(error)
        if not isinstance(error, Stopped):
            raise
        stop = error
    finally:
        maker.close()
    if stop:
        signal.raise_signal(stop.number)  # Dagster's handler raises what cancels the run
        raise dg.Failure(f"The run was stopped by {stop}.", allow_retries=False)


class _Run(Claimer):
    """One step at work on one job."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        store: Store,
        jobid: str,
        translator: DataflowTranslator,
        maker: Maker,
        checks: Sequence[ChunkCheck],
        secrets: bool,
    ) -> None:
        super().__init__(context, store, jobid, translator, secrets=secrets)
        self.maker, self.checks = maker, [each.run for each in checks]
        self.made = self.skipped = 0
        self.failed: dict[str, str] = {}
        self.lost: dict[str, str] = {}

    def asked(self, keys: Sequence[str]) -> Iterator[Event]:
        """Make the chunks of these partitions, in their order; what the dial holds back, last."""
        left, again = list(keys), self.again
        while left:
            held_back: list[str] = []
            for key in left:
                if again:
                    self.send_back(self.translator.dataid(key))
                yield from self._ask(key, held_back)
                if len(self.taken) >= self._at_once():
                    yield from self._make_taken()
            yield from self._make_taken()
            again = False
            if held_back == left:
                time.sleep(DIAL_POLL)
            left = held_back

    def _ask(self, key: str, held_back: list[str]) -> Iterator[Event]:
        """Take the chunk of one partition, unless the tables forbid it."""
        dataid = self.translator.dataid(key)
        self.environment()
        claims = self.claim(dataid)
        if not claims:
            if events := self.ready_already(dataid, key):
                self.skipped += 1
                yield from events
                return
            refused = self.refuse(dataid)
            if refused is None:
                held_back.append(key)
                return
            claims = refused
        self._take(claims, key)

    def _at_once(self) -> int:
        """How many partitions to claim before the first one is made.

        Each is claimed by its name: it pays only for a maker that makes them together.
        """
        return self.maker.at_once(self._dial()) if self.maker.works_together else 1

    def _dial(self) -> int | None:
        return batch_size(self.store, self.jobid)

    def _take(self, claims: Sequence[Claim], key: str) -> None:
        """Keep claims in hand until there are as many as the maker wants at once."""
        for claim in claims:
            self.pulse.hold(claim)
            self.taken[claim.generation] = claim, key

    def _make_taken(self) -> Iterator[Event]:
        """Make the chunks in hand, and those again at once for which the policy grants it."""
        while self.taken:
            claims = [claim for claim, _ in self.taken.values()]
            if len(claims) == 1 or self.maker.works_together:
                yield from self._make(claims)
            else:
                yield from self._make_in_turn(claims)

    def _make_in_turn(self, claims: Sequence[Claim]) -> Iterator[Event]:
        """Make chunks one after the other; what the dials then forbid to begin is given back."""
        mine = {claim.generation for claim in claims}
        try:
            with WaitingClaims(
                self.store,
                claims,
                stopping=lambda: None,
                say=self.say,
                interrupted=self.interrupted,
            ) as waiting:
                while claim := waiting.next():
                    yield from self._make([claim])
                    while again := [
                        one for one, _ in self.taken.values() if one.generation not in mine
                    ]:
                        yield from self._make(again)
        finally:
            for claim in claims:
                self._let_go(claim)

    def _make(self, claims: Sequence[Claim]) -> Iterator[Event]:
        keys = dict(self.taken)
        for produced in make(
            self.store,
            claims,
            self.environment(),
            self.maker,
            checks=self.checks,
            pulse=self.pulse,
            interrupted=self.interrupted,
        ):
            _, key = keys[produced.claim.generation]
            self._let_go(produced.claim)
            yield from self._events(produced, key)
            if produced.status == RESUBMIT and not produced.interrupted:
                self._take(self.claim(produced.claim.dataid), key)

    def _let_go(self, claim: Claim) -> None:
        self.taken.pop(claim.generation, None)
        self.pulse.let_go(claim)

    def offered(self) -> Iterator[Event]:
        """Make what may be made now, up to the size of a batch."""
        left = int(self.context.run.tags.get(BATCH) or DEFAULT_BATCH)
        while left > 0:
            self.environment()
            claims = self.claim(None, min(left, self.maker.at_once(self._dial())))
            if not claims:
                break
            left -= len(claims)
            for claim in claims:
                self._take([claim], self.translator.partition_key(claim.dataid))
            yield from self._make_taken()

    def _events(self, produced: Produced, key: str) -> Iterator[Event]:
        """Count a chunk that was in hand, and tell Dagster of it."""
        dataid = produced.claim.dataid
        for counted in (self.failed, self.lost):
            counted.pop(dataid, None)
        if produced.status == READY:
            self.made += 1
            for fact in produced.facts:
                yield made(produced, fact, key, self.translator, self.log)
        elif produced.status == LOST:
            self.pulse.beat()
            self.lost[dataid] = produced.reason
            self.context.log.error(f"{printable(dataid)}: {produced.reason}")
        else:
            retry = produced.retry_in
            reason = produced.reason
            if produced.status == RESUBMIT and not produced.interrupted:
                reason += " (another attempt is granted)"
            elif retry:
                reason += f" (the next attempt is due in {retry:g} s)"
            self.failed[dataid] = reason
            told = f"{printable(dataid)} of job {self.jobid}: {produced.status}: {reason}"
            if produced.error:  # in the text: Dagster doesn't keep `exc_info`
                told += "\n" + "".join(traceback.format_exception(produced.error))
            self.context.log.error(told)
        if produced.status != LOST:
            for checked in produced.checks:
                yield evaluation(checked, self.translator, key)

    def conclude(self) -> None:
        """Say how it went, and fail the run if any chunk wasn't made."""
        bad = {**self.refused, **self.failed, **self.lost}
        counts = {
            "made": self.made,
            "skipped": self.skipped,
            "refused": len(self.refused),
            "failed": len(self.failed),
            "lost": len(self.lost),
        }
        told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        told = told or nothing_to_do(self.store, self.jobid)
        self.context.log.info(f"{self.jobid}: {told}")
        if bad:
            named = [f"{printable(dataid)}: {bad[dataid]}" for dataid in list(bad)[:NAMED]]
            if len(bad) > NAMED:
                named.append(f"and {len(bad) - NAMED} more")
            every = len(bad) + self.made + self.skipped
            raise dg.Failure(
                f"{len(bad)} of {every} chunks of job {self.jobid!r} weren't made:\n"
                + "\n".join(named),
                metadata={f"opendataflow/{word}": count for word, count in counts.items()},
                allow_retries=False,
            )


Body = Callable[[dg.AssetExecutionContext], Iterator[Event]]
