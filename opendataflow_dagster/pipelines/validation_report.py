"""How verdicts are told: lines for people, objects for programs, JUnit's XML for CI."""

import re
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .validate import Verdict

ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
PRINTED = 2000
"""Letters that are shown of what a failed transformation printed; JSON and XML have all."""


def line_of(verdict: Verdict) -> str:
    """`ok` or `FAILED`, the name, and what is wrong."""
    if verdict.passed:
        return f"ok      {verdict.name}"
    return f"FAILED  {verdict.name}: {verdict.message}"


def details_of(verdict: Verdict) -> Iterator[str]:
    """What there is to say of a failure beyond its line."""
    if len(verdict.differences) > 1:
        yield from (str(each) for each in verdict.differences)
    yield from verdict.traceback.rstrip("\n").splitlines()
    printed = verdict.printed.strip("\n")
    if printed:
        yield "It printed:"
        cut = len(printed) > PRINTED
        yield from ((["…"] if cut else []) + printed[-PRINTED:].splitlines())


def summary_of(verdicts: Sequence[Verdict]) -> str:
    """`3 transformations in 2 pipelines: all pass.`"""
    failed = sum(not each.passed for each in verdicts)
    of = len({each.pipeline for each in verdicts})
    many = sum(each.transformation is not None for each in verdicts)
    what = f"{_count(many, 'transformation')} in {_count(of, 'pipeline')}"
    return f"{what}: {_count(failed, 'failure') if failed else 'all pass'}."


def object_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict for JSON."""
    return {
        "pipeline": verdict.pipeline,
        "transformation": verdict.transformation,
        "file": verdict.file,
        "status": "passed" if verdict.passed else "failed",
        "seconds": round(verdict.seconds, 4),
        "message": verdict.message or None,
        "differences": [each.told() for each in verdict.differences],
        "traceback": verdict.traceback or None,
        "printed": verdict.printed,
    }


def write_junit(verdicts: Sequence[Verdict], file: Path) -> None:
    """Write JUnit's XML: a suite for each pipeline."""
    root = xml.Element("testsuites", _totals(verdicts))
    for pipeline in dict.fromkeys(each.pipeline for each in verdicts):
        own = [each for each in verdicts if each.pipeline == pipeline]
        suite = xml.SubElement(root, "testsuite", {"name": _legal(pipeline)} | _totals(own))
        for verdict in own:
            _case(suite, verdict)
    xml.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def _case(suite: xml.Element, verdict: Verdict) -> None:
    told = {
        "classname": verdict.pipeline,
        "name": verdict.transformation or "project.yml",
        "file": verdict.file,
        "time": f"{verdict.seconds:.3f}",
    }
    case = xml.SubElement(suite, "testcase", {key: _legal(text) for key, text in told.items()})
    if not verdict.passed:
        failure = xml.SubElement(case, "failure", {"message": _legal(verdict.message)})
        lines = [*map(str, verdict.differences), verdict.traceback]
        failure.text = _legal("\n".join(filter(None, lines)) or verdict.message)
    if verdict.printed:
        xml.SubElement(case, "system-out").text = _legal(verdict.printed)


def _totals(verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {
        "tests": str(len(verdicts)),
        "failures": str(sum(not each.passed for each in verdicts)),
        "errors": "0",
        "time": f"{sum(each.seconds for each in verdicts):.3f}",
    }


def _legal(text: str) -> str:
    """Text without the letters that XML can't hold."""
    return ILLEGAL.sub("\ufffd", text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
