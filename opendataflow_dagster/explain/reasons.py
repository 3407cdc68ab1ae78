"""What stands in the way of a claim: for each thing its code, and the command that removes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..location import is_missing, is_within, place_to_look
from ..model import BLOCKING, FAILED, HOLD, READY, RUNNING, Effect, effect, read_status
from ..store.store import CLOCK_DRIFT_SECONDS, LONGEST_LEASE_SECONDS
from ..util.text import typed
from ..util.times import shown
from .answers import Reason, Row, State

IN_A_CIRCLE = "IN_A_CIRCLE"
"""The code of a producer that waits for the one that asks."""

ABANDONED_AGE = "2h"
"""What `odf recover --older-than` is suggested with."""


def hindrances(state: State, above: Callable[[str], Reason | None]) -> Iterator[Reason]:
    """Why a claim would be refused.

    `above` tells what stands in the way of the job that makes a missing input; None: nothing.
    """
    yield from _output_reasons(state)
    yield from _own_input_reasons(state)
    for datasetid in state.plan.inputs:
        yield from _input_reasons(state, datasetid, above)
    if not state.plan.inputs and not any(
        row.locktype == "OUT" for out in state.plan.outputs for row in state.mine(out)
    ):
        yield _unheard_of(state)


def advice(state: State) -> Iterator[Reason]:
    """Why the inputs shouldn't be read, though a claim would be granted."""
    yield from _location_reasons(state)
    yield from _validation_reasons(state)


def _output_reasons(state: State) -> Iterator[Reason]:
    dataid, jobid = state.dataid, state.plan.jobid
    for datasetid in state.plan.outputs:
        for row in state.outputs_of(datasetid):
            found = effect("OUT", row.jobid == jobid, row.locktype, row.status)
            if found == Effect.LOCKED:
                yield _locked(state, row)
            elif found in BLOCKING:
                by = "" if row.jobid == jobid else f" by {row.jobid!r}"
                word = row.status if row.status is not None else "NULL"
                text = f"{datasetid!r} is {word}{by} since {shown(row.since)}"
                if found != Effect.ALREADY_DONE:
                    text += _because(row)
                    retry_at = state.claims.get(row.jobid, {}).get("retry_at")
                    text += f"; a retry is due at {shown(retry_at)}" if retry_at else ""
                verb = "release" if read_status(row.status) == HOLD else "resubmit"
                yield Reason(found, text, f"odf {verb} {typed(row.jobid, dataid)}")
        for row in state.readers_of(datasetid):
            yield _locked(state, row)
        for row in state.mine(datasetid):
            found = effect("OUT", True, row.locktype, row.status)
            if row.locktype != "OUT" and found in BLOCKING:
                text = f"{jobid!r} has a row of locktype {row.locktype} on its output {datasetid!r}"
                yield Reason(found, text, f"odf delete-run {typed(jobid, dataid)}")


def _own_input_reasons(state: State) -> Iterator[Reason]:
    jobid, dataid = state.plan.jobid, state.dataid
    own = [
        row
        for datasetid in state.plan.outputs
        for row in state.mine(datasetid)
        if row.locktype == "OUT"
    ]
    if any(row.status == RUNNING for row in own):
        return  # the output says it already
    again = any(effect("OUT", True, "OUT", row.status) == Effect.AGAIN for row in own)
    forget = f"odf delete-run {typed(jobid, dataid)}"
    for datasetid in state.plan.reads:
        for row in state.mine(datasetid):
            found = effect("IN", True, row.locktype, row.status)
            since = f"since {shown(row.since)}"
            if found == Effect.CONSUMED and not again:
                text = f"{jobid!r} has consumed {datasetid!r} {since}"
                yield Reason(Effect.ALREADY_DONE, text, forget)
            elif found in BLOCKING and row.locktype != "IN":
                yield _own_product(state, row)
            elif found == Effect.LOCKED:
                text = (
                    f"{jobid!r} has an IN lock on {datasetid!r} {since}, but no output is RUNNING"
                )
                yield Reason(found, text, forget)
            elif found in BLOCKING:
                text = f"the IN row of {jobid!r} on {datasetid!r} is {row.status} {since}"
                yield Reason(found, text, forget)


def _own_product(state: State, row: Row) -> Reason:
    """A job can't lock its own output under another registration: both would be one row."""
    if row.status == RUNNING:
        return _locked(state, row)
    jobid, dataid = state.plan.jobid, state.dataid
    text = f"{jobid!r} produced {row.datasetid!r} itself, and now reads it: one row can't be both"
    action = f"odf delete-run {typed(jobid, dataid)}"
    if row.status == READY and not any(
        other.jobid == "external" for other in state.outputs_of(row.datasetid)
    ):
        action = (
            "odf dml \"update datastatus set jobid = 'external' where "
            f"jobid = {_literal(jobid)} and datasetid = {_literal(row.datasetid)} "
            f'and dataid = {_literal(dataid)}"'
        )
    return Reason("LOCKED", text, action)


def _input_reasons(
    state: State, datasetid: str, above: Callable[[str], Reason | None]
) -> Iterator[Reason]:
    if datasetid == "today":
        if state.dataid != state.today:
            text = f"'today' is {state.today}, and this job runs only on that date"
            yield Reason("DATA_NOT_READY", text)
        return
    rows = state.outputs_of(datasetid)
    if running := [row for row in rows if row.status == RUNNING]:
        yield _locked(state, running[0])._replace(code="DATA_NOT_READY")
        return
    if any(row.status == READY for row in rows):
        return
    text, action = _failed_or_held(state, datasetid, rows) or _missing(
        state, datasetid, rows, above
    )
    yield Reason("DATA_NOT_READY", text, action)


