"""The lines of a script's answer: objects of JSON of our own, or messages of Dagster Pipes."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..chunk import ERROR, WARN, Checked, ChunkFailed, Result
from ..util.text import did_you_mean, printable
from .environment import RESULT

MAX_ANSWER_BYTES = 4_000_000
"""Length of an answer beyond which it can't be meant: it is kept in the tables."""

KEYS = ("dataset", "rows", "bytes", "fingerprint", "metadata", "checks")
CHECK_KEYS = ("name", "passed", "reason", "severity", "metadata")

PIPES_VERSION = "__dagster_pipes_version"
ROW_COUNT = "dagster/row_count"


def read_answer(
    path: str, outputs: Sequence[str]
) -> tuple[dict[str, Result], tuple[Checked, ...], tuple[str, ...]]:
    """Read the answer of a script; raises `ChunkFailed`, since an unread check may have failed.

    Args:
        path: The file that the script wrote.
        outputs: The datasets that its job writes.

    Returns:
        The results by dataset, the checks, and what was logged.
    """
    size = os.path.getsize(path)
    if size > MAX_ANSWER_BYTES:
        raise ChunkFailed(
            f"{RESULT} has {size:,} bytes, and at most {MAX_ANSWER_BYTES:,} are read. "
            "Write figures and checks there, not data."
        )
    reader = _LineReader(outputs)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                reader.read(number, line)
    return reader.results, tuple(reader.checks), tuple(reader.log)


class _LineReader:
    """Collects what the lines say: of one dataset, a later value replaces an earlier one."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self.outputs = tuple(outputs)
        self.results: dict[str, Result] = {}
        self.checks: list[Checked] = []
        self.log: list[str] = []
        self.number = 0

    def read(self, number: int, line: bytes) -> None:
        self.number = number
        try:
            told = json.loads(line)
        except ValueError as error:
            raise self._wrong(f"isn't JSON ({error})") from None
        if not isinstance(told, dict):
            raise self._wrong("isn't an object of JSON")
        if PIPES_VERSION in told:
            self._message(told.get("method"), told.get("params") or {})
        else:
            self._own(told)

    def _own(self, told: dict[str, Any]) -> None:
        self._known(told, KEYS)
        datasetid = self._dataset(told.get("dataset"))
        for name in ("rows", "bytes"):
            if name in told:
                self._tell(datasetid, **{name: self._count(name, told[name])})
        if "fingerprint" in told:
            self._tell(datasetid, fingerprint=self._text("fingerprint", told["fingerprint"]))
        if "metadata" in told:
            self._add_metadata(datasetid, self._object("metadata", told["metadata"]))
        checks = told.get("checks", [])
        if not isinstance(checks, list):
            raise self._wrong('has "checks" that are no list')
        for check in checks:
            self._check(datasetid, self._object("checks", check))

    def _check(self, datasetid: str, check: dict[str, Any]) -> None:
        self._known(check, CHECK_KEYS)
        name, passed = check.get("name"), check.get("passed")
        if not (isinstance(name, str) and name and isinstance(passed, bool)):
            raise self._wrong('has a check without "name" and "passed": true or false')
        severity = check.get("severity", ERROR)
        if severity not in (ERROR, WARN):
            raise self._wrong(f'has a check with another "severity" than {ERROR} or {WARN}')
        reason = self._text("reason", check.get("reason", ""))
        metadata = self._object("metadata", check.get("metadata", {}))
        self.checks.append(Checked(name, datasetid, passed, reason, metadata, severity))

    def _message(self, method: Any, params: Mapping[str, Any]) -> None:
        """A message of Dagster Pipes; those that say nothing of the chunk are left out."""
        if method == "log":
            self.log.append(f"{params.get('level', 'INFO')}: {params.get('message', '')}")
        elif method == "report_asset_materialization":
            datasetid = self._dataset(params.get("asset_key"))
            metadata = _untyped(params.get("metadata"))
            rows = _raw(metadata.get(ROW_COUNT))
            if rows is not None:
                self._tell(datasetid, rows=self._count(ROW_COUNT, rows))
            if version := params.get("data_version"):
                self._tell(datasetid, fingerprint=self._text("data_version", version))
            self._add_metadata(datasetid, metadata)
        elif method == "report_asset_check":
            metadata = _untyped(params.get("metadata"))
            check = {
                "name": params.get("check_name"),
                "passed": params.get("passed"),
                "severity": params.get("severity") or ERROR,
                "reason": str(_raw(metadata.get("reason")) or ""),
                "metadata": metadata,
            }
            self._check(self._dataset(params.get("asset_key")), check)

    def _tell(self, datasetid: str, **values: Any) -> None:
        self.results[datasetid] = self.results.get(datasetid, Result())._replace(**values)

    def _add_metadata(self, datasetid: str, metadata: Mapping[str, Any]) -> None:
        before = self.results.get(datasetid, Result()).metadata
        self._tell(datasetid, metadata={**before, **metadata})

    def _dataset(self, name: Any) -> str:
        """The dataset that a line is about: the job's only output, unless it says which."""
        if name is None and len(self.outputs) == 1:
            return self.outputs[0]
        if name in self.outputs:
            return name
        if name is None:
            raise self._wrong(
                f'doesn\'t say which dataset it is about: add "dataset": one of '
                f"{', '.join(self.outputs)}"
            )
        guess = did_you_mean(str(name), self.outputs)
        raise self._wrong(f"is about {name!r}, which the job doesn't write{guess}")

    def _known(self, told: Mapping[str, Any], keys: Sequence[str]) -> None:
        if unknown := [name for name in told if name not in keys]:
            guess = did_you_mean(unknown[0], keys) or f". Known are {', '.join(keys)}"
            raise self._wrong(f"has the unknown key {unknown[0]!r}{guess}")

    def _count(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise self._wrong(f'has "{name}": {value!r:.40}, which is no whole number from 0 on')
        return value

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise self._wrong(f'has "{name}": {value!r:.40}, which is no text')
        return value

    def _object(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(f'has {value!r:.40} in "{name}", which is no object of JSON')
        return value

    def _wrong(self, what: str) -> ChunkFailed:
        return ChunkFailed(f"Line {self.number} of {RESULT} {printable(what)}.")


def _untyped(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Entries of metadata; those whose type Dagster is to guess as their plain values."""
    return {
        name: _raw(value) if isinstance(value, dict) and value.get("type") == "__infer__" else value
        for name, value in (metadata or {}).items()
    }


def _raw(value: Any) -> Any:
    """The value of an entry of metadata, which Pipes writes with its type."""
    if isinstance(value, dict) and set(value) == {"type", "raw_value"}:
        return value["raw_value"]
    return value
