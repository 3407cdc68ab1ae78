"""A new passkey for all that is encrypted: the datasets' passwords, and the properties file's.

The rows change in one transaction, then the file by one rename. Killed anywhere, the same command
with the same two keys goes on: what the new key decrypts already is left as it is. Only a value in
an older form is renewed, and one with a salt of its own, which costs each reader a derivation.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from ..config.credentials import (
    PROPERTIES,
    SALT_BYTES,
    Purpose,
    common_salt,
    decrypt,
    encrypt,
    for_dataset,
    is_weak,
    salt_of,
)
from ..config.settings import Settings, read_properties, replace_property
from ..errors import CredentialError, DataflowError
from . import open_from
from .store import Store

MAX_ROUNDS = 20
"""Retries if somebody changes the rows meanwhile."""


class Rotated(NamedTuple):
    """What a rotation changed: rows, and whether the file; and how much was right already."""

    rows: int
    file: bool
    kept: int


def rotate(
    settings: Settings, old: str, new: str, environ: Mapping[str, str] = os.environ
) -> Rotated:
    """Encrypt all that `old` decrypts by `new`; change nothing if something fits neither."""
    keys = Keys(old, new)
    in_file = _in_file(settings)
    store = _open(settings, keys, environ)
    try:
        rows = [value for _, value in store.db.run("credentials.values")]
        keys.salt = common_salt([*filter(None, [in_file]), *rows]) or keys.salt
        for_file = keys.anew(in_file, PROPERTIES) if in_file else None
        if in_file and for_file is None:
            raise _neither([PROPERTIES.label])
        rows, kept = _rotate_rows(store, keys)
    finally:
        store.close()
    if for_file is not None and for_file != in_file:
        replace_property(settings.path or "", "encrypted", for_file)
    return Rotated(rows, for_file != in_file, kept + (in_file is not None and for_file == in_file))


class Keys:
    """The two passkeys, and the one salt of all new values: their readers derive one key."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self.salt = os.urandom(SALT_BYTES)
        self._done: dict[tuple[str, str], str | None] = {}

    def __repr__(self) -> str:
        return "Keys(***)"

    def either(self, value: str, purpose: Purpose) -> str | None:
        """The key that decrypts a value; None if neither does."""
        for key in (self._old, self._new):
            try:
                decrypt(value, key, purpose=purpose)
            except CredentialError:
                continue
            return key
        return None

    def anew(self, value: str, purpose: Purpose) -> str | None:
        """The value as it should be, by the new key; None if neither key decrypts it."""
        known = (purpose.label, value)
        if known not in self._done:
            key = self.either(value, purpose)
            if key is None:
                self._done[known] = None
            elif key == self._new and not is_weak(value) and salt_of(value) == self.salt:
                self._done[known] = value
            else:
                text = decrypt(value, key, purpose=purpose)
                self._done[known] = encrypt(text, self._new, purpose=purpose, salt=self.salt)
        return self._done[known]


def _rotate_rows(store: Store, keys: Keys) -> tuple[int, int]:
    """Change every row in one transaction; how many were changed, and how many were right."""
    _, kept = _planned(store, keys)  # the slow part, before anything is locked

    def work() -> tuple[int, int]:
        changed = 0
        with store.db.transaction(who="odf rotate", act="rotate"):
            for _ in range(MAX_ROUNDS):
                plan, _ = _planned(store, keys)
                if not plan:
                    return changed, kept
                for datasetid, before, after in plan:
                    changed += store.db.change(
                        "credentials.replace", datasetid=datasetid, old=before, new=after
                    )
        raise DataflowError(
            "Others keep changing the encrypted passwords, so nothing was rotated. Try again."
        )

    return store.db.insist(work)[0]


def _planned(store: Store, keys: Keys) -> tuple[list[tuple[str | None, str, str]], int]:
    """What is to be changed: dataset id, value, new value; and how many rows are right already."""
    plan, foreign, kept = [], [], 0
    for datasetid, value in store.db.run("credentials.values"):
        purpose = for_dataset(datasetid or "")
        after = keys.anew(value, purpose)
        if after is None:
            foreign.append(purpose.label)
        elif after == value:
            kept += 1
        else:
            plan.append((datasetid, value, after))
    if foreign:
        raise _neither(foreign)
    return plan, kept


def _neither(labels: list[str]) -> DataflowError:
    return DataflowError(
        f"Neither passkey decrypts {', '.join(dict.fromkeys(labels))}. Nothing was changed. "
        "Correct the passkeys, or encrypt those values again with `odf encrypt`; then run: "
        "odf rotate"
    )


def _in_file(settings: Settings) -> str | None:
    """`encrypted` as the properties file has it, whatever the environment says."""
    if not settings.path:
        return None
    return read_properties(settings.path).get("encrypted", "").strip() or None


def _open(settings: Settings, keys: Keys, environ: Mapping[str, str]) -> Store:
    """The store, by whichever key opens it: after a kill it may be the new one already."""
    if not settings.encrypted:
        return open_from(settings, dict(environ))
    key = keys.either(settings.encrypted, PROPERTIES)
    if key is None:
        raise _neither([PROPERTIES.label])
    return open_from(settings, {"PASSKEY": key})
