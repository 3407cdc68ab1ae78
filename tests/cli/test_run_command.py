"""`odf run`, `force`, `start`, `end`, `RunJob` and `ForceJob` as processes, on both databases."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.cli.fast_run import RunLine, execute, parse
from opendataflow_dagster.config.credentials import encrypt, for_dataset
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, close, expire, policy, put, register, sql, status

BIN = Path(sys.executable).parent
SECRET = "correct horse battery"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def odf(url: str, store: Store) -> Iterator[Run]:
    """Run a command to its end on the tables of `store`; `loadbob` makes bobout from bobin."""
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1.0")

    def run(*words: str, command: str = "odf", **environ: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"DATAFLOW_URL": url} | environ
        return subprocess.run(
            [BIN / command, *words], env=env, capture_output=True, text=True, timeout=60
        )

    yield run
    check(store)


@pytest.fixture
def started(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command, and end it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        env = os.environ | {"DATAFLOW_URL": url}
        process = subprocess.Popen(
            [BIN / "odf", *words],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


def script(body: str, name: str = "loadbob.sh") -> str:
    Path(name).write_text(f"#!/bin/sh\n{body}\n")
    Path(name).chmod(0o755)
    return f"./{name}"


def wait_for(path: str) -> str:
    deadline = time.monotonic() + 60
    while not Path(path).exists() or not Path(path).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return Path(path).read_text()


def bobout(store: Store) -> str | None:
    return status(store, "bobout", "1.0", "loadbob")


def test_a_run_claims_runs_and_settles_a_chunk(odf: Run, store: Store) -> None:
    """COMPAT 14: the folder stays, arguments are exact, output passes through."""
    program = script('pwd; printf "<%s>" "$@" "$dataid"; echo to stderr >&2')

    done = odf("run", "--", program, "y z", "", "--all", "--", "-h", "$HOME", "a\nb")

    assert done.returncode == 0
    assert done.stdout == f"{os.getcwd()}\n<y z><><--all><--><-h><$HOME><a\nb><1.0>"
    said = [line.partition("2026: ")[2] or line for line in done.stderr.splitlines()]
    assert said[1] == "to stderr"
    assert [said[0][-33:], said[2][-46:], said[3]] == [
        "hing ./loadbob.sh with dataid 1.0",
        "Job ./loadbob.sh is complete. Updating status",
        "1 rows updated to READY for loadbob and 1.0 1 IN file-local locks released",
    ]
    assert bobout(store) == "READY"


def test_options_of_odf_run_after_the_script_are_refused(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", url)
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1.0")
    program = script('echo "$@" > said')
    for words in (
        [program, "--all"],
        [program, "x", "--workers=4"],
        ["--all", program, "--strict"],
    ):
        line = parse(words)
        assert line
        with pytest.raises(WrongUse, match=r"after the script.*odf run -- \./loadbob\.sh"):
            execute(line)
        refused = CliRunner().invoke(app, ["run", *words], prog_name="odf")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.count("\n") == 1
    assert bobout(store) is None

    for words in (["run", program, "x", "--", "--all"], ["run", "--", program, "--all"]):
        sql(store, "delete from datastatus where jobid = 'loadbob'")
        assert CliRunner().invoke(app, words, prog_name="odf").exit_code == 0
        assert Path("said").read_text().split() == words[words.index(program) + 1 :]


def test_the_exit_code_is_the_scripts_or_says_why_nothing_ran(odf: Run, store: Store) -> None:
    """COMPAT 13."""
    assert odf("run", script("exit 42")).returncode == 42
    assert bobout(store) == "FAILED"
    assert odf("run", script("")).returncode == 0  # nothing to do
    assert odf("run", "--strict", script("")).returncode == 3
    put(store, "bobout", "1.0", "RESUBMIT", jobid="loadbob")
    assert odf("run", "--strict", script("kill -KILL $$")).returncode == 128 + signal.SIGKILL
    put(store, "bobout", "1.0", "RESUBMIT", jobid="loadbob")
    assert odf("run", "--all", script("exit 42")).returncode == 1
    assert odf("run", script("", "unknown.sh")).returncode == 4
    assert odf("run", "--job", "loadbob", "--strict", script("", "unknown.sh")).returncode == 3
    assert odf("run").returncode == 2
    assert odf("run", "--nonsense", script("")).returncode == 2
    assert odf("run", "--workers", "0", script("")).returncode == 2


def test_a_file_of_this_folder_is_named_with_its_slash(odf: Run, store: Store) -> None:
    script("")
    refused = odf("run", "loadbob.sh")

    assert refused.returncode == 127
    assert "write ./loadbob.sh" in refused.stderr
    assert bobout(store) is None


def test_a_wrong_passkey_is_refused_before_a_claim(odf: Run, store: Store) -> None:
    """COMPAT 2 and 13; no secret shows anywhere."""
    value = encrypt(SECRET, "key", purpose=for_dataset("bobin"))
    sql(
        store,
        "insert into dataset (datasetid, encryptedpass) values ('bobin', :value)",
        value=value,
    )

    for environ in ({"PASSKEY": "a wrong passkey"}, {}, {"PASSKEY_FILE": "/nowhere"}):
        refused = odf("run", script("touch ran"), **environ)
        assert refused.returncode == 4
        assert refused.stderr.startswith("odf: ")
        assert refused.stderr.count("\n") == 1
        assert "a wrong passkey" not in refused.stderr + refused.stdout
    assert bobout(store) is None
    assert not Path("ran").exists()

    program = script('[ "$bobin_password" = "correct horse battery" ] && [ -z "$PASSKEY" ]')
    done = odf("run", program, PASSKEY="key")
    assert done.returncode == 0
    assert SECRET not in done.stdout + done.stderr


def test_without_a_database_the_error_is_one_line(odf: Run) -> None:
    for url in ("sqlite:///nowhere.db", "postgresql://u:secret@127.0.0.1:1/d"):
        failed = odf("run", script(""), DATAFLOW_URL=url)
        assert failed.returncode == 1
        assert failed.stderr.startswith("odf: ")
        assert failed.stderr.count("\n") == 1
        assert "secret" not in failed.stderr


def test_a_stop_reaches_the_whole_group_and_the_chunk_is_settled(
    odf: Run, store: Store, started
) -> None:
    program = script("trap 'echo bye > ended; exit 0' TERM\necho $$ > began\nsleep 60 & wait")
    process = started("run", program)
    wait_for("began")

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 128 + signal.SIGTERM
    assert wait_for("ended") == "bye\n"
    assert bobout(store) == "RESUBMIT"
    why = "select distinct why from dataevent where status_after = 'RESUBMIT'"
    assert sql(store, why) == [("stopped by SIGTERM",)]
    assert "was interrupted" in (said := process.communicate()[0])
    assert "failed" not in said
    assert odf("run", script("true")).returncode == 0
    assert bobout(store) == "READY"


def test_stopping_all_settles_running_chunks_and_claims_no_more(
    odf: Run, store: Store, started
) -> None:
    for number in range(2, 8):
        put(store, "bobin", f"{number}.0")
    process = started("run", "--all", "--workers", "2", script("echo x > began$dataid; sleep 60"))
    wait_for("began1.0")
    wait_for("began2.0")

    process.send_signal(signal.SIGINT)

    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "done 0, interrupted 2, stopped by a signal, left 7; next: odf status loadbob" in output
    words = "select status, count(*) from datastatus where datasetid = 'bobout' group by status"
    assert sql(store, words) == [("RESUBMIT", 2)]
    assert not Path("began3.0").exists()


@pytest.mark.parametrize("repair", ["by hand", "by the lease"])
def test_a_killed_run_is_recovered(odf: Run, store: Store, started, repair: str) -> None:
    """COMPAT 5."""
    process = started("run", script("echo $$ > began; sleep 60"))
    orphan = int(wait_for("began"))
    process.kill()
    process.wait()
    os.killpg(orphan, signal.SIGKILL)
    assert bobout(store) == "RUNNING"
    assert odf("run", "--strict", script("")).returncode == 3

    if repair == "by hand":
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
    else:
        expire(store)

    assert odf("run", "--strict", script("")).returncode == 0
    assert bobout(store) == "READY"


def test_a_script_past_its_time_limit_fails(odf: Run, store: Store) -> None:
    policy(store, "loadbob", time_limit=1)

    ended = odf("run", script("sleep 60"))

    assert ended.returncode == 128 + signal.SIGTERM
    assert "Reason: time limit of 1 s" in ended.stderr
    assert bobout(store) == "FAILED"


def test_all_with_workers_runs_chunks_in_parallel(odf: Run, store: Store) -> None:
    for number in range(2, 41):
        put(store, "bobin", f"{number}.0")

    ended = odf("run", "--all", "--workers=4", script("case $dataid in *0.0) exit 1;; esac"))

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(": done 36, failed 4; next: odf status loadbob")
    assert "\r" not in ended.stderr
    assert odf("run", "--all", "--strict", script("")).returncode == 3


def test_a_crash_of_the_server_during_a_script_costs_nothing(
    request: pytest.FixtureRequest, postgres_url: str
) -> None:
    store = open_store(postgres_url)
    store.init()
    register(store, "loadbob", ["bobin"], ["bobout"])
    for number in range(60):
        put(store, "bobin", str(number))
    close(store)
    command = [BIN / "odf", "run", "--all", "--workers", "4"]
    command.append(script("echo $dataid $dataflow_generation >> ran; sleep 0.1"))
    env = os.environ | {"DATAFLOW_URL": postgres_url}

    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    wait_for("ran")
    request.getfixturevalue("postgres_server").restart("immediate")
    _, said = process.communicate(timeout=60)

    assert process.returncode == 0, said
    assert said.splitlines()[-1].endswith(": done 60, failed 0")
    store = open_store(postgres_url)
    words = "select status, count(*) from datastatus where datasetid = 'bobout' group by status"
    assert sql(store, words) == [("READY", 60)]
    check(store)
    close(store)
    assert sorted(int(line.split()[0]) for line in Path("ran").read_text().splitlines()) == [
        *range(60)
    ]


def test_a_script_that_vanishes_costs_one_chunk(odf: Run, store: Store) -> None:
    for number in range(2, 6):
        put(store, "bobin", f"{number}.0")

    ended = odf("run", "--all", script("rm ./loadbob.sh"))

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(
        "done 1, failed 1, left 3; next: odf status loadbob"
    )


def test_force_runs_a_chunk_without_the_checks(odf: Run, store: Store) -> None:
    done = odf("force", "loadbob", "7", script('echo "$dataid" "$@"'), "--all", "x y")

    assert (done.returncode, done.stdout) == (0, "7 --all x y\n")
    assert status(store, "bobout", "7", "loadbob") == "READY"
    assert odf("force", "loadbob", "7", script("exit 5")).returncode == 5


def test_start_claims_a_chunk_and_end_settles_it(odf: Run, store: Store) -> None:
    value = encrypt(SECRET, "key", purpose=for_dataset("bobin"))
    sql(
        store,
        "insert into dataset (datasetid, encryptedpass) values ('bobin', :value)",
        value=value,
    )

    context = json.loads(odf("start", "loadbob").stdout)

    assert context[:2] == [{"dataid": "1.0"}, {"bobin_datasetid": "bobin"}]
    assert value not in str(context)
    assert bobout(store) == "RUNNING"
    assert json.loads(odf("start", "loadbob").stdout) == []
    assert odf("start", "--strict", "loadbob").returncode == 3
    assert odf("end", "loadbob", "1.0", "GOOD").returncode == 2
    assert odf("end", "loadbob", "2.0", "READY").returncode == 4

    ended = odf("end", "loadbob", "1.0", "READY")

    assert (
        ended.stderr
        == "1 rows updated to READY for loadbob and 1.0 1 IN file-local locks released\n"
    )
    put(store, "bobout", "1.0", "RESUBMIT", jobid="loadbob")
    secret = odf("start", "--secrets", "loadbob", PASSKEY="key")
    assert {"bobin_password": SECRET} in json.loads(secret.stdout)


# What ps shows of the process that runs the script.
SHOW_PARENT = "tr '\\0' ' ' < /proc/$PPID/cmdline; echo; env"


def test_runjob_takes_its_key_as_the_first_argument_and_hides_it(odf: Run, store: Store) -> None:
    """COMPAT 16."""
    value = encrypt(SECRET, "the key", purpose=for_dataset("bobin"))
    sql(
        store,
        "insert into dataset (datasetid, encryptedpass) values ('bobin', :value)",
        value=value,
    )

    done = odf("the key", script(SHOW_PARENT), "an argument", command="RunJob")

    assert done.returncode == 0
    assert done.stderr == ""
    assert "the key" not in done.stdout
    assert f"bobin_password={SECRET}" in done.stdout.splitlines()
    assert "./loadbob.sh an argument" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].endswith(": Launching ./loadbob.sh with dataid 1.0")
    assert lines[-2].endswith(": Job ./loadbob.sh is complete. Updating status")
    assert lines[-1] == "1 rows updated to READY for loadbob and 1.0 1 IN file-local locks released"


@pytest.mark.parametrize("key", [None, "", "the key"])
def test_runjob_works_without_a_key_argument(odf: Run, store: Store, key: str | None) -> None:
    """COMPAT 13."""
    environ = {} if key is None else {"PASSKEY": key}
    arguments = [] if key is None else ["y z"]
    program = script('printf "<%s>" "$@"; exit 9')

    assert odf(program, *arguments, command="RunJob", **environ).returncode == 9
    idle = odf(program, *arguments, command="RunJob", **environ)

    assert idle.returncode == 0
    assert ": no suitable data available for job. Not running it: blocked: 1 " in idle.stdout


def test_the_originals_commands_never_print_a_key(odf: Run) -> None:
    script("")
    for command, *words in (
        ("RunJob", "the key"),
        ("RunJob", "the key", "./nowhere.sh"),
        ("ForceJob", "the key", "loadbob"),
        ("ForceJob", "the key", "./loadbob.sh"),
        ("ForceJob", "the key", "nojob", "./loadbob.sh"),
    ):
        refused = odf(*words, command=command)
        assert refused.returncode in (2, 4, 127)
        assert "the key" not in refused.stdout + refused.stderr
    again = odf("the key", "./nowhere.sh", command="RunJob", PASSKEY="the key")
    assert "the key" not in again.stdout + again.stderr
    for command in ("RunJob", "ForceJob"):
        assert odf(command=command).returncode == 2


def test_forcejob_forces_a_chunk(odf: Run, store: Store) -> None:
    done = odf("the key", "loadbob", script(SHOW_PARENT), command="ForceJob")

    assert done.returncode == 0
    assert "the key" not in done.stdout + done.stderr
    [(dataid,)] = sql(store, "select dataid from datastatus where datasetid = 'bobout'")
    assert f"dataid={dataid}" in done.stdout.splitlines()
    assert dataid[:2] == "20"
    assert dataid[10] == "T"
    assert odf("loadbob", script("exit 3"), command="ForceJob").returncode == 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["x.sh"], RunLine("x.sh")),
        (
            ["--all", "x.sh", "--all", "--", "-x"],
            RunLine("x.sh", ("--all", "--", "-x"), all_chunks=True),
        ),
        (["--job", "a", "--workers=4", "x"], RunLine("x", job="a", workers=4)),
        (["--config", "f", "--strict", "x"], RunLine("x", config="f", strict=True)),
        (["--all", "--", "x", "--all"], RunLine("x", ("--all",), all_chunks=True, exact=True)),
    ],
)
def test_simple_command_lines_are_read_without_click(words: list[str], line: RunLine) -> None:
    assert parse(words) == line


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["--all"],
        ["--job"],
        ["--job", "a"],
        ["--all=1", "x"],
        ["--"],
        ["--workers", "0", "x"],
        ["--workers", "four", "x"],
        ["-x", "x"],
    ],
)
def test_other_command_lines_are_parsed_by_click(words: list[str]) -> None:
    assert parse(words) is None


def test_a_run_starts_without_what_it_does_not_need(odf: Run) -> None:
    script("")
    shown = odf("run", "./loadbob.sh", PYTHONPROFILEIMPORTTIME="1").stderr
    loaded = {line.rpartition("|")[2].strip() for line in shown.splitlines() if "|" in line}

    assert "opendataflow_dagster.runner.run" in loaded
    assert not loaded & {"click", "rich", "cryptography"}
    if "sqlite3" in loaded:  # psycopg brings some of these
        assert not loaded & {
            "subprocess",
            "pathlib",
            "dataclasses",
            "importlib.metadata",
            "json",
            "logging",
        }
        assert not loaded & {"threading", "ctypes", "psycopg"}


def test_a_terminal_shows_the_progress_of_a_run(odf: Run, url: str, store: Store) -> None:
    for number in range(2, 6):
        put(store, "bobin", f"{number}.0")
    terminal, slave = os.openpty()
    command = [
        BIN / "odf",
        "run",
        "--all",
        "--workers",
        "2",
        script("sleep 0.2; [ $dataid != 3.0 ]"),
    ]

    env = os.environ | {"DATAFLOW_URL": url}
    done = subprocess.run(command, env=env, stderr=slave, stdin=subprocess.DEVNULL, timeout=60)

    os.close(slave)
    shown = b""
    while chunk := _read(terminal):
        shown += chunk
    os.close(terminal)
    assert done.returncode == 1
    assert b"\r\x1b[Kdone 1, failed 0, left " in shown
    assert b"Launching" not in shown
    assert b"Job ./loadbob.sh has failed. Updating status\r\n" in shown
    assert b": done 4, failed 1; next: odf status loadbob\r\n" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 10000)
    except OSError:  # Linux, when the other side is closed
        return b""
