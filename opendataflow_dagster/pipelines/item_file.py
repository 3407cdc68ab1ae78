"""Items from a file: `odf pipeline run --stream FILE` runs each row of a CSV file as an item.

The sources are read once, and the result of one item is the first frame of the next: the last frame
holds them all. It is published before any of them is READY.
"""

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..chunk import Result, open_chunk, reason_of
from ..errors import DataflowError, Refused, StaleClaim, WrongUse
from ..formats.csv_options import UNDECLARED, read_pandas
from ..model import LEASE_SECONDS, RUNNING, Claim, Stop
from ..runner.environment import JobEnvironment
from ..runner.heartbeat import Pulse
from ..runner.run import Outcome, stop_code
from ..runner.script import Scripts
from ..storage import files
from ..storage.read import failing
from ..store.claimable import NOTHING_CLAIMABLE, offer
from ..store.database import briefly
from ..store.moves import Move, add_rows, generations
from ..store.store import Store
from ..store.workers import new_owner
from ..util.text import first_line, printable, typed
from .destinations import publish_result
from .endpoints import Source, Verdict
from .items import Feeder, ItemLoop, ItemResult, pages
from .jobs import takes_items, why_no_items
from .runner import PipelineRunner, open_sources, reason_of_item


def run_file(runner: PipelineRunner, file: Path) -> Outcome:
    """Run a pipeline for each row of a CSV file; an item that fails is FAILED alone."""
    work = runner.work
    if not takes_items(work.project, work.pipeline):
        raise WrongUse(
            printable(
                f"Pipeline {runner.jobid!r} takes no items: "
                f"{why_no_items(work.project, work.pipeline)}, or run it without --stream."
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
        obstacle = offer(runner.store, runner.jobid).obstacle
        if obstacle not in ("", NOTHING_CLAIMABLE):
            raise Refused(
                f"Pipeline {runner.jobid!r} can't run now: {obstacle}. "
                f"See `odf policy {typed(runner.jobid)}`."
            )
        with Pulse(runner.store, new_owner(), say=runner.tell) as pulse:
            feeder = FileItems(runner, environment, pulse, items, file.name)
            return _run(ItemLoop(feeder), feeder.claim(), runner, scripts)


def _run(
    loop: ItemLoop, claims: Sequence[Claim], runner: PipelineRunner, scripts: Scripts
) -> Outcome:
    """Run all items as one batch; how they ended."""
    try:
        loop.work(claims)
    except BaseException as error:
        if loop.stop:
            runner.tell(f"Reason: {printable(loop.stop.why)}")
        if not isinstance(error, Exception):
            if not isinstance(error, KeyboardInterrupt) or scripts.stopping is None:
                raise
        elif runner.store.db.trouble(error):
            raise
    failed = len(claims) - loop.done - loop.interrupted
    more = f", interrupted {loop.interrupted}" if loop.interrupted else ""
    runner.tell(f"done {loop.done}, failed {failed}{more}")
    return Outcome(stop_code(scripts) or int(bool(failed)), loop.done, failed)


class FileItems(Feeder):
    """All items of a file as one batch: the last frame is published like that of a run."""

    chained = True
    may_retry = False  # the frame that is published holds the items after it already

    def __init__(
        self,
        runner: PipelineRunner,
        environment: JobEnvironment,
        pulse: Pulse,
        items: Sequence[dict[str, Any]],
        file_name: str,
    ) -> None:
        work = runner.work
        super().__init__(runner.store, work.pipeline, work.engine, pulse, runner.tell)
        self._runner, self._environment = runner, environment
        self._items, self._file_name = items, file_name
        self._reasons: dict[Claim, str] = {}
        """Why items failed by themselves."""

    @property
    def output(self) -> str:
        return self._runner.work.plan.outputs[0]

    def claim(self) -> list[Claim]:
        slug = self._runner.jobid
        texts = [json.dumps(item) for item in self._items]
        claims = claim_new_items(self.store, slug, texts, self.pulse.owner)
        file_name = printable(self._file_name)
        self.say(f"Launching {printable(slug)} for {len(claims)} items of {file_name}")
        return claims

    def decode(self, claims: Sequence[Claim]) -> Mapping[str, Any]:
        return {claim.dataid: item for claim, item in zip(claims, self._items, strict=True)}

    def sources(self, claims: Sequence[Claim]) -> Sequence[Source]:
        work = self._runner.work
        chunk = open_chunk(self.store, claims[0], self._environment, self.pulse)
        work.begin(chunk)
        return open_sources(self.store, work.project, work.pipeline, chunk)

    def after_transform(self, results: Sequence[ItemResult], seconds: float) -> None:
        for result in results:
            if result.ran and not result.ok:
                reason = self._reasons[result.claim] = reason_of_item(result.ran)
                self.say(f"Item {result.claim.dataid} has failed: {printable(reason)}")

    def publish(self, results: Sequence[ItemResult]) -> Mapping[Claim, Verdict]:
        """Publish the last good frame, which holds the rows of all."""
        work, last = self._runner.work, results[-1].claim
        frames = [result.ran.frame for result in results if result.ran]
        frame = next((frame for frame in reversed(frames) if frame is not None), None)
        chunk = open_chunk(self.store, last, self._environment, self.pulse)
        with failing(), self.engine.telling():
            published = publish_result(
                self.store,
                work.project,
                work.pipeline,
                work.destination,
                frame,
                chunk,
                is_item=False,
                say=self.say,
            )
        location = published.location or self._environment.locations.get(self.output)
        verdicts = {result.claim: Result(_rows_of(result), location=location) for result in results}
        return verdicts | {last: published._replace(location=location)}

    def interruption(self, error: BaseException) -> Stop | None:
        is_interrupted = self._runner.stopping() or not isinstance(error, Exception)
        return self._runner.interruption(error) if is_interrupted else None

    def give_up(self, error: BaseException, claims: Sequence[Claim]) -> None:
        """Fail what isn't settled: nothing of it was published."""
        reason = reason_of(error)
        self.say(f"Reason: {printable(reason)}")
        for claim in claims:
            why = self._reasons.get(claim, reason)
            with suppress(StaleClaim):
                briefly(self.store.db, lambda c=claim, w=why: self.store._fail(c, w, False))
        if not isinstance(error, Exception) or self.store.db.trouble(error):
            raise error
        if not isinstance(error, DataflowError):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self._runner._say(line)

    def raise_if_blameless(self, error: Exception, *, publishing: bool) -> None:
        if publishing:
            raise error
        with failing():
            raise error


def _rows_of(result: ItemResult) -> int | None:
    """The rows of the frame after an item."""
    return result.ran.steps[-1].rows if result.ran and result.ran.steps else None


# --- the rows of a file as items ---


def read_items(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file with the values that JSON would have: None for a missing one."""
    files.need("pandas")
    shown = printable(str(file))
    try:
        frame = read_pandas(str(file), UNDECLARED)
    except FileNotFoundError:
        raise WrongUse(f"There is no file {shown}. Name a CSV file with a row per item.") from None
    except (OSError, ValueError) as error:  # errors of pandas and of Unicode are ValueErrors
        raise WrongUse(f"{shown} can't be read as CSV: {first_line(error)}. Correct it.") from None
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            if isinstance(value, float) and math.isinf(value):
                raise WrongUse(f"{shown}: {name!r} of row {number} is infinite, which no item is.")
    return [{str(name): value for name, value in row.items()} for row in rows]


def claim_new_items(store: Store, jobid: str, payloads: Sequence[str], owner: str) -> list[Claim]:
    """Add items as chunks of a job that are RUNNING already: nobody else can claim them."""
    db = store.db
    numbers, _ = db.insist(lambda: generations(store, len(payloads)))

    def work() -> list[Claim]:
        with db.transaction(who=owner, why="odf pipeline run --stream", act="claim"):
            [(lease, time_limit)] = db.run("forcing.dial", jobid=jobid, lease=LEASE_SECONDS)
            claims = [
                Claim(jobid, str(number), number, owner, 1, float(lease), time_limit)
                for number in numbers
            ]
            if db.run("items.is_accepted", jobid=jobid, dataid=claims[0].dataid):
                return claims  # the connection was lost after the commit
            store.refuse_unclaimable(now=True)
            outputs = store.read_plan(jobid).outputs
            for page, texts in zip(pages(claims), pages(payloads), strict=True):
                items = [
                    {"jobid": jobid, "dataid": claim.dataid, "payload": text, "idempotency": None}
                    for claim, text in zip(page, texts, strict=True)
                ]
                held = [{"dataid": claim.dataid, "generation": claim.generation} for claim in page]
                moves = [
                    Move(jobid, output, claim.dataid, None, RUNNING)
                    for claim in page
                    for output in outputs
                ]
                db.change("items.add", items=json.dumps(items))
                db.change(
                    "pipelines.claim_items",
                    jobid=jobid,
                    owner=owner,
                    lease=float(lease),
                    rows=json.dumps(held),
                )
                add_rows(store, moves, {claim.dataid: claim.generation for claim in page})
            return claims

    return db.insist(work)[0]
