"""The statements that one `odf run` sends, and a bare Python process that sends the same.

As a program it runs a job once and prints the statements as JSON: `python sent.py JOB SCRIPT`.
"""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SCRIPT = "the script runs"
"""Marks the script in the list, between the claim and the end."""


def record(jobid: str, script: str) -> list[tuple[str, Any]]:
    """Run a job for one chunk in this process; return all statements that its drivers execute."""
    import psycopg
    from product import RunLine, Scripts, execute

    sent: list[tuple[str, Any]] = []
    run_query, run_script = psycopg.Connection.execute, Scripts.run
    open_sqlite, begin = sqlite3.connect, psycopg.Connection.transaction

    class Recorded(sqlite3.Connection):
        def execute(self, text: str, params: Any = (), /) -> sqlite3.Cursor:
            sent.append((text, params))
            return super().execute(text, params)

    def recorded(self: Any, query: Any, params: Any = None, **more: Any) -> Any:
        sent.append((query, params))
        return run_query(self, query, params, **more)

    @contextmanager
    def transaction(self: Any) -> Iterator[None]:
        sent.append(("begin", None))
        with begin(self):
            yield
        sent.append(("commit", None))

    def run(self: Any, *arguments: Any, **more: Any) -> Any:
        sent.append((SCRIPT, None))
        return run_script(self, *arguments, **more)

    psycopg.Connection.execute, psycopg.Connection.transaction = recorded, transaction  # type: ignore[assignment]
    sqlite3.connect = lambda *given, **more: open_sqlite(*given, factory=Recorded, **more)  # type: ignore[assignment]
    Scripts.run = run  # type: ignore[method-assign]
    if execute(RunLine(script, job=jobid)):
        raise RuntimeError("the recorded run failed")
    return sent


def recording(jobid: str, script: str, env: dict[str, str]) -> list[tuple[str, Any]]:
    """Do the same in a separate process, which leaves nothing in this one."""
    line = [sys.executable, __file__, jobid, script]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the recorded run failed: {done.stderr}")
    return json.loads(done.stdout)


def program(url: str, sent: list[tuple[str, Any]], *, starts_script: bool) -> str:
    """Return a Python program that sends the recorded statements; its arguments are the chunk, the
    generation that its claim will get, and the script."""
    if url.startswith("sqlite:///"):
        lines = [
            "import os, sqlite3, sys",
            f"path = {url.removeprefix('sqlite:///')!r}",
            "connection = sqlite3.connect(path, timeout=60, isolation_level=None)",
            "connection.create_function('naturalkey', 1, str, deterministic=True)",
        ]
    else:
        lines = [
            "import json, os, psycopg, sys",
            f"connection = psycopg.connect({url!r}, autocommit=True)",
        ]
    lines.append("dataid, generation, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]")
    for text, params in sent:
        if text != SCRIPT:
            given = ", ".join(
                f"{name!r}: {_value(name, value)}" for name, value in (params or {}).items()
            )
            lines.append(f"cursor = connection.execute({text!r}, {{{given}}})")
            lines.append("if cursor.description: cursor.fetchall()")
        elif starts_script:
            lines.append("os.waitpid(os.posix_spawn(script, [script], os.environ), 0)")
    return "\n".join(lines) + "\n"


def _value(name: str, value: Any) -> str:
    """Return a parameter as Python: chunk and generation are the program's own arguments."""
    if name in ("dataid", "generation"):
        return name
    if name in ("dataids", "generations"):
        return f"[{name[:-1]}]"
    if name == "facts" and value:
        [fact] = json.loads(value)
        return f"json.dumps([{fact!r} | {{'dataid': dataid}}])"
    return repr(value)


if __name__ == "__main__":
    shown, sys.stdout = sys.stdout, sys.stderr
    statements = record(*sys.argv[1:3])
    json.dump(statements, shown, default=str)
    shown.flush()
    os._exit(0)
