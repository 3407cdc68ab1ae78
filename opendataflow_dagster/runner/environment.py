"""What a job's script is given, and what it may answer while it runs.

Its variables are what it inherits, what the tables say, and its chunk. For the answer, each
execution has two files. `DATAFLOW_RESULT` is written by the script: objects of JSON, one per line,
its own or messages of Dagster Pipes. `DATAFLOW_FENCE` is there as long as the claim holds. This
module is loaded by every `odf run`, so it imports nothing heavy until a script answers.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.settings import redact
from ..errors import Refused
from ..location import place_of
from ..model import DATASET_COLUMNS, RESULT, Claim, Plan, hijacks
from ..store.store import PLAN_AGE_SECONDS, Store

if TYPE_CHECKING:
    from ..chunk import Checked, Result

SECRETS = ("PASSKEY", "PASSKEY_FILE", "DATAFLOW_ENCRYPTED")
"""Ours alone: no script of a job gets them."""

SECRET = "encryptedpass"
PASSWORDS = ("password", SECRET)

KNOWN = ("datasetid", *DATASET_COLUMNS, "itemtype", "password", "chunklower", "chunkupper")
"""What datasets' properties are called here: no dangerous variable name can result."""
FENCE = "DATAFLOW_FENCE"
PIPES_CONTEXT, PIPES_MESSAGES = "DAGSTER_PIPES_CONTEXT", "DAGSTER_PIPES_MESSAGES"

FOLDER_PREFIX = "odf-answer-"
"""What the name of the folder of the two files begins with."""


class JobEnvironment:
    """What all chunks of a job have in common; `for_chunk` adds the rest."""

    __slots__ = (
        "_base",
        "_encrypted",
        "_environ",
        "_ranged",
        "_store",
        "_values",
        "columns",
        "locations",
        "plan",
    )

    def __init__(
        self,
        store: Store,
        plan: Plan,
        base: dict[str, str],
        named: dict[str, str],
        ranged: set[str],
        locations: dict[str, str],
        columns: dict[str, dict[str, str | None]],
        environ: Mapping[str, str],
    ) -> None:
        self._store, self.plan = store, plan
        self._base, self._values, self._ranged = base, named, ranged
        self._encrypted = {
            datasetid: values.pop(SECRET, None) for datasetid, values in columns.items()
        }
        self._environ = environ
        self.locations = locations
        """Where each dataset is, as far as its registration says."""
        self.columns = columns
        """What each dataset is registered with, except its password."""

    def password(self, datasetid: str) -> str | None:
        """The password of a dataset, decrypted now."""
        encrypted = self._encrypted.get(datasetid)
        return _decrypted(encrypted, datasetid, self._environ) if encrypted else None

    def for_chunk(self, claim: Claim) -> dict[str, str]:
        """The whole environment of the script for one claimed chunk."""
        env = dict(self._base)
        for (datasetid, column), value in self._bounds(claim.dataid).items():
            for name in _exact(datasetid, column) + _alias(datasetid, column):
                env[name] = value
        env.update(self._chunk(claim))
        return env

    def context(self, claim: Claim, *, secrets: bool = False) -> list[dict[str, str]]:
        """The same for another language: the original's list of objects with one key each."""
        named = self._values | _plain(self._bounds(claim.dataid))
        shown = {
            name: value
            for name, value in named.items()
            if secrets or not name.endswith(tuple(f"_{suffix}" for suffix in PASSWORDS))
        }
        chunk = self._chunk(claim)
        whole = {"dataid": chunk["dataid"]} | shown | chunk
        return [{name: value} for name, value in whole.items()]

    def _chunk(self, claim: Claim) -> dict[str, str]:
        return {
            "dataid": _text(claim.dataid, f"The dataid of job {claim.jobid!r}"),
            "jobid": claim.jobid,
            "dataflow_jobid": claim.jobid,
            "dataflow_generation": str(claim.generation),
        }

    def _bounds(self, dataid: str) -> dict[tuple[str, str], str]:
        if not self._ranged:
            return {}
        rows = self._store.db.fetch("environment.bounds", jobid=self.plan.jobid, dataid=dataid)
        found = {}
        for datasetid, *bounds in rows:
            for column, value in zip(("chunklower", "chunkupper"), bounds, strict=True):
                if value is not None:
                    found[datasetid, column] = _text(value, f"A bound of {datasetid!r}")
        return found


