"""Checks of a job's output that decide, chunk by chunk, whether it becomes READY."""

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
    """A function that checks a chunk of one dataset before it becomes READY."""

    name: str
    fn: Callable[[Chunk], Any]
    dataset: str | None = None
    blocking: bool = True
    description: str | None = None

    def run(self, chunk: Chunk) -> Checked:
        """Return the function's answer; an exception counts as a failure that says why."""
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
        """Return the asset check that Dagster shows."""
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
    """Turn a function into a check: it takes the chunk and returns True, False, or what is wrong.

    A chunk that fails a blocking check becomes FAILED. One that fails a check that doesn't block
    becomes READY with a warning.

    Args:
        dataset: The dataset to check; not needed if the job writes only one.
        blocking: Whether a failure keeps the chunk from becoming READY.
        name: The check's name; by default, the function's.
        description: Shown in Dagster; by default, the function's docstring.

    Example:
        @dataflow_check(dataset="checked")
        def has_rows(chunk: Chunk) -> bool | str:
            return chunk.results["checked"].rows > 0 or "The chunk is empty."
    """

    def as_check(fn: Callable[[Chunk], Any]) -> ChunkCheck:
        about = description or (fn.__doc__ or "").strip() or None
        return ChunkCheck(name or fn.__name__, fn, dataset, blocking, about)

    return as_check


def bind_checks(checks: Iterable[ChunkCheck], plan: Plan) -> list[ChunkCheck]:
    """Return the checks, each with its dataset, which the job has to write."""
    found = []
    for check in checks:
        if check.dataset is None and len(plan.outputs) != 1:
            raise WrongUse(
                f"Check {check.name!r} names no dataset, and job {plan.jobid!r} writes "
                f"{', '.join(plan.outputs)}. Choose one: @dataflow_check(dataset=…)."
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
    """Return a check's answer for one chunk, as Dagster stores it.

    It isn't `blocking` in Dagster: we have already blocked the chunk, and only that chunk.
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
    """Return the answers of checks that ran outside Dagster, from the line in the tables."""
    return [
        dg.AssetCheckEvaluation(
            asset_key=asset,
            check_name=name,
            passed=answer == "passed",
            # A chunk that is valid although a check failed: that check only warns.
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
    if isinstance(returned, bool) or type(returned).__name__ in ("bool", "bool_"):  # numpy's, too
        return Checked(name, datasetid, bool(returned), "", {}, severity)
    return Checked(
        name,
        datasetid,
        False,
        f"the check returned a {type(returned).__name__}: return True, False, or what is wrong",
        {},
        severity,
    )
