"""The transformations of a claimed chunk, each told in the run history as it begins and ends."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..chunk import ChunkFailed
from ..errors import DataflowError, SessionError
from ..model import FAILED, READY, RUNNING, Claim, Say
from ..storage.read import failing, with_code
from ..store.items import cleaned_away, payloads
from ..store.step_log import Step, record
from ..store.store import Store
from ..util.text import first_line, printable
from .endpoints import Source
from .engine import Engine, ItemRan, Ran
from .project import Pipeline
from .sources import InMemory, Once
from .transformation import NO_STREAM, TransformationError

CLEANED = "its payload was cleaned away: post the item again"
"""Why an item can't be made again, whoever tries."""


class Stepping:
    """Runs the transformations of one chunk, and keeps how each of them went."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        engine: Engine,
        pipeline: Pipeline,
        *,
        say: Say = lambda line: None,
    ) -> None:
        self.store, self.claim, self.engine, self.pipeline = store, claim, engine, pipeline
        self.say = say

    def item(self) -> str | None:
        """The JSON text that the chunk is for, if it is an item."""
        asked = self.claim.jobid, [self.claim.dataid]
        found = payloads(self.store, *asked)
        if not found and cleaned_away(self.store, *asked):
            raise ChunkFailed(CLEANED)
        return found.get(self.claim.dataid)

    def run(self, sources: Sequence[Source]) -> Any:
        """What the last transformation returns; the first frame goes from one to the next."""
        names = self.pipeline.transformations
        # The first source is the first step's alone, where the frame is that goes through them.
        shelves = [InMemory(again=bool(at) and len(names) > 1) for at in range(len(sources))]
        frames: list[Any] = [Once(*each) for each in zip(sources, shelves, strict=True)]
        try:
            for number, name in enumerate(names, 1):
                frames[:1] = [self.step(number, name, frames).frame]
        finally:
            for each in shelves:
                each.clear()
        return frames[0]

    def run_item(self, sources: Sequence[Source], item: str) -> Any:
        """The same for one item, on sources of its own."""
        began = self.store.now()
        names = self.pipeline.transformations
        with failing():
            [ran] = self.engine.run_items(
                self.pipeline.slug,
                names,
                list(sources),
                [json.loads(item)],
                chained=False,
                limit=self.claim.time_limit,
            )
        record(self.store, steps_of(self.claim, ran, began))
        if not ran.ok:
            self.tell_failure(ran)
            raise ChunkFailed(reason_of_item(ran))
        return ran.frame

    def step(
        self,
        number: int,
        name: str,
        frames: Sequence[Any],
        stream: Any = NO_STREAM,
        *,
        keep: Callable[[Any], None] = lambda frame: None,
    ) -> Ran:
        """Run one transformation; whatever ends it is recorded, and a failure is `ChunkFailed`.

        To `keep` the frame is part of it.
        """
        store, claim = self.store, self.claim
        step = Step(claim.jobid, claim.dataid, claim.generation, number, name, RUNNING, store.now())
        record(store, [step])

        def ended(status: str, **more: Any) -> None:
            record(store, [step._replace(status=status, ended=store.now(), **more)])

        printed = ""
        try:
            ran = self.engine.run(self.pipeline.slug, name, frames, stream)
            printed = ran.printed
            keep(ran.frame)
        except TransformationError as error:
            error.printed = error.printed or printed
            told(self.say, name, error.printed, error.trace)
            ended(FAILED, reason=str(error), stdout=error.printed, traceback=error.trace)
            raise ChunkFailed(f"{name}: {error}") from error
        except SessionError as error:  # no chunk is to blame
            ended(FAILED, reason=str(error), stdout=printed)
            raise
        except DataflowError as error:  # of a source: it is read when it is needed
            ended(FAILED, reason=with_code(error), stdout=printed)
            raise ChunkFailed(with_code(error)) from error
        except BaseException as error:
            with suppress(Exception):  # whoever canceled us doesn't wait for the history
                ended(FAILED, reason=f"interrupted: {first_line(error)}")
            raise
        ended(READY, rows=ran.rows, stdout=ran.printed)
        of = len(self.pipeline.transformations)
        many = "1 row" if ran.rows == 1 else f"{ran.rows} rows"
        self.say(f"Step {number} of {of}, {printable(name)}: {many} in {ran.seconds:.1f} s")
        told(self.say, name, ran.printed)
        return ran

    def tell_failure(self, ran: ItemRan) -> None:
        for each in ran.steps:
            if not each.ok:
                told(self.say, each.transformation, each.printed, each.trace)


def steps_of(claim: Claim, ran: ItemRan, began: float) -> list[Step]:
    """The history of an item whose transformations began at a moment of the database's clock."""
    found = []
    for number, each in enumerate(ran.steps, 1):
        ended = began + each.seconds
        found.append(
            Step(
                claim.jobid,
                claim.dataid,
                claim.generation,
                number,
                each.transformation,
                READY if each.ok else FAILED,
                began,
                ended,
                each.rows,
                each.printed,
                each.trace or None,
                each.reason or None,
            )
        )
        began = ended
    return found


def reason_of_item(ran: ItemRan) -> str:
    """Why an item failed: the transformation, and its error in a line."""
    for each in ran.steps:
        if not each.ok:
            return f"{each.transformation}: {each.reason}"
    return "it ended without a result"


def told(say: Say, name: str, printed: str, trace: str = "") -> None:
    """Show what a transformation printed, and its traceback."""
    if printed.strip():
        say(f"{printable(name)} printed:")
        for line in printed.strip("\n").splitlines():
            say(f"    {printable(line)}")
    for line in trace.rstrip("\n").splitlines():
        say(f"    {printable(line)}")