class EnvironmentCache:
    """Reads a job's environment, and keeps it for `PLAN_AGE_SECONDS`.

    A worker asks before each claim; a job of many short chunks would read the same rows each time.
    """

    def __init__(
        self,
        store: Store,
        jobid: str,
        environ: Mapping[str, str] = os.environ,
        *,
        secrets: bool = True,
    ) -> None:
        self._store, self._jobid, self._environ, self._secrets = store, jobid, environ, secrets
        self._read_at = float("-inf")
        self._environment: JobEnvironment

    def read(self) -> JobEnvironment:
        """The environment, as of a second ago at most; raises what forbids to claim."""
        now = time.monotonic()
        if now - self._read_at > PLAN_AGE_SECONDS:
            plan = self._store.plan(self._jobid)
            self._environment, _ = self._store.db.insist(
                lambda: job_environment(self._store, plan, self._environ, secrets=self._secrets)
            )
            self._read_at = now
        return self._environment


def job_environment(
    store: Store, plan: Plan, environ: Mapping[str, str] = os.environ, *, secrets: bool = True
) -> JobEnvironment:
    """Read the environment of a job's scripts; what forbids to claim is raised here.

    `secrets` False leaves the passwords encrypted, so that no passkey is needed.
    """
    rows = store.db.records("environment.datasets", jobid=plan.jobid)
    datasets: dict[str, dict[str, Any]] = {}
    for row in rows:
        datasets.setdefault(row["dataflow datasetid"], row)  # of a table with duplicates, the first
    values = {
        (datasetid, column): value
        for datasetid in sorted(datasets)
        for column, value in _properties(datasets[datasetid], environ, secrets).items()
    }
    variables = _named(values)
    named = _plain(values)
    for name, value in plan.environment:
        if hijacks(name) or not _can_be_named(name):
            raise Refused(
                f"Job {plan.jobid!r} is registered to set {name!r}, which would change what its "
                "process runs. Delete that row of the table `job`, and see `odf job list`.",
                code="NOT_REGISTERED",
            )
        variables[name] = named[name] = _text(value, f"Item {name!r} of job {plan.jobid!r}")

    base = _inherited(environ)
    for name, value in variables.items():
        if value is None:
            base.pop(name, None)
        else:
            base[name] = value
    return JobEnvironment(
        store,
        plan,
        base,
        named,
        {datasetid for datasetid, row in datasets.items() if row["dataflow ranged"]},
        {datasetid: place for datasetid, row in datasets.items() if (place := _place(row))},
        {datasetid: _columns(row, values) for datasetid, row in datasets.items()},
        environ,
    )


def _properties(
    row: dict[str, Any], environ: Mapping[str, str], secrets: bool
) -> dict[str, str | None]:
    """Column → value of one dataset; a value of None means that no such variable may exist."""
    datasetid = row["dataflow datasetid"]
    found: dict[str, str | None] = {}
    for column, value in row.items():
        if not column.startswith("dataflow "):
            what = f"Column {column} of dataset {datasetid!r}"
            found[column.lower()] = None if value is None else _text(value, what)
    registered = found.get("datasetid") is not None
    found |= {"chunklower": None, "chunkupper": None, "password": None}
    found["itemtype"] = row["dataflow itemtype"] if registered else None
    if secrets and (encrypted := found.get(SECRET)):
        found["password"] = _decrypted(encrypted, datasetid, environ)
    for column in found:
        if column not in KNOWN and any(hijacks(name) for name in _exact(datasetid, column)):
            raise Refused(
                f"Column {column!r} of dataset {datasetid!r} would set a variable that changes "
                "what the job's process runs. Rename the column of the table `dataset`.",
                code="NOT_REGISTERED",
            )
    return found


