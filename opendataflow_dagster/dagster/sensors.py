"""The sensor that keeps Dagster's grid and the tables in agreement."""

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import dagster as dg

from ..model import Recovered
from ..store.history import unread
from ..store.store import Store
from .catch_up_sensor import PATIENCE, away
from .resources import DataflowResource
from .settlement import bury_lost_runs, settle_ended_runs
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from .reconcile import Reconciled

GRACE = 60.0
"""Seconds that workers have, after an outage of the database, to renew their leases."""

_back: dict[str, float] = {}
_lock = threading.Lock()


def reconcile_sensor(
    dataflow: DataflowResource | None = None,
    *,
    translator: DataflowTranslator | None = None,
    name: str = "opendataflow_reconcile",
    minimum_interval_seconds: int = 10,
    seconds: float = 15.0,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """Mirror what changed in the tables, settle what dead runs left, recover lost claims.

    A tick takes about `seconds` at most and goes on where it stopped. To have everything compared
    again, reset the sensor's cursor in the UI, or run `odf drift --repair`.
    """
    dataflow = dataflow or DataflowResource()
    translator = translator or DataflowTranslator()

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Shows in Dagster's grid what the tables of OpenDataFlow say, and settles "
        "what dead runs left.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        # Here, since runs load the location too, and have no use for Dagster's storage in SQL.
        from .grid import Mirror
        from .reconcile import reconcile

        store = None
        try:
            store = dataflow.patient_store(PATIENCE)
            settled = settle(store, context.instance)
            done = reconcile(
                store, Mirror(context.instance), translator, context.cursor, seconds=seconds
            )
        except Exception as error:
            return dg.SkipReason(_away(store, error))
        context.update_cursor(done.cursor)
        for each in settled:
            context.log.info(f"{each.jobid} {each.dataid}: settled as {each.status}, {each.reason}")
        return dg.SkipReason(" ".join(filter(None, [told(done, settled), unread(store)])))

    return sensor


def settle(store: Store, instance: dg.DagsterInstance) -> list[Recovered]:
    """Settle the chunks of runs that ended or died, and what else holds a lease that is over."""
    done = list(settle_ended_runs(store, instance))
    with _lock:
        waits = time.monotonic() < _back.get(store.db.where, 0.0)
    if not waits:
        done += bury_lost_runs(store, instance)
        done += store.recover(who="dagster")
    return done


def told(done: "Reconciled", settled: Iterable[Recovered]) -> str:
    """One line about a pass."""
    counts = {
        "chunks shown as READY": done.made,
        "as running or failed": done.planned,
        "as missing": done.cleared,
        "partition keys changed": done.keys,
        "chunks settled": len(list(settled)),
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    line = ", ".join(parts) if parts else "The grid agrees with the tables"
    return f"{line}; there is more, which the next tick does." if done.more else f"{line}."


def _away(store: Store | None, error: Exception) -> str:
    """One line about tables that can't be read; workers get time to renew their leases after it."""
    line = away(store, error, "Nothing is shown or settled until they can. See `odf doctor`.")
    if store is not None:
        with _lock:
            _back[store.db.where] = time.monotonic() + GRACE
    return line
