"""Searches for a passkey and a password where they must not be: processes, files, output."""

import base64
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.sql import SQL, Literal

from tests.support.postgres import Server

PASSKEY = f"canary-passkey-{uuid4().hex}"
PASSWORD = f"canary-password-{uuid4().hex}"
USER = "canary"

SPY = """\
#!{python}
# What a user's code finds: in its environment, and in every process of the machine.
import logging, os, sys

logging.basicConfig(level=1)
WORDS = {{"passkey": "".join(reversed({passkey!r})), "password": "".join(reversed({password!r}))}}

def look(mine=()):
    found = ["looked"]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                    data = file.read()
            except OSError:
                continue
            for what, word in WORDS.items():
                if word.encode() in data and not (pid == str(os.getpid()) and what in mine):
                    found.append(f"{{what}} in {{name}} of {{pid}}")
    for what, word in WORDS.items():
        if word in repr(os.environ) and what not in mine:
            found.append(f"{{what}} in os.environ")
    with open({report!r}, "a") as file:
        file.write("\\n".join(found) + "\\n")
    print("the spy says", os.environ)

if __name__ == "__main__":
    assert WORDS["password"] == os.environ["places_password"]
    look(["password"])
"""
"""A module for user code, and a script; it records what it finds without naming secrets."""


class Canary:
    """What one way of running has left, in a folder with its tables, its files and its logs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.report, self.said = folder, folder / "report", ""

    def spy(self, path: Path) -> Path:
        """Put the spy where user code can import it, or where it runs."""
        words = {"passkey": PASSKEY[::-1], "password": PASSWORD[::-1]}
        path.write_text(SPY.format(python=sys.executable, report=str(self.report), **words))
        path.chmod(0o755)
        return path

    def check(self, *folders: Path) -> None:
        """No user code saw a secret, and nothing that was written has one."""
        assert self.report.exists(), f"the spy never ran: {self.said[-3000:]}"
        assert set(self.report.read_text().split("\n")) == {"looked", ""}
        shown = [line for line in self.said.splitlines() if holds(line.encode())]
        assert not shown, [line[:300] for line in shown[:5]]
        assert found_in(self.folder, *folders) == []


def spellings(secret: str) -> set[bytes]:
    """Return a secret in its forms in files: plain, in UTF-16, and within base64."""
    raw = secret.encode()
    found = {raw, secret.encode("utf-16-le")}
    for shift in range(3):  # where it begins within three bytes; the ends depend on what is around
        coded = base64.b64encode(b"x" * shift + raw)
        found.add(coded[4 if shift else 0 : len(coded) - 4])
    return found


SECRETS = spellings(PASSKEY) | spellings(PASSWORD)


def holds(data: bytes) -> bool:
    return any(secret in data for secret in SECRETS)


def found_in(*folders: Path) -> list[str]:
    """Return the files that contain a secret: databases, event logs and pickles are files, too."""
    return [
        str(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and holds(path.read_bytes())
    ]


@contextmanager
def places(server: Server, url: str, tables: Iterable[str]):
    """A database whose tables `day text, n bigint` belong to a user with a password."""
    rules = server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"host all {USER} 127.0.0.1/32 scram-sha-256\n{before}")
    with psycopg.connect(url, autocommit=True) as person:
        person.execute("select pg_reload_conf()")
        person.execute(SQL("create role canary login password {}").format(Literal(PASSWORD)))
        person.execute("grant create, usage on schema public to canary")
        for table in tables:
            person.execute(f"create table {table} (day text, n bigint)")
            person.execute(f"alter table {table} owner to canary")
        try:
            yield person
        finally:
            person.execute("drop owned by canary cascade")
            person.execute("drop role canary")
            rules.write_text(before)
            person.execute("select pg_reload_conf()")
