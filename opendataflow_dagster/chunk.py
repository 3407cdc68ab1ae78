"""What user code gets of a chunk, and what it may tell of it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from .errors import DataflowError
from .model import RESULT, Claim, Fact, Plan
from .store.store import Store, stale_claim
from .util.text import did_you_mean, one_line, printable, tidy

ERROR, WARN = "ERROR", "WARN"


class JobContext(Protocol):
    """What is known of a job while it produces a chunk."""

    plan: Plan
    locations: dict[str, str]
    columns: dict[str, dict[str, str | None]]

    def password(self, datasetid: str) -> str | None: ...

    def for_chunk(self, claim: Claim) -> dict[str, str]: ...


class Lease(Protocol):
    """Keeps a claim alive, and knows whether another worker has recovered its chunk."""

    def lost(self, claim: Claim) -> bool: ...

    def holds(self, claim: Claim, seconds: float) -> bool: ...


class ChunkFailed(DataflowError):
    """Raised by user code: the chunk failed, for the reason that the message is."""


class Place(NamedTuple):
    """A dataset of a job: its registration, and what is known about this chunk of it.

    Attributes:
        datasetid: The dataset.
        columns: Its registration: the columns of the table `dataset`, without the password.
        location: Where the chunk is, or will be published.
        generation: The generation of an input's chunk.
        rows: How many rows the input's chunk has, if known.
        fingerprint: A value that is equal for equal data, if known.
        validated: Whether the input's chunk passed its checks; None: it had none.
        store: The store that the generation belongs to.

    Example:
        Place("sales", {"datasetid": "sales", "format": "csv"}, "/data/sales/dataid=2026-03-01")
    """

    datasetid: str
    columns: Mapping[str, str | None]
    location: str | None = None
    generation: int | None = None
    rows: int | None = None
    fingerprint: str | None = None
    validated: bool | None = None
    store: str = ""
    """Which store tells of the generation."""


class Result(NamedTuple):
    """What a function reports about a dataset's chunk that it has produced.

    Attributes:
        rows: How many rows the chunk has.
        bytes: How large it is.
        fingerprint: A value that is equal for equal data; used to detect stale chunks.
        location: Where the chunk is, if it isn't in its usual place.
        metadata: Further entries, shown by `odf why` and Dagster.
        schema: The columns and types, as JSON.
        replaces: Whether the chunk has replaced all other chunks of its dataset.
        checks: Results of checks that the function ran itself.

    Example:
        return Result(rows=1200, metadata={"source": "api"})
    """

    rows: int | None = None
    bytes: int | None = None
    fingerprint: str | None = None
    location: str | None = None
    metadata: Mapping[str, Any] = {}
    schema: str | None = None
    replaces: bool | None = None
    """Whether the chunk is now in the place of all others of its dataset."""
    checks: "Sequence[Checked]" = ()
    """Checks that the function has done itself."""


class Unpublished(Result):
    """What is known of data that is complete, but published only after its checks."""

    __slots__ = ()


class Checked(NamedTuple):
    """The result of one check.

    Attributes:
        name: The check.
        datasetid: The dataset that was checked.
        passed: Whether the chunk passed.
        message: What is wrong, if it didn't.
        metadata: Further entries, shown by Dagster.
        severity: `ERROR` fails the chunk, `WARN` only warns.

    Example:
        Checked("has_rows", "checked", passed=rows > 0, message="The chunk is empty.")
    """

    name: str
    datasetid: str
    passed: bool
    message: str = ""
    metadata: Mapping[str, Any] = {}
    severity: str = ERROR


@dataclass(frozen=True, slots=True)
class Chunk:
    """The chunk to produce, as user code receives it.

    Attributes:
        claim: The claim that this worker holds.
        inputs: By dataset, the chunk to read.
        outputs: By dataset, the place to write to.
        environment: The variables that a script of the job would get.
        results: What the function returned, by dataset; for checks.

    Example:
        def check(chunk: Chunk) -> None:
            path = chunk.inputs["sales"].location
            print(f"{chunk.jobid} checks {chunk.dataid} in {path}")
    """

    claim: Claim = field(repr=False)
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    environment: Mapping[str, str] = field(repr=False)
    results: Mapping[str, Result] = field(default_factory=dict)
    _job: JobContext | None = field(default=None, repr=False)
    _pulse: Lease | None = field(default=None, repr=False)
    _store: Store | None = field(default=None, repr=False)

    @classmethod
    def sample(
        cls,
        dataid: str = "2026-01-01",
        *,
        job: str = "sample",
        inputs: Mapping[str, str | Place] | None = None,
        outputs: Mapping[str, str | Place] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Chunk":
        """Return a chunk without tables, to call a function with it in a test.

        Args:
            dataid: The chunk's dataid.
            job: The job that produces it.
            inputs: By dataset, its place: a path, or a `Place` with more.
            outputs: The same for the datasets that the job writes.
            environment: The job's environment variables.

        Example:
            check(Chunk.sample("2026-03-01", inputs={"sales": tmp_path / "sales"}))
        """

        def places(given: Mapping[str, str | Place] | None) -> dict[str, Place]:
            return {
                datasetid: place
                if isinstance(place, Place)
                else Place(datasetid, {"datasetid": datasetid, "hostname": str(place)}, str(place))
                for datasetid, place in (given or {}).items()
            }

        claim = Claim(job, dataid, 1, "sample", 1, 3600.0, None)
        return cls(claim, places(inputs), places(outputs), dict(environment or {}))

    @property
    def jobid(self) -> str:
        return self.claim.jobid

    @property
    def dataid(self) -> str:
        return self.claim.dataid

    @property
    def generation(self) -> int:
        return self.claim.generation

    @property
    def attempts(self) -> int:
        return self.claim.attempts

    @property
    def reads_today(self) -> bool:
        """Whether the job runs on the current date only."""
        return bool(self._job and self._job.plan.today)

    def with_results(self, results: Mapping[str, Result]) -> "Chunk":
        """Return the chunk as checks see it, with the results of its outputs."""
        return replace(self, results=results)

    def password(self, datasetid: str) -> str | None:
        """Return the password of a dataset, decrypted now: keep it no longer than needed."""
        return self._job.password(datasetid) if self._job else None

    def bounds(self, datasetid: str) -> tuple[str, str | None, int | None] | None:
        """Return which rows of a split dataset the chunk has: lower bound, upper bound, modulus."""
        if (store := self._store) is None:
            return None
        known = {"datasetid": datasetid, "dataid": self.dataid}
        rows, _ = store.db.insist(lambda: store.db.run("reading.bounds", **known))
        return rows[0] if rows else None

    def alive(self) -> bool:
        """Whether this worker held the claim at the last heartbeat."""
        return not (self._pulse and self._pulse.lost(self.claim))

    def holds(self, seconds: float) -> bool:
        """Whether the claim stays valid for this many seconds without a heartbeat."""
        return self._pulse is None or self._pulse.holds(self.claim, seconds)

    def check(self) -> None:
        """Raise `StaleClaim` if another worker has recovered the chunk."""
        if not self.alive():
            raise stale_claim([self.claim])


def open_chunk(
    store: Store, claim: Claim, environment: JobContext, pulse: Lease | None = None
) -> Chunk:
    """Return what user code receives about a claimed chunk."""
    plan = environment.plan
    rows, _ = store.db.insist(
        lambda: store.db.run("produce.inputs", jobid=claim.jobid, dataid=claim.dataid)
    )
    known = {row[0]: row[1:] for row in rows}
    inputs = {}
    for each in plan.reads:
        generation, location, count, fingerprint, validated = known.get(each, (None,) * 5)
        inputs[each] = Place(
            each,
            environment.columns.get(each, {}),
            location or environment.locations.get(each),
            generation,
            count,
            fingerprint,
            None if validated is None else bool(validated),
            store.id,
        )
    outputs = {
        each: Place(each, environment.columns.get(each, {}), environment.locations.get(each))
        for each in plan.outputs
    }
    return Chunk(
        claim,
        inputs,
        outputs,
        environment.for_chunk(claim),
        _job=environment,
        _pulse=pulse,
        _store=store,
    )


def as_results(returned: Any, outputs: Sequence[str]) -> dict[str, Result]:
    """What a function returned, by dataset; it raises what says how to do it right."""
    if returned is None:
        return {each: Result() for each in outputs}
    if isinstance(returned, Result):
        if len(outputs) > 1:
            raise ChunkFailed(
                f"The function returned one Result for {len(outputs)} datasets. "
                "Return a dict: dataset → Result."
            )
        return {outputs[0]: returned}
    if isinstance(returned, Mapping):
        unknown = sorted(map(str, set(returned) - set(outputs)))
        wrong = [each for each in returned.values() if not isinstance(each, Result | None)]
        if not unknown and not wrong:
            return {each: returned.get(each) or Result() for each in outputs}
        about = f"a dict for {unknown[0]!r}" if unknown else f"a dict with a {_kind(wrong[0])}"
    else:
        about = f"a {_kind(returned)}"
    raise ChunkFailed(
        f"The function returned {about}. Return None, a Result, or a dict: "
        f"{', '.join(map(repr, outputs))} → Result."
    )


def failed_checks(checks: Sequence[Checked]) -> str:
    """Why a chunk fails that didn't pass its checks; nothing if it passed those that gate it."""
    wrong = [check for check in checks if not check.passed and check.severity == ERROR]
    if not wrong:
        return ""
    lines = "; ".join(f"{check.name}: {check.message}".rstrip(": ") for check in wrong)
    return tidy(f"NOT_VALIDATED: {lines}")