def _failed_or_held(state: State, datasetid: str, rows: Sequence[Row]) -> tuple[str, str] | None:
    """Return which row of an input is FAILED or on HOLD, and the command that moves it."""
    dataid = state.dataid
    for row in sorted(rows, key=lambda row: read_status(row.status) != HOLD):
        text = f"{datasetid!r} is {row.status} by {row.jobid!r} since {shown(row.since)}"
        status = read_status(row.status)
        if status == FAILED:
            again = f"odf resubmit {typed(row.jobid, dataid)}"
            if row.jobid not in state.producers.get(datasetid, []):
                again = f"odf ready {typed(datasetid, dataid)}"  # nobody would make it again
            return text + _because(row), again
        if status == HOLD:
            return text + _because(row), f"odf release {typed(row.jobid, dataid)}"
    return None


def _missing(
    state: State, datasetid: str, rows: Sequence[Row], above: Callable[[str], Reason | None]
) -> tuple[str, str]:
    """Return why an input isn't there yet, and the command that helps its producer."""
    there = f"is {rows[0].status} by {rows[0].jobid!r}" if rows else "isn't there yet"
    text, by_hand = f"{datasetid!r} {there}", f"odf ready {typed(datasetid, state.dataid)}"
    producers = state.producers.get(datasetid, [])
    if not producers:
        return f"{text}, and no registered job produces it", by_hand
    producer = next((row.jobid for row in rows if row.jobid in producers), producers[0])
    reason = above(producer)
    if reason is None:
        run = f"odf run --job {typed(producer)} SCRIPT"
        return f"{text}: {producer!r} produces it, and may run", run
    if reason.code == IN_A_CIRCLE:
        return (
            f"{text}, and {producer!r}, which produces it, waits for this job in turn",
            by_hand,
        )
    return f"{text}: {producer!r} produces it, and may not run: {reason.text}", reason.action


def _unheard_of(state: State) -> Reason:
    this = typed(state.plan.jobid, state.dataid)
    in_the_way = any(state.mine(out) for out in state.plan.outputs)
    return Reason(
        "DATA_NOT_READY",
        f"{state.plan.jobid!r} reads nothing, and no row says that chunk {state.dataid!r} exists",
        f"odf delete-run {this}" if in_the_way else f"odf hold {this} && odf release {this}",
    )


def _locked(state: State, row: Row) -> Reason:
    claim = state.claims.get(row.jobid, {})
    how = "produced" if row.locktype == "OUT" else "read"
    text = f"{row.datasetid!r} is being {how} by {row.jobid!r} since {shown(row.since)}"
    if state.at:
        return Reason("LOCKED", text + (f", by {row.who}" if row.who else ""))
    if not claim.get("owner"):
        text += ", without a claim of ours: if that program is gone, the chunk stays RUNNING"
        return Reason(
            "LOCKED", text, f"odf recover --job {typed(row.jobid)} --older-than {ABANDONED_AGE}"
        )
    lease_end = claim["lease_end"]
    text += f", by {claim['owner']}"
    if lease_end and state.now and lease_end < state.now:
        text += f", whose lease ended at {shown(lease_end)}"
        return Reason("LOCKED", text, f"odf recover --job {typed(row.jobid)}")
    text += f", with a lease until {shown(lease_end)}"
    if state.now and _is_ahead(claim, state.now.timestamp()):
        text += ", because of a wrong clock: if that program is gone, end its claim"
        this = f"{typed(row.jobid, state.dataid)} RESUBMIT --generation {claim['generation']}"
        return Reason("LOCKED", text, f"odf end {this}")
    return Reason("LOCKED", text)


def _is_ahead(claim: Mapping[str, Any], now: float) -> bool:
    """Whether a claim began or was renewed in the future, or ends further ahead than is meant."""
    begun = [claim[name] for name in ("started", "heartbeat") if claim.get(name)]
    if any(moment.timestamp() > now + CLOCK_DRIFT_SECONDS for moment in begun):
        return True
    longest = max(LONGEST_LEASE_SECONDS, claim.get("lease_seconds") or 0)
    return bool(claim.get("lease_end")) and claim["lease_end"].timestamp() > now + longest


def _location_reasons(state: State) -> Iterator[Reason]:
    for datasetid, look in state.looks.items():
        made = state.ready_row(datasetid)
        if look.there is False and made:
            action = f"odf resubmit {typed(made.jobid, state.dataid)}"
            if made.jobid not in state.producers.get(datasetid, []):
                action += f" && odf ready {typed(datasetid, state.dataid)}  # when it is back"
            yield Reason("INVALID_LOCATION", f"{datasetid!r} is READY, but {look.text}", action)
    for datasetid, place, produced in state.input_places():
        where = place_to_look(place, produced)
        if place and where and is_missing(where):
            text = f"{datasetid!r} is registered at {place}, which doesn't exist here"
        elif place and produced and not is_within(produced, place):
            text = (
                f"{datasetid!r} is registered at {place}, but this chunk was produced at {produced}"
            )
        else:
            continue
        yield Reason("INVALID_LOCATION", text, f"odf dataset list  # and correct {datasetid}")


def _validation_reasons(state: State) -> Iterator[Reason]:
    for row, fact in state.inputs():
        if fact.get("validated") in (False, 0):
            text = f"{row.datasetid!r} by {row.jobid!r} failed its checks"
            text += f": {fact['checks']}" if fact.get("checks") else ""
            yield Reason("NOT_VALIDATED", text, f"odf resubmit {typed(row.jobid, state.dataid)}")


def _because(row: Row) -> str:
    return f" ({row.why})" if row.why else ""


def _literal(text: str) -> str:
    """A text for SQL within double quotes of a shell."""
    text = text.replace("'", "''")
    for letter in '\\"$`':
        text = text.replace(letter, "\\" + letter)
    return f"'{text}'"
