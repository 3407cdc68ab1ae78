"""Checks of what a job has made: they gate READY, chunk by chunk."""

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from ..chunk import ERROR, WARN, Checked, Chunk, reason_of
from ..errors import WrongUse
from ..model import Plan
from ..util.text import typed
from .translator import DataflowTranslator

MAX_TRACE_CHARACTERS = 4000


@dataclass(frozen=True)
class ChunkCheck:
    """A function that looks at a chunk of one dataset before it becomes READY."""

    name: str
    fn: Callable[[Chunk], Any]
    dataset: str | None = None
    blocking: bool = True
    description: str | None = None

    def run(self, chunk: Chunk) -> Checked:
        """The function's answer; an exception is a No that says why."""
        datasetid = self.dataset or next(iter(chunk.outputs))
        severity = ERROR if self.blocking else WARN
        try:
            return _answer(self.fn(chunk), self.name, datasetid, severity)
        except dg.RetryRequested:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARACTERS:]
            return Checked(
                self.name,
                datasetid,
                False,
                reason_of(error),
                {"opendataflow/traceback": dg.MetadataValue.md(f"```\n{trace}\n```")},
                severity,
            )

    def spec(self, translator: DataflowTranslator) -> dg.AssetCheckSpec:
        """The asset check that Dagster shows."""
        return dg.AssetCheckSpec(
            self.name,
            asset=translator.asset_key(self.dataset or ""),
            blocking=self.blocking,
            description=self.description,
        )


def dataflow_check(
    *,
    dataset: str | None = None,
    blocking: bool = True,
    name: str | None = None,
    description: str | None = None,
) -> Callable[[Callable[[Chunk], Any]], ChunkCheck]:
    """Make a check of a function that takes the chunk and answers True, False, or what is wrong.

    A chunk that fails a blocking check is FAILED; one that fails another is READY with a warning.
    `dataset` may be left out where the job writes one only.
    """

    def as_check(fn: Callable[[Chunk], Any]) -> ChunkCheck:
        about = description or (fn.__doc__ or "").strip() or None
        return ChunkCheck(name or fn.__name__, fn, dataset, blocking, about)

    return as_check


def bind_checks(checks: Iterable[ChunkCheck], plan: Plan) -> list[ChunkCheck]:
    """The checks with the dataset that each is for, which the job has to write."""
    found = []
    for check in checks:
        if check.dataset is None and len(plan.outputs) != 1:
            raise WrongUse(
                f"Which dataset is check {check.name!r} for? Job {plan.jobid!r} writes "
                f"{', '.join(plan.outputs)}. Use @dataflow_check(dataset=…)."
            )
        datasetid = check.dataset or plan.outputs[0]
        if datasetid not in plan.outputs:
            raise WrongUse(
                f"Check {check.name!r} is for dataset {datasetid!r}, which job {plan.jobid!r} "
                f"doesn't write. See `odf job list {typed(plan.jobid)}`."
            )
        found.append(replace(check, dataset=datasetid))
    return found


def evaluation(
    checked: Checked, translator: DataflowTranslator, partition: str
) -> dg.AssetCheckEvaluation:
    """A check's answer for one chunk as Dagster keeps it.

    It isn't `blocking` there: we have blocked the chunk already, and its alone.
    """
    warn = checked.severity != ERROR
    return dg.AssetCheckEvaluation(
        asset_key=translator.asset_key(checked.datasetid),
        check_name=checked.name,
        passed=checked.passed,
        metadata=dict(checked.metadata),
        severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
        description=checked.message or None,
        blocking=False,
        partition=partition,
    )


_RECORDED = re.compile(r"(?:^|; )(\w+) (passed|failed)(?:: (.*?))?(?=; \w+ (?:passed|failed)\b|$)")


def recorded_evaluations(
    line: str | None, validated: bool | None, asset: dg.AssetKey, partition: str
) -> list[dg.AssetCheckEvaluation]:
    """The answers of checks that ran outside Dagster, by the line that the tables have of them."""
    return [
        dg.AssetCheckEvaluation(
            asset_key=asset,
            check_name=name,
            passed=answer == "passed",
            # A chunk that is valid with a check that failed has got a warning.
            severity=dg.AssetCheckSeverity.WARN if validated else dg.AssetCheckSeverity.ERROR,
            description=message or None,
            blocking=False,
            partition=partition,
        )
        for name, answer, message in _RECORDED.findall(line or "")
    ]


def _answer(returned: Any, name: str, datasetid: str, severity: str) -> Checked:
    if isinstance(returned, str):
        return Checked(name, datasetid, not returned, returned, {}, severity)
    if hasattr(returned, "passed"):  # a Checked, an AssetCheckResult
        message = getattr(returned, "message", None) or getattr(returned, "description", None)
        own = getattr(returned, "severity", severity)
        own = getattr(own, "value", own)
        return Checked(
            name,
            datasetid,
            bool(returned.passed),
            message or "",
            getattr(returned, "metadata", None) or {},
            WARN if WARN in (own, severity) else ERROR,
        )
    if isinstance(returned, bool) or type(returned).__name__ in ("bool", "bool_"):  # numpy's too
        return Checked(name, datasetid, bool(returned), "", {}, severity)
    return Checked(
        name,
        datasetid,
        False,
        f"the check returned a {type(returned).__name__}: return True, False, or what is wrong",
        {},
        severity,
    )