def _columns(
    row: Mapping[str, Any], values: Mapping[tuple[str, str], str | None]
) -> dict[str, str | None]:
    """Column → value of a dataset, as its table has it."""
    datasetid = row["dataflow datasetid"]
    names = [column.lower() for column in row if not column.startswith("dataflow ")]
    return {name: values[datasetid, name] for name in names}


def _decrypted(encrypted: str, datasetid: str, environ: Mapping[str, str]) -> str:
    from ..config.credentials import password_of

    return _text(
        password_of(datasetid, encrypted, environ), f"The password of dataset {datasetid!r}"
    )


def _named(values: dict[tuple[str, str], str | None]) -> dict[str, str | None]:
    """Variable → value: every property by its exact names, and by names that a shell can read.

    An alias that two datasets would share is given to neither: a script must not get the wrong one.
    """
    aliases: dict[str, str | None] = {}
    owner: dict[str, str] = {}
    for (datasetid, column), value in values.items():
        for name in _alias(datasetid, column):
            aliases[name] = value if owner.setdefault(name, datasetid) == datasetid else None
    exact = {name: value for key, value in values.items() for name in _exact(*key)}
    return aliases | exact


def _plain(values: Mapping[tuple[str, str], str | None]) -> dict[str, str]:
    """The values that there are, each by one name."""
    return {f"{key[0]}_{key[1]}": value for key, value in values.items() if value is not None}


def _exact(datasetid: str, column: str) -> list[str]:
    """`bobin_hostname`, and `bobin_HOSTNAME` for scripts that were written against H2."""
    names = [_encoded(f"{datasetid}_{column}"), _encoded(f"{datasetid}_{column.upper()}")]
    return [name for name in names if _can_be_named(name)]


def _alias(datasetid: str, column: str) -> list[str]:
    """The same with every odd character replaced, where a shell couldn't read the exact names."""
    names = []
    for name in (f"{datasetid}_{column}", f"{datasetid}_{column.upper()}"):
        if not (name.isascii() and name.isidentifier()):
            plain = "".join(
                letter if letter.isascii() and letter.isalnum() else "_" for letter in name
            )
            names.append("_" + plain if plain[0].isdigit() else plain)
    return names


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without our secrets and without the variables of an outer job."""
    base = {
        name: value
        for name, value in environ.items()
        if name not in (*SECRETS, "dataid", "jobid") and not name.startswith("dataflow_")
    }
    if "DATAFLOW_URL" in base and redact(base["DATAFLOW_URL"]) != base["DATAFLOW_URL"]:
        del base["DATAFLOW_URL"]
    return base


def _place(row: dict[str, Any]) -> str | None:
    return place_of({column.lower(): value for column, value in row.items()})


def _can_be_named(name: str) -> bool:
    return name != "" and "=" not in name and "\0" not in name


def _text(value: Any, what: str) -> str:
    """A value as a process can be given it: in UTF-8, whatever the locale."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
    if "\0" in text:
        raise Refused(
            f"{what} has a NUL character, which no variable can hold. Correct that row.",
            code="NOT_REGISTERED",
        )
    return _encoded(text)


def _encoded(text: str) -> str:
    """What the system's encoding turns into the UTF-8 bytes of a text."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


class ScriptAnswer(NamedTuple):
    """A script's answer about the chunk that it produced, by dataset."""

    results: "Mapping[str, Result]" = {}  # noqa: RUF012 - nobody changes it
    checks: "tuple[Checked, ...]" = ()
    log: tuple[str, ...] = ()

    def by_dataset(self) -> "dict[str, Result]":
        """The results with the checks of each dataset, as a function would return them."""
        from ..chunk import Result

        names = {*self.results, *(check.datasetid for check in self.checks)}
        return {
            name: self.results.get(name, Result())._replace(
                checks=[check for check in self.checks if check.datasetid == name]
            )
            for name in names
        }


