"""Odd surroundings: full or closed streams, other encodings, narrow terminals, hostile words."""

import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from shlex import quote

import pytest

from opendataflow_dagster.cli.fast_run import RunProgress
from opendataflow_dagster.store.store import Store
from opendataflow_dagster.util.text import typed
from tests.support.store_fixtures import check, put, register, status

BIN = Path(sys.executable).parent
ODD = ["plain", "it's", "two words", "", "a\nb", "tab\tand'quote\\", "esc\x1b[31m", "é\u202e😀"]

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(store: Store, url: str) -> Shell:
    """Run a line of `sh` with `odf` in its path; `load` produces b from a, with chunks 1 and é."""
    register(store, "load", ["a"], ["b"])
    put(store, "a", "1")
    put(store, "a", "é")

    def run(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"DATAFLOW_URL": url, "PATH": f"{BIN}:{os.environ['PATH']}"} | environ
        return subprocess.run(
            ["bash", "-c", line],
            env=env,
            capture_output=True,
            timeout=60,
            encoding="utf-8",
            errors="replace",
        )

    return run


def is_one_line(done: subprocess.CompletedProcess[str], code: int) -> bool:
    return (done.returncode, done.stderr.count("\n"), done.stderr[:5]) == (code, 1, "odf: ")


@pytest.mark.parametrize("word", ODD)
def test_a_quoted_word_fits_one_line_and_is_read_back(word: str) -> None:
    line = typed(word, "x")
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s|' {line}"], capture_output=True, timeout=20)
    assert done.stdout.decode() == f"{word}|x|"


@pytest.mark.parametrize("line", ["odf status", "odf status --json", "odf doctor"])
def test_a_full_device_is_reported_in_one_line(shell: Shell, line: str) -> None:
    done = shell(f"{line} > /dev/full")
    assert is_one_line(done, 1), done.stderr
    assert "No space left" in done.stderr


def test_a_claim_whose_output_failed_is_given_back_at_once(store: Store, shell: Shell) -> None:
    assert is_one_line(shell("odf start load > /dev/full"), 1)
    assert status(store, "b", "1", "load") == "FAILED"
    check(store)


def test_a_closed_stream_stops_nothing(shell: Shell) -> None:
    for line in ("odf status >&-", "odf status --json >&-", "odf ready a 2 2>&-"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, ""), line


def test_a_reader_that_closes_the_pipe_sees_no_traceback(shell: Shell) -> None:
    many = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000)"
    done = shell(f"odf sql '{many} select i from n' | head -1")
    assert (done.stdout, done.stderr) == ("i\n", "")


def test_letters_that_an_encoding_lacks_are_replaced(shell: Shell) -> None:
    assert "\\xe9" in shell("odf status a", PYTHONIOENCODING="ascii").stdout
    rows = json.loads(shell("odf status a --json", PYTHONIOENCODING="ascii").stdout)
    assert [row["dataid"] for row in rows] == ["1", "é"]


@pytest.mark.parametrize(
    "words",
    [
        "run --job X /bin/true",
        "force X X /bin/true",
        "start X",
        "end X X READY",
        "status X",
        "runs X",
        "history X",
        "why X",
        "resubmit X X",
    ],
)
def test_bytes_that_arent_utf8_are_refused(shell: Shell, words: str) -> None:
    done = shell(f"odf {words}".replace("X", "$'\\xff\\xfe'"))
    assert is_one_line(done, 2), done.stderr
    assert "UTF-8" in done.stderr


@pytest.mark.parametrize(
    "words", ["run --job X /bin/true", "start X", "end X X READY", "status X", "ready a X"]
)
def test_a_message_is_one_line_of_limited_length(shell: Shell, words: str) -> None:
    for odd in ("x" * 10_000, "a\nb", "o'b"):
        done = shell(f"odf {words}".replace("X", quote(odd)))
        if done.returncode:
            assert done.stderr.count("\n") == 1, done.stderr
            assert len(done.stderr) < 1000


def test_an_unknown_timezone_is_refused_by_every_command_that_needs_it(shell: Shell) -> None:
    for words in ("status", "history --since 2026-01-01", "why load"):
        for name in ("Mars/Base", "../etc", "Europe"):
            assert is_one_line(shell(f"odf {words}", DATAFLOW_TIMEZONE=name), 2), (words, name)
    assert "fail timezone" in shell("odf doctor", DATAFLOW_TIMEZONE="Mars/Base").stdout
    assert "ok   timezone" in shell("odf doctor", DATAFLOW_TIMEZONE="Europe/Vienna").stdout


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_narrow_terminal_loses_nothing(store: Store, shell: Shell, url: str, term: str) -> None:
    put(store, "a", "2026-01-01T00:00:00.000000+00:00")
    reader, writer = pty.openpty()
    ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 40, 0, 0))
    env = os.environ | {"DATAFLOW_URL": url, "TERM": term, "NO_COLOR": "1"}
    subprocess.run([BIN / "odf", "status", "a"], stdout=writer, env=env, check=True, timeout=60)
    os.close(writer)
    told = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "2026-01-01T00:00:00.000000+00:00" in told
    assert "…" not in told


def test_a_file_that_isnt_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("hello " * 100)
    env = os.environ | {"DATAFLOW_URL": f"sqlite:///{tmp_path}/x.db"}
    for words in (["status"], ["init"], ["run", "/bin/true"]):
        done = subprocess.run([BIN / "odf", *words], env=env, capture_output=True, text=True)
        assert is_one_line(done, 1), done.stderr
        assert "backup" in done.stderr


def test_the_demo_leaves_a_persons_files_alone(tmp_path: Path) -> None:
    for again in (False, True):
        done = subprocess.run(
            [BIN / "odf", "demo", "--scripts", "d"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert not again or (tmp_path / "d" / "mine").read_text() == "mine"
        (tmp_path / "d" / "mine").write_text("mine")


def test_the_progress_names_the_chunk_that_failed(store: Store) -> None:
    stream = StringIO()
    say = RunProgress(stream, store, "load").say
    say("Wed: Launching ./load.sh with dataid 7")
    say("1 rows updated to READY for load and 7 1 IN file-local locks released")
    say("1 rows updated to FAILED for load and 8 1 IN file-local locks released")
    assert "load and 8" in stream.getvalue()
    assert "7" not in stream.getvalue()