def facts_of(
    claim: Claim,
    job: JobContext,
    results: Mapping[str, Result],
    checks: Sequence[Checked] = (),
    code: str | None = None,
) -> list[Fact]:
    """What is recorded of the outputs of a chunk."""
    facts = []
    for datasetid in job.plan.outputs:
        result = results.get(datasetid) or Result()
        of_dataset = [check for check in checks if check.datasetid == datasetid]
        validated, line = _judged(of_dataset)
        facts.append(
            Fact(
                datasetid,
                claim.dataid,
                location=result.location or job.locations.get(datasetid),
                rows=result.rows,
                bytes=result.bytes,
                fingerprint=result.fingerprint,
                validated=validated,
                checks=line,
                schema=result.schema,
                replaces=result.replaces,
                metadata=_as_json(result.metadata),
                code=code,
            )
        )
    return facts


def note_failed_checks(store: Store, claim: Claim, facts: Sequence[Fact]) -> None:
    """Record what is known of a chunk that failed its checks."""

    def note() -> None:
        for fact in facts:
            if fact.validated is not None:
                store.db.change(
                    "produce.note_invalid",
                    jobid=claim.jobid,
                    generation=claim.generation,
                    **fact._asdict(),
                )

    store.db.insist(note)


def _judged(checks: Sequence[Checked]) -> tuple[bool | None, str | None]:
    """Whether a chunk passed what gates it, and the checks in a line."""
    if not checks:
        return None, None
    line = "; ".join(
        f"{check.name} {'passed' if check.passed else 'failed'}"
        + (f": {check.message}" if check.message and not check.passed else "")
        for check in checks
    )
    return all(check.passed or check.severity != ERROR for check in checks), tidy(line)


def _as_json(metadata: Mapping[str, Any]) -> str | None:
    """Metadata as the tables keep it; what JSON can't hold is kept as a text."""
    if not metadata:
        return None
    return json.dumps(dict(metadata), default=str)


def reason_of(error: BaseException) -> str:
    """Return an exception as one line for the tables; for our own errors, only the message."""
    if isinstance(error, DataflowError):
        return tidy(one_line(str(error))) or "failed"
    from traceback import format_exception_only

    told = "".join(format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # the lines before show where
        told = told.splitlines()[-1]
    return tidy(one_line(told)) or type(error).__name__


def _kind(value: Any) -> str:
    return type(value).__name__


# The lines of a script's answer: objects of JSON of our own, or messages of Dagster Pipes.


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
    """Return metadata entries; entries whose type Dagster should infer become plain values."""
    return {
        name: _raw(value) if isinstance(value, dict) and value.get("type") == "__infer__" else value
        for name, value in (metadata or {}).items()
    }


def _raw(value: Any) -> Any:
    """Return the plain value of an entry of metadata; Pipes may wrap it, to add its type."""
    if isinstance(value, dict) and set(value) == {"type", "raw_value"}:
        return value["raw_value"]
    return value
