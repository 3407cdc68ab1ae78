"""What makes the chunks of a job: one by one, several at once, or many in one go."""

from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress

from ..chunk import Chunk, open_chunk
from ..errors import SessionError
from ..model import Claim, Stop
from ..store.claim_return import GiveBack, give_back, give_back_soon, interrupt_soon
from ..store.store import Store
from ..util.text import first_line
from .environment import JobEnvironment
from .heartbeat import Pulse
from .produce import Check, Compute, Produced, Publish, by_error, produce


class Maker:
    """Makes chunks by a function; one that does more overrides what it does otherwise."""

    batch = 1
    """How many chunks `prepare` wants to see at once, unless the job's dial says otherwise."""
    threads = 1
    """How many chunks may be computed at once."""

    def __init__(
        self, compute: Compute, publish: Publish | None = None, checks: Sequence[Check] = ()
    ) -> None:
        self.compute, self.publish, self.checks = compute, publish, checks

    @property
    def works_together(self) -> bool:
        """Whether it wants many chunks at once; else they are made one after the other."""
        return self.batch > 1 or self.threads > 1

    def at_once(self, dial: int | None = None) -> int:
        """How many claims to take in one go; the job's dial, where it is set, decides."""
        # Twice the threads, so that none of them waits for the last chunk of a handful.
        return dial or max(self.batch, 2 * self.threads if self.threads > 1 else 1)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Do for many chunks what is cheaper at once; `compute` comes for each of them then.

        What goes wrong here is left to `compute`, so that a bad chunk fails alone.
        """

    def forget(self, claim: Claim) -> None:
        """Let go of what was kept for a chunk, however it ended."""

    def why_stopping(self) -> str | None:
        """What forbids to begin with another chunk, if something does."""

    def interrupt(self) -> None:
        """End the work that other threads are doing; they raise."""

    def close(self) -> None:
        """Let go of everything: there are no more chunks."""


def make(
    store: Store,
    claims: Sequence[Claim],
    environment: JobEnvironment,
    maker: Maker,
    *,
    checks: Sequence[Check] = (),
    pulse: Pulse,
    interrupted: Callable[[BaseException], Stop] = by_error,
    stopping: Callable[[], object] = lambda: None,
) -> Generator[Produced]:
    """Make claimed chunks as `produce` does, and settle them one by one.

    An error, a maker that is to stop, and a caller who stops asking for the next one end it: those
    whose turn didn't come are given back. So they are after a cancellation, or held if a person
    wanted it.
    """
    left = {claim.generation: claim for claim in claims}
    for claim in claims:
        pulse.hold(claim)

    def one(claim: Claim) -> Produced:
        try:
            return produce(
                store,
                claim,
                environment,
                maker.compute,
                checks=[*maker.checks, *checks],
                publish=maker.publish,
                pulse=pulse,
                interrupted=interrupted,
                stopping=lambda: stopping() or maker.why_stopping(),
            )
        finally:
            left.pop(claim.generation, None)
            maker.forget(claim)

    try:
        if len(claims) > 1 and maker.batch > 1:
            maker.prepare([open_chunk(store, each, environment, pulse) for each in claims])
        if len(claims) > 1 and maker.threads > 1:
            yield from _at_once(store, claims, one, maker)
        else:
            for claim in claims:
                if why := maker.why_stopping():
                    _return(store, left.values(), maker, why)
                    return
                yield one(claim)
    except SessionError as error:
        _return(store, left.values(), maker, str(error))
        raise
    except (Exception, GeneratorExit) as error:
        why = "the run ended before its turn"
        if isinstance(error, Exception):
            why += f": {first_line(error)}"
        with suppress(Exception):  # what can't be given back now, its lease does
            _return(store, left.values(), maker, why, give_back_soon)
        raise
    except BaseException as error:
        _give_up(store, list(left.values()), maker, interrupted(error))
        raise
    finally:
        for claim in claims:
            pulse.let_go(claim)


def _at_once(
    store: Store, claims: Sequence[Claim], one: Callable[[Claim], Produced], maker: Maker
) -> Generator[Produced]:
    def work(claim: Claim) -> Produced:
        try:
            return one(claim)
        finally:
            store.db.drop()  # a thread's own connection ends with its work

    with ThreadPoolExecutor(maker.threads, thread_name_prefix="chunk") as pool:
        futures: list[Future[Produced]] = [pool.submit(work, claim) for claim in claims]
        try:
            for done in as_completed(futures):
                yield done.result()
        except BaseException:
            for each in futures:
                each.cancel()
            maker.interrupt()
            raise


def _return(
    store: Store, claims: Collection[Claim], maker: Maker, why: str, how: GiveBack = give_back
) -> None:
    """Give back chunks whose turn didn't come."""
    for claim in claims:
        maker.forget(claim)
    how(store, list(claims), why)


def _give_up(store: Store, claims: Sequence[Claim], maker: Maker, stop: Stop) -> None:
    """Settle chunks that weren't begun; what can't be settled now, its lease does."""
    with suppress(Exception):
        if stop.hold:
            for claim in claims:
                maker.forget(claim)
            interrupt_soon(store, claims, stop)
        else:
            _return(store, claims, maker, stop.why, give_back_soon)
