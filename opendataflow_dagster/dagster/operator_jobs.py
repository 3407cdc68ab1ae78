"""Jobs in Dagster's launchpad that do what `odf resubmit`, `odf hold` and other commands do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import dagster as dg
from pydantic import Field

from ..errors import DataflowError, WrongUse
from ..store import operations, registry
from ..store.moves import person
from ..store.operations import Moved
from ..store.store import Store
from ..util.text import printable
from ..util.times import parse_duration, parse_time
from .resources import RESOURCE_KEY
from .translator import DataflowTranslator

MAX_LISTED_CHUNKS = 100
"""Chunks that a run's page lists; the history has all of them."""

MAX_LOGGED_CHUNKS = 20
"""Chunks that a line of its log lists, which is read without a click."""

MOVE = ("job", "dataset", "chunk", "from", "to")

_JOB = "The job's name, as in `odf status`."
_CHUNKS = "Partitions of the job, as in the grid."
_REASON = "The reason to record in the history."
_DRY_RUN = "Only list what would change."


class ListedRows(NamedTuple):
    """What changed, as a page lists it."""

    rows: Sequence[tuple]
    heads: Sequence[str] = MOVE


class ResubmitConfig(dg.Config):
    """The config of `opendataflow_resubmit`."""

    job: str | None = Field(
        None, description=f"{_JOB} Without a job, `failed` and `stale` apply to all jobs."
    )
    chunks: list[str] = Field([], description=f"{_CHUNKS} With `failed`, only those that failed.")
    failed: bool = Field(False, description="All chunks that failed.")
    stale: bool = Field(False, description="READY chunks whose inputs were replaced since.")
    since: str | None = Field(None, description="With `failed`: since when, like 2026-03-01.")
    downstream: bool = Field(False, description="Also what other jobs produced from them.")
    reason: str | None = Field(None, description=_REASON)
    dry_run: bool = Field(False, description=_DRY_RUN)


class ChunksConfig(dg.Config):
    """The config of `opendataflow_hold` and `opendataflow_release`."""

    job: str = Field(description=_JOB)
    chunks: list[str] = Field(description=_CHUNKS)
    reason: str | None = Field(None, description=_REASON)
    dry_run: bool = Field(False, description=_DRY_RUN)


class ReadyConfig(dg.Config):
    """The config of `opendataflow_ready`."""

    dataset: str = Field(description="The dataset's name.")
    chunks: list[str] = Field(description="Partitions that were produced outside.")
    new: bool = Field(False, description="Accept a dataset that no chunk is known of yet.")
    reason: str | None = Field(None, description=_REASON)
    dry_run: bool = Field(False, description=_DRY_RUN)


class PolicyConfig(dg.Config):
    """The config of `opendataflow_policy`."""

    job: str = Field(description=_JOB)
    dials: dict[str, str] = Field(
        {}, description="Dials to turn, like `concurrency: '4'`; `none` resets one."
    )


class RecoverConfig(dg.Config):
    """The config of `opendataflow_recover`."""

    job: str | None = Field(None, description=f"{_JOB} Without it, all jobs.")
    older_than: str | None = Field(
        None,
        description="Also resubmit chunks RUNNING without a claim for longer than this, like 2h: "
        "chunks of a Java program that is gone.",
    )
    dry_run: bool = Field(False, description=_DRY_RUN)


def operator_jobs(translator: DataflowTranslator | None = None) -> list[dg.JobDefinition]:
    """Return jobs for operators: resubmit, hold, release, ready, policy and recover.

    Their runs sign the history, and their pages list what changed. They need the resource
    `dataflow`. Several calls of `build_definitions` in one location share these jobs.
    """
    named = translator or DataflowTranslator()
    by_default = type(named).dataid is DataflowTranslator.dataid
    return _usual_jobs() if by_default else _jobs(named)


