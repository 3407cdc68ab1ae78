"""The environment of a job's script: what it inherits, what the tables say, and its chunk."""

import os
import time
from collections.abc import Mapping
from typing import Any

from ..config.settings import redact
from ..errors import Refused
from ..location import place_of
from ..model import DATASET_COLUMNS, Claim, Plan, hijacks
from ..store.store import PLAN_AGE_SECONDS, Store

SECRETS = ("PASSKEY", "PASSKEY_FILE", "DATAFLOW_ENCRYPTED")
"""Ours alone: no script of a job gets them."""

SECRET = "encryptedpass"
PASSWORDS = ("password", SECRET)

KNOWN = ("datasetid", *DATASET_COLUMNS, "itemtype", "password", "chunklower", "chunkupper")
"""What we call the properties of a dataset: none of them makes a dangerous name."""


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
        """Where each dataset is, as far as its registration tells."""
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
