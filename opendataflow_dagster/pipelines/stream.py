"""`odf pipeline run --stream FILE`: the rows of a CSV file as items, one after the other.

The sources are read once, and what one item makes is the first frame of the next: the last frame
holds them all. It is published before any of them is READY.
"""

import json
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chunk import Result, open_chunk, reason_of
from ..errors import DataflowError, Refused, StaleClaim, WrongUse
from ..model import Claim, Fact
from ..runner.environment import JobEnvironment
from ..runner.heartbeat import Pulse
from ..runner.run import Outcome, stop_code
from ..runner.script import Scripts
from ..spark.progress import working_on
from ..storage.read import failing
from ..store.claimable import NOTHING_CLAIMABLE, offer
from ..store.claims import interrupt_soon
from ..store.database import briefly
from ..store.step_log import Step, record
from ..store.store import new_owner
from ..util.text import printable, typed
from .destinations import publish_result
from .jobs import takes_items, why_no_items
from .run_steps import reason_of_item, steps_of
from .stream_file import claim_items, pages, read_items

if TYPE_CHECKING:
    from .run import PipelineRunner


def run_stream(runner: "PipelineRunner", file: Path) -> Outcome:
    """Run a pipeline for each row of a CSV file; an item that fails is FAILED alone."""
    store, slug, work = runner.store, runner.jobid, runner.work
    if not takes_items(work.project, work.pipeline):
        raise WrongUse(
            printable(
                f"Pipeline {slug!r} takes no items: {why_no_items(work.project, work.pipeline)}, "
                "or run it without --stream."
            )
        )
    items = read_items(file)
    if not items:
        runner.tell(f"{printable(str(file))} has no rows: there is nothing to run")
        return Outcome(0)
    work.refuse_loss()
    with Scripts() as scripts:
        runner.scripts, scripts.works_here = scripts, True
        environment = runner.environment()
        if (why := offer(store, slug).obstacle) not in ("", NOTHING_CLAIMABLE):
            raise Refused(
                f"Pipeline {slug!r} can't run now: {why}. See `odf policy {typed(slug)}`."
            )
        claims = claim_items(store, slug, [json.dumps(each) for each in items], new_owner())
        runner.tell(f"Launching {printable(slug)} for {len(items)} items of {printable(file.name)}")
        with Pulse(store, claims[0].owner, say=runner.tell) as pulse:
            for claim in claims:
                pulse.hold(claim)
            made = _Stream(runner, environment, pulse, claims)
            try:
                with working_on(claims):
                    made.run(items)
            except BaseException as error:
                made.give_up(error)
                if not isinstance(error, Exception):
                    if not isinstance(error, KeyboardInterrupt) or scripts.stopping is None:
                        raise
                elif store.db.trouble(error):
                    raise
                if not (isinstance(error, DataflowError) or made.interrupted):
                    for line in "".join(traceback.format_exception(error)).splitlines():
                        runner._say(line)
            return made.outcome(scripts)


class _Stream:
    """The items of one run, and how each of them went."""

    def __init__(
        self,
        runner: "PipelineRunner",
        environment: JobEnvironment,
        pulse: Pulse,
        claims: Sequence[Claim],
    ) -> None:
        self.runner, self.environment, self.pulse = runner, environment, pulse
        self.store, self.work = runner.store, runner.work
        self.claims = claims
        self.rows: dict[Claim, int | None] = {}
        """The items that went well, and how many rows there were then."""
        self.bad: dict[Claim, str] = {}
        self.settled: set[Claim] = set()
        self.done = self.interrupted = 0
        self.error: BaseException | None = None

    def run(self, items: Sequence[dict[str, Any]]) -> None:
        """Run the items, publish the last frame that went well, and settle each item."""
        frame = self._transform(items)
        if self.rows:
            result = self._publish(frame)
            self._finish(result)
        for claim, reason in self.bad.items():
            self._fail(claim, reason)

    def give_up(self, error: BaseException) -> None:
        """Settle what isn't settled yet: nothing of it was published."""
        self.error = error
        left = [claim for claim in self.claims if claim not in self.settled]
        if self.runner.stopping() or not isinstance(error, Exception):
            stop = self.runner.interruption(error)
            self.runner.tell(f"Reason: {printable(stop.why)}")
            self.interrupted = len(left)
            with suppress(Exception):  # their leases settle what can't be settled now
                interrupt_soon(self.store, left, stop)
            self._let_go(left)
            return
        reason = reason_of(error)
        self.runner.tell(f"Reason: {printable(reason)}")
        for claim in left:
            self._fail(claim, self.bad.get(claim, reason))

    def outcome(self, scripts: Scripts) -> Outcome:
        lost = len(self.claims) - self.done - self.interrupted
        more = f", interrupted {self.interrupted}" if self.interrupted else ""
        self.runner.tell(f"done {self.done}, failed {lost}{more}")
        return Outcome(stop_code(scripts) or int(bool(lost)), self.done, lost)

    def _transform(self, items: Sequence[dict[str, Any]]) -> Any:
        """The last frame that went well; each item's steps become history."""
        from .run import open_sources

        work, frame = self.work, None
        chunk = open_chunk(self.store, self.claims[0], self.environment, self.pulse)
        work.begin(chunk)
        sources = open_sources(self.store, work.project, work.pipeline, chunk)
        steps: list[Step] = []
        began = self.store.now()
        with failing():
            made = work.engine.run_items(
                work.pipeline.slug,
                work.pipeline.transformations,
                sources,
                items,
                chained=True,
            )
            for claim, ran in zip(self.claims, made, strict=True):
                mine = steps_of(claim, ran, began)
                began = mine[-1].ended or began if mine else began
                steps += mine
                if ran.ok:
                    frame = frame if ran.frame is None else ran.frame  # only the last has one
                    self.rows[claim] = mine[-1].rows if mine else None
                else:
                    self.bad[claim] = reason_of_item(ran)
                    self.runner.tell(
                        f"Item {claim.dataid} has failed: {printable(self.bad[claim])}"
                    )
        for some in pages(steps):
            record(self.store, some)
        return frame

    def _publish(self, frame: Any) -> Result:
        last = list(self.rows)[-1]
        chunk = open_chunk(self.store, last, self.environment, self.pulse)

        with failing(), self.work.engine.telling():
            work = self.work
            return publish_result(
                self.store,
                work.project,
                work.pipeline,
                work.destination,
                frame,
                chunk,
                is_item=False,
                say=self.runner.tell,
            )

    def _finish(self, result: Result) -> None:
        output = self.work.plan.outputs[0]
        last = list(self.rows)[-1]
        location = result.location or self.environment.locations.get(output)
        for some in pages(list(self.rows)):
            facts = [
                Fact(output, claim.dataid, location, self.rows[claim])
                if claim is not last
                else Fact(
                    output,
                    claim.dataid,
                    location,
                    result.rows,
                    result.bytes,
                    result.fingerprint,
                    schema=result.schema,
                    replaces=result.replaces,
                )
                for claim in some
            ]
            try:
                self.store.finish(some, facts)
                self.done += len(some)
            except StaleClaim as error:
                self.runner.tell(str(error))
            self._let_go(some)

    def _fail(self, claim: Claim, reason: str) -> None:
        with suppress(StaleClaim):
            if self.error is None:
                self.store.fail(claim, reason, may_retry=False)
            else:
                briefly(self.store.db, lambda: self.store._fail(claim, reason, False))
        self._let_go([claim])

    def _let_go(self, claims: Sequence[Claim]) -> None:
        self.settled.update(claims)
        for claim in claims:
            self.pulse.let_go(claim)