@cache
def _usual_jobs() -> list[dg.JobDefinition]:
    """Build the jobs once: Dagster accepts two of one name only if they are the same object."""
    return _jobs(DataflowTranslator())


def _jobs(translator: DataflowTranslator) -> list[dg.JobDefinition]:
    def moving(name: str, description: str, config: type[dg.Config], act: Act) -> dg.JobDefinition:
        return _job(name, description, config, _move(act, translator))

    return [
        moving("resubmit", "Mark chunks to be produced again.", ResubmitConfig, _resubmit),
        moving(
            "hold",
            "Stop jobs from producing or reading chunks until a person releases them.",
            ChunksConfig,
            partial(_set_hold, operations.hold),
        ),
        moving(
            "release",
            "Release held chunks: each gets its earlier status back.",
            ChunksConfig,
            partial(_set_hold, operations.release),
        ),
        moving(
            "ready",
            "Mark chunks as produced outside: jobs that read them may run.",
            ReadyConfig,
            _ready,
        ),
        _job("policy", "Set the dials of a job, or list them.", PolicyConfig, _turn),
        _job(
            "recover",
            "Settle claims whose lease ran out, and grant the retries that are due.",
            RecoverConfig,
            _recover,
        ),
    ]


Act = Callable[[Store, Any, list[str], str], Moved]
"""Moves chunks as a config says, signed with a name."""

Work = Callable[[Store, Any, str], Mapping[str, Any]]
"""Does what a config says, signed with a name, and returns what the run's page shows."""


def _job(name: str, description: str, config: type[dg.Config], work: Work) -> dg.JobDefinition:
    """Return a job of one op, which runs in the process of its run."""

    def compute(context: dg.OpExecutionContext, config: Any) -> None:
        dataflow = getattr(context.resources, RESOURCE_KEY)
        with _in_one_line():
            shown = work(dataflow.store, config, _who(context))
        context.add_output_metadata(
            {
                key: _table(value) if isinstance(value, ListedRows) else value
                for key, value in shown.items()
            }
        )
        context.log.info(_lines(shown))

    compute.__annotations__["config"] = config
    op = dg.op(
        name=f"opendataflow_{name}_chunks" if name != "policy" else "opendataflow_turn_dials",
        description=description,
        required_resource_keys={RESOURCE_KEY},
    )(compute)

    @dg.job(
        name=f"opendataflow_{name}",
        description=f"{description} As `odf {name}`, signed by the run.",
        executor_def=dg.in_process_executor,
        tags={"dagster/max_retries": "0"},
    )
    def job() -> None:
        op()

    return job


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Fail a run that is refused with the refusal's text alone, and without a retry."""
    try:
        yield
    except DataflowError as error:
        raise dg.Failure(str(error), allow_retries=False) from None


def _who(context: dg.OpExecutionContext) -> str:
    """Return who signs the history: Dagster's user, if known, and the run."""
    user = context.run.tags.get("user") or person()
    return f"{user} by Dagster run {context.run_id}"


def _move(act: Act, translator: DataflowTranslator) -> Work:
    def done(store: Store, config: Any, who: str) -> Mapping[str, Any]:
        moved = act(store, config, list(map(translator.dataid, config.chunks)), who)
        rows = [
            (move.jobid, move.datasetid, move.dataid, move.status_before, move.status_after)
            for move in moved.moves
        ]
        left = [(row.jobid, row.datasetid, row.dataid, row.status_before, "") for row in moved.left]
        shown: dict[str, Any] = {"dry run": config.dry_run, "chunks": moved.chunks}
        if moved.same:
            shown["unchanged"] = len(moved.same)
        if rows:
            shown["would change" if config.dry_run else "changed"] = ListedRows(rows)
        if left:
            shown["left alone"] = ListedRows(left)
        return shown

    return done


