"""Items through all transformations of a pipeline: a batch in one task, or one by one."""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .annotation import PANDAS
from .convert import as_pandas
from .task import Item, ItemDone, Sent, StepRan, many
from .task_frames import loaded
from .transformation import TransformationError

if TYPE_CHECKING:
    from .engine import Engine


class ItemRan(NamedTuple):
    """What became of an item; chained, only the last good one has its frame."""

    frame: Any
    steps: tuple[StepRan, ...]

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.steps)


def run_items(
    engine: "Engine",
    slug: str,
    names: Sequence[str],
    sources: Sequence[Any],
    items: Sequence[Any],
    chained: bool,
    limit: float | None = None,
) -> list[ItemRan]:
    """What became of each item, in order; of pandas' transformations, within so many seconds."""
    if not items:
        return []
    if any(engine.engine_of(slug, name) != PANDAS for name in names):
        return _one_by_one(engine, slug, names, sources, items, chained, limit)
    return _in_task(engine, slug, names, sources, items, chained, limit)


def _in_task(
    engine: "Engine",
    slug: str,
    names: Sequence[str],
    sources: Sequence[Any],
    items: Sequence[Any],
    chained: bool,
    limit: float | None,
) -> list[ItemRan]:
    from .engine import WorkerDied

    given: list[Item] = [(each,) for each in items]
    first: list[Sent] = []
    try:
        with engine.watched(slug) as spark:
            loads = engine.loads(spark)
            if chained:  # the first frame is another one in each batch
                first = [loads.once(as_pandas(sources[0]))]
            sent = first + loads.sources(slug, sources[len(first) :])
            done: list[ItemDone] = engine.ask(spark, many, sent, slug, names, given, chained, limit)
    except WorkerDied:
        if len(items) == 1:  # to find the transformation
            return _one_by_one(engine, slug, names, sources, items, chained, limit)
        half = len(items) // 2
        start = _in_task(engine, slug, names, sources, items[:half], chained, limit)
        if chained:
            sources = [_last(start, sources[0]), *sources[1:]]
        rest = _in_task(engine, slug, names, sources, items[half:], chained, limit)
        if chained and any(each.ok for each in rest):
            start = [each._replace(frame=None) for each in start]
        return start + rest
    finally:
        for each in first:
            each.parcel.drop()
    return [_ran(each, engine) for each in done]


def _one_by_one(
    engine: "Engine",
    slug: str,
    names: Sequence[str],
    sources: Sequence[Any],
    items: Sequence[Any],
    chained: bool,
    limit: float | None,
) -> list[ItemRan]:
    with engine.watched(slug):
        first, *rest = [as_pandas(each) for each in sources]
    ran: list[ItemRan] = []
    for item in items:
        buffer, steps, made = first, [], []
        due = time.monotonic() + limit if limit else math.inf
        for name in names:
            start = time.perf_counter()
            try:
                done = engine.run(slug, name, [buffer, *rest], item, due=due)
            except TransformationError as error:
                seconds = time.perf_counter() - start
                steps.append(StepRan(name, str(error), error.printed, error.trace, None, seconds))
                break
            buffer = done.frame
            made.append(buffer)
            steps.append(StepRan(name, "", done.printed, "", done.rows, done.seconds))
        one = ItemRan(None, tuple(steps))
        if one.ok:
            with engine.watched(slug):
                frame = as_pandas(buffer)
            if chained:
                first, ran = frame, [each._replace(frame=None) for each in ran]
            one = one._replace(frame=frame)
        if made:
            engine.release(*made)
        ran.append(one)
    return ran


def _ran(done: ItemDone, engine: "Engine") -> ItemRan:
    frame = None if done.frame is None else loaded(done.frame, engine.project.root)
    return ItemRan(frame, done.steps)


def _last(ran: Sequence[ItemRan], before: Any) -> Any:
    """The frame of the last good item; where there is none, the one before."""
    return next((each.frame for each in ran if each.frame is not None), before)
