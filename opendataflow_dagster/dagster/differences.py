"""Which squares of the grid aren't what the tables say, and how each is put right."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..model import FAILED, PENDING, READY, RUNNING, natural_key
from ..store.overview import EARLIER, Execution, Truth, holders, origins, truths
from ..store.store import Store
from .outside import OutsideRuns
from .public_grid import PublicMirror, Square, is_ours
from .translator import DataflowTranslator

NO_ROW = Truth(PENDING, "", None)
"""What the tables say of a chunk that they don't know."""


class WrongSquare(NamedTuple):
    """A partition whose square isn't what the tables say, and how to put it right."""

    datasetid: str
    dataid: str
    truth: Truth
    shown: Square
    repair: str  # "make", "plan", "clear" or "wait"
    run_id: str = ""
    execution: Execution | None = None


def differences(
    store: Store,
    mirror: PublicMirror,
    translator: DataflowTranslator,
    datasetid: str,
    dataids: Iterable[str] | None = None,
    blamed: Mapping[tuple[str, str], str] | None = None,
    runs: OutsideRuns | None = None,
) -> list[WrongSquare]:
    """The chunks of a dataset (or some of them) whose squares aren't what the tables say.

    `blamed` tells who made chunks FAILED: when that is the run that Dagster shows as in progress
    there, the run is through with the chunk.
    """
    wanted = None if dataids is None else sorted(set(dataids))
    there, runs = truths(store, datasetid, wanted), runs or OutsideRuns(store, mirror)
    undone = {
        dataid: truth for dataid, truth in there.items() if truth.status not in (READY, PENDING)
    }
    found_origins = origins(store, datasetid, undone) if undone else {}
    parts = {translator.partition_key(dataid): dataid for dataid in wanted or there}
    shown = mirror.shown(translator.asset_key(datasetid), None if wanted is None else list(parts))
    found, waiting = [], {}
    for part in dict.fromkeys([*parts, *shown]):
        dataid = parts.get(part) or translator.dataid(part)
        truth, square = there.get(dataid, NO_ROW), shown.get(part, Square())
        blame = (blamed or {}).get((datasetid, dataid), "")
        run_id, execution = "", None
        if dataid in undone:
            origin = found_origins.get(dataid)
            execution = origin.execution if origin else Execution(EARLIER, truth.jobid)
            run_id = runs.of_chunk(execution, truth.status)
        repair = _repair(truth, square, blame, run_id)
        if repair == "plan" and not mirror.shows_runs:  # a square can only be taken back, if at all
            is_over = square.state == READY and truth.status != RUNNING
            repair = "clear" if is_over else ""
        if repair == "clear" and square.state == FAILED and not is_ours(square.run_id):
            # An open backfill still counts this failure: with the square cleared, it would take the
            # partition for one that never ran. The square is cleared when the backfill ends.
            if square.run_id not in waiting:
                waiting[square.run_id] = mirror.backfill_of(square.run_id)
            if waiting[square.run_id]:
                repair, run_id = "wait", waiting[square.run_id] or ""
        if repair:
            found.append(WrongSquare(datasetid, dataid, truth, square, repair, run_id, execution))
    found.sort(key=lambda square: (natural_key(square.dataid), square.dataid))
    return _with_holders(store, mirror, found)


def _repair(truth: Truth, shown: Square, blame: str, run_id: str) -> str:
    """What has to be done about one square, which `run_id` is to show, or nothing."""
    if shown.live:  # it will tell itself how it ended, unless it's through with this chunk already
        return "plan" if truth.status == FAILED and shown.run_id in blame else ""
    if truth.status == READY:
        same = shown.state == READY and shown.version == truth.version
        return "" if same else "make"
    if truth.status == PENDING:
        return "clear" if shown.state else ""
    state = RUNNING if truth.status == RUNNING else FAILED
    same = shown.state == state and (shown.run_id == run_id or not is_ours(shown.run_id))
    return "" if same else "plan"


def _with_holders(
    store: Store, mirror: PublicMirror, found: list[WrongSquare]
) -> list[WrongSquare]:
    """Name the Dagster run that holds a chunk, so that its square leads there."""
    running = {
        square.dataid: square.truth
        for square in found
        if square.repair == "plan" and square.truth.status == RUNNING
    }
    if not running:
        return found
    held = holders(store, running)
    live = mirror.unfinished(set(held.values()))
    return [
        square._replace(run_id=held[square.dataid])
        if square.dataid in running and held.get(square.dataid) in live
        else square
        for square in found
    ]