def _resubmit(store: Store, config: ResubmitConfig, dataids: list[str], who: str) -> Moved:
    if config.stale and (config.failed or config.downstream):
        raise WrongUse("Use `stale` alone: chunks produced from stale ones become stale, too.")
    if config.since and not config.failed:
        raise WrongUse("`since` selects chunks that failed: use it with `failed`.")
    return operations.resubmit(
        store,
        config.job,
        dataids,
        failed=config.failed,
        stale=config.stale,
        since=parse_time(store, config.since) if config.since else None,
        downstream=config.downstream,
        plan=config.dry_run,
        who=who,
        why=config.reason,
    )


def _set_hold(
    act: Callable[..., Moved], store: Store, config: ChunksConfig, dataids: list[str], who: str
) -> Moved:
    return act(store, config.job, dataids, plan=config.dry_run, who=who, why=config.reason)


def _ready(store: Store, config: ReadyConfig, dataids: list[str], who: str) -> Moved:
    return operations.ready(
        store,
        config.dataset,
        dataids,
        new=config.new,
        plan=config.dry_run,
        who=who,
        why=config.reason,
    )


def _turn(store: Store, config: PolicyConfig, who: str) -> Mapping[str, Any]:
    dials = registry.policy(store, config.job)
    if config.dials:
        dials = registry.set_policy(store, config.job, config.dials, who=who)
    return {key: "default" if value is None else str(value) for key, value in dials.items()}


def _recover(store: Store, config: RecoverConfig, who: str) -> Mapping[str, Any]:
    age = parse_duration(config.older_than) if config.older_than else None
    if config.job is not None:
        operations.refuse_unknown_job(store, config.job)
    if config.dry_run:
        settled = operations.due(store, config.job)
    else:
        settled = store.recover(config.job, who=who)
    rows = [(chunk.jobid, chunk.dataid, chunk.status, chunk.reason) for chunk in settled]
    if age is not None:
        abandoned = operations.recover_abandoned(
            store, age, jobid=config.job, plan=config.dry_run, who=who
        )
        why = f"no claim for more than {config.older_than}"
        rows += [
            (move.jobid, move.dataid, move.status_after or "", why) for move in abandoned.moves
        ]
    heads = ("job", "chunk", "status", "why")
    return {"dry run": config.dry_run, "chunks": len(rows), "settled": ListedRows(rows, heads)}


def _table(listed: ListedRows) -> dg.MarkdownMetadataValue:
    """Format rows as a Markdown table, with as many as a page can show."""
    lines = [f"| {' | '.join(listed.heads)} |", "|---" * len(listed.heads) + "|"]
    for row in listed.rows[:MAX_LISTED_CHUNKS]:
        cells = (cell.replace("|", "\\|") for cell in _cells(row))
        lines.append(f"| {' | '.join(cells)} |")
    return dg.MetadataValue.md("\n".join([*lines, *_more(listed, MAX_LISTED_CHUNKS)]))


def _lines(shown: Mapping[str, Any]) -> str:
    """Return what the page shows as text: a line with single values, then the lists."""
    brief = {key: value for key, value in shown.items() if not isinstance(value, ListedRows)}
    is_plan = brief.pop("dry run", False)
    words = ["dry run, nothing is changed"] * is_plan
    lines = [" · ".join([*words, *(f"{key}: {value}" for key, value in brief.items())])]
    for key, listed in shown.items():
        if isinstance(listed, ListedRows) and listed.rows:
            lines += ["", f"{key} ({', '.join(listed.heads)}):"]
            lines += [
                "  ".join(filter(None, _cells(row))) for row in listed.rows[:MAX_LOGGED_CHUNKS]
            ]
            lines += _more(listed, MAX_LOGGED_CHUNKS)
    return "\n".join(lines)


def _cells(row: tuple) -> list[str]:
    return [printable(str(cell or "")) for cell in row]


def _more(listed: ListedRows, most: int) -> list[str]:
    left = len(listed.rows) - most
    return ["", f"and {left:,} more"] if left > 0 else []