class AnswerFiles:
    """The two files of one execution, in a folder of its own while the `with` lasts.

    A folder that can't be made costs the script its answer, and never its run.

    Args:
        claim: The claim of the chunk.
        outputs: The datasets that the job writes: an answer is about one of them.
        environ: The environment of the script: its TMPDIR has the folder, and the two variables are
            added to it.
    """

    def __init__(self, claim: Claim, outputs: Sequence[str], environ: dict[str, str]) -> None:
        self.claim, self._outputs = claim, outputs
        self.trouble = ""
        base = environ.get("TMPDIR") or "/tmp"
        self._folder = os.path.join(base, FOLDER_PREFIX + os.urandom(8).hex())
        self.result = os.path.join(self._folder, "result")
        self.fence = os.path.join(self._folder, "fence")
        self._environ = environ

    def __enter__(self) -> "AnswerFiles":
        for name in (RESULT, FENCE, PIPES_CONTEXT, PIPES_MESSAGES):
            self._environ.pop(name, None)  # of an outer job
        try:
            os.mkdir(self._folder, 0o700)
            self._raise_fence()
        except OSError as error:
            self.trouble = f"The script has no {RESULT}: {self._folder}: {error.strerror}"
            return self
        self._environ |= {RESULT: self.result, FENCE: self.fence}
        self._environ |= _pipes_variables(self.claim, self._outputs, self.result)
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_fence()
        with suppress(OSError):
            os.unlink(self.result)
        try:
            os.rmdir(self._folder)
        except FileNotFoundError:
            pass
        except OSError:  # the script has put something else there
            from shutil import rmtree

            rmtree(self._folder, ignore_errors=True)

    def heed(self, holds: bool) -> None:
        """Show the script that its claim holds, until this is called again."""
        if holds:
            with suppress(OSError):
                self._raise_fence()
        else:
            self._drop_fence()

    def _raise_fence(self) -> None:
        # On Linux a link to this process: when it is killed, the fence is gone with it, though
        # nobody is left to remove the file. The script may live on then, and its claim does not.
        try:
            if os.path.exists(f"/proc/{os.getpid()}"):
                os.symlink(f"/proc/{os.getpid()}", self.fence)
            else:
                os.close(os.open(self.fence, os.O_CREAT | os.O_WRONLY, 0o600))
        except FileExistsError:
            pass

    def _drop_fence(self) -> None:
        with suppress(OSError):
            os.unlink(self.fence)

    def read(self) -> ScriptAnswer:
        """What the script wrote; raises `ChunkFailed` for what can't be understood."""
        try:
            if os.path.getsize(self.result) == 0:
                return ScriptAnswer()
        except OSError:  # nothing was written, as by every script that knows nothing of it
            return ScriptAnswer()
        from ..chunk import read_answer

        return ScriptAnswer(*read_answer(self.result, self._outputs))


def _pipes_variables(claim: Claim, outputs: Sequence[str], path: str) -> dict[str, str]:
    """What lets `dagster_pipes.open_dagster_pipes()` find its context and write to `path`."""
    keys = [_quoted(datasetid) for datasetid in outputs]
    unknown = "{" + ", ".join(f"{key}: null" for key in keys) + "}"
    run = _quoted(f"{claim.owner} {claim.generation}")
    context = (
        f'{{"data": {{"asset_keys": [{", ".join(keys)}], "code_version_by_asset_key": {unknown}, '
        f'"provenance_by_asset_key": {unknown}, "partition_key": {_quoted(claim.dataid)}, '
        f'"partition_key_range": null, "partition_time_window": null, "run_id": {run}, '
        f'"job_name": {_quoted(claim.jobid)}, "retry_number": {max(claim.attempts - 1, 0)}, '
        '"extras": {}}}'
    )
    return {
        PIPES_CONTEXT: _packed(context),
        PIPES_MESSAGES: _packed(f'{{"path": {_quoted(path)}}}'),
    }


def _packed(text: str) -> str:
    """A parameter as Dagster Pipes reads it from a variable."""
    import zlib
    from binascii import b2a_base64

    return b2a_base64(zlib.compress(text.encode(), 1), newline=False).decode()


def _quoted(text: str) -> str:
    """Return a text as a JSON string; importing `json` would double the start time."""
    try:
        from _json import encode_basestring_ascii  # type: ignore[import-not-found]
    except ImportError:
        from json.encoder import encode_basestring_ascii
    return encode_basestring_ascii(text)
