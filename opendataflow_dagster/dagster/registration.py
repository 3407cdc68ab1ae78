"""What the jobs of a code location need in the tables: told where it lacks, or applied."""

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import NamedTuple
from urllib.parse import quote

import dagster as dg

from ..config.settings import BUILT_IN
from ..errors import DataflowError, NoDatabase
from ..flow.apply import apply_flow
from ..flow.flow import Flow
from ..flow.plan import ADD, FlowPlan, plan_flow
from ..model import Plan
from ..store.catalog import Catalog, read_jobs
from ..store.store import Store
from ..util.text import first_line, first_of, printable
from .resources import DataflowResource

FILL_SECONDS = 20.0
"""Seconds that a tick judges the chunks of jobs that it has registered; others go on with it."""

MAX_NAMED_JOBS = 5


class LocationRegistration(NamedTuple):
    """What a code location needs in the tables, as far as its code knows."""

    flow: Flow | None = None
    command: str = ""
    """What registers the flow."""
    apply: bool | None = None
    """Whether a tick adds what the tables lack of the flow; None: to the embedded SQLite."""
    left_out: Mapping[str, str] = {}
    """Job → the line of why it was left out when the location was loaded."""
    unread: str = ""
    """Why nothing was known of the tables when the location was loaded."""

    def bring_up(self, dataflow: DataflowResource, store: Store) -> str:
        """Add what the tables lack, or say so in a line; nothing if they lack nothing.

        It only ever adds: what is registered with other values is for a person to change.
        """
        lines = [self._left_out(store)]
        if self.flow is not None:
            try:
                lines.append(self._bring_up(self.flow, dataflow, store))
            except DataflowError as error:
                if isinstance(error, NoDatabase) or store.db.trouble(error):
                    raise
                lines.append(f"Flow {self.flow.name!r} isn't applied: {first_line(error)}.")
        return " ".join(filter(None, lines))

    def _bring_up(self, flow: Flow, dataflow: DataflowResource, store: Store) -> str:
        applies = self._applies(dataflow)
        if _has_no_tables(dataflow):
            if not applies:
                raise NoDatabase(f"{store.db.where} has no tables yet. Run: {self.command}")
            store.init()
        plan, added = plan_flow(store, flow), ""
        if applies and plan.count(ADD):
            done = apply_flow(store, flow, additions=True)
            store.fill(seconds=FILL_SECONDS)
            added = f"Flow {flow.name!r}: {_names(done)} registered. "
            plan = plan_flow(store, flow)
        if not plan.changes:
            return added.rstrip()
        # What is in conflict is for a person to look at: applying it would be refused.
        command = self.command.replace("apply", "plan", 1) if plan.conflicts else self.command
        return (
            f"{added}The tables aren't as flow {flow.name!r} says: {plan.summary} "
            f"({_names(plan)}). Run: {command}."
        )

    def _applies(self, dataflow: DataflowResource) -> bool:
        return dataflow.settings.origin == BUILT_IN if self.apply is None else self.apply

    def _left_out(self, store: Store) -> str:
        """A line for the jobs that were left out, if any."""
        if self.unread:
            return f"When this code location was loaded, {self.unread}. Reload it."
        if not self.left_out:
            return ""
        there = {jobid for jobid, plan in read_jobs(store).items() if not plan.flaw}
        come = sorted(there & self.left_out.keys())
        lines = [line for jobid, line in sorted(self.left_out.items()) if jobid not in come]
        if come:
            names = ", ".join(map(repr, come))
            lines.append(f"{names}: registered since. Reload this code location")
        return f"{'. '.join(first_of(lines, MAX_NAMED_JOBS))}."


def refuse_unapplied(dataflow: DataflowResource, catalog: Catalog, jobid: str) -> None:
    """Refuse the run of a job that the tables don't have as its flow says."""
    if not catalog.registered_by:
        return
    try:
        if dataflow.register_in_test(catalog, jobid):
            return
        lacking = _lacking(dataflow, catalog.jobs[jobid])
    except DataflowError as error:
        lacking = str(error)
        if not (isinstance(error, NoDatabase) and "odf init" in lacking):
            raise dg.Failure(lacking, allow_retries=False) from None
    if lacking:
        raise dg.Failure(f"{lacking} Run: {catalog.registered_by}", allow_retries=False)


def _lacking(dataflow: DataflowResource, wanted: Plan) -> str:
    """What the tables lack of a job, as a sentence; more inputs than the flow says are no lack."""
    store, job = dataflow.store, f"Job {wanted.jobid!r}"
    if _has_no_tables(dataflow):
        return f"{job} isn't registered: {store.db.where} has no tables yet."
    plan = store.db.insist(lambda: store.read_plan(wanted.jobid))[0]
    if {*wanted.inputs} <= {*plan.inputs} and plan.outputs == wanted.outputs:
        return ""
    if not (plan.inputs or plan.outputs):
        return f"{job} isn't registered in {store.db.where}."
    return (
        f"{job} is registered with {_links(plan)} in {store.db.where}, and its flow says "
        f"{_links(wanted)}."
    )


def _links(plan: Plan) -> str:
    return f"in {', '.join(plan.inputs) or 'nothing'} and out {', '.join(plan.outputs)}"


def _names(plan: FlowPlan) -> str:
    """What a plan is about, briefly: `dataset sales, job check and 3 more`."""
    names = [f"{change.kind} {printable(change.name)}" for change in plan.changes]
    more = f" and {len(names) - MAX_NAMED_JOBS} more" if len(names) > MAX_NAMED_JOBS else ""
    return ", ".join(names[:MAX_NAMED_JOBS]) + more


def _has_no_tables(dataflow: DataflowResource) -> bool:
    """Whether the tables are to be in a file of SQLite, which isn't there or is still empty."""
    path = dataflow.settings.url.removeprefix("sqlite:///")
    if path == dataflow.settings.url:
        return False
    if not os.path.exists(path):
        return True
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as db,
    ):
        return db.execute("select count(*) from sqlite_master").fetchone() == (0,)
    return False
