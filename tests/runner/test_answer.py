"""What scripts report: rows, metadata and checks; whether their claim holds; their code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.model import FAILED, READY, RESUBMIT
from opendataflow_dagster.runner.environment import FOLDER_PREFIX
from opendataflow_dagster.runner.run import Outcome, is_alive, run_job
from opendataflow_dagster.runner.script import CodeVersion, git_commit
from opendataflow_dagster.store.history import history
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, expire, policy, put, register, sql, status, take

ODF = Path(sys.executable).with_name("odf")


@pytest.fixture
def loadbob(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A job `loadbob` that produces `bobout` from chunk `1` of `bobin`; TMPDIR stays empty."""
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1")
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield store
    check(store)
    assert list(folder.iterdir()) == []


def script(body: str) -> list[str]:
    path = Path("loadbob.sh")
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return ["./loadbob.sh"]


def run(store: Store, body: str, **more) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    outcome = run_job(store, "loadbob", script(body), say=lines.append, **more)
    return outcome, lines


def answering(*lines: str) -> str:
    return "\n".join(f"echo '{line}' >> \"$DATAFLOW_RESULT\"" for line in lines)


def fact(store: Store, *columns: str, datasetid: str = "bobout") -> tuple:
    names = ", ".join(columns)
    [found] = sql(store, f"select {names} from chunkfact where datasetid = :d", d=datasetid)
    return found


@pytest.mark.parametrize(("day", "ended"), [("a;1\n", READY), ("", FAILED)])
def test_the_script_of_the_page(
    loadbob: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, day: str, ended: str
) -> None:
    page = Path(__file__).parents[1] / "projects" / "environment_page"
    monkeypatch.chdir(tmp_path)
    for datasetid in ("bobin", "bobout"):
        Path(datasetid).mkdir()
        add_dataset(loadbob, datasetid, hostname=datasetid)
    Path("bobin", "1.csv").write_text(day)

    run_job(loadbob, "loadbob", ["sh", str(page / "convert.sh")], say=lambda line: None)

    assert status(loadbob, "bobout", "1", "loadbob") == ended
    assert Path("bobout", "1.csv").read_text() == day.replace(";", ",")
    assert fact(loadbob, "rows") == (len(day.splitlines()),)


def test_rows_metadata_and_checks_are_recorded(loadbob: Store) -> None:
    told = answering(
        '{"rows": 4, "bytes": 10, "metadata": {"source": "ftp"}}',
        "",
        '{"rows": 5, "fingerprint": "v1", "metadata": {"late": 2},'
        ' "checks": [{"name": "sum", "passed": true}, {"name": "late", "passed": false,'
        ' "reason": "2 are late", "severity": "WARN"}]}',
    )
    assert run(loadbob, told)[0] == Outcome(0, done=1)

    columns = ("rows", "bytes", "fingerprint", "validated", "checks", "metadata")
    rows, size, fingerprint, validated, checks, metadata = fact(loadbob, *columns)
    assert (rows, size, fingerprint, bool(validated)) == (5, 10, "v1", True)
    assert checks == "sum passed; late failed: 2 are late"
    assert metadata == '{"source": "ftp", "late": 2}'


def test_a_check_that_fails_fails_the_chunk_and_is_recorded(loadbob: Store) -> None:
    policy(loadbob, "loadbob", max_attempts=2)
    told = answering('{"rows": 0, "checks": [{"name": "rows", "passed": false, "reason": "none"}]}')
    outcome, lines = run(loadbob, told)

    assert outcome == Outcome(1, failed=1)
    assert any("Reason: NOT_VALIDATED: rows: none" in line for line in lines)
    assert status(loadbob, "bobout", "1", "loadbob") == RESUBMIT
    rows, validated, checks = fact(loadbob, "rows", "validated", "checks")
    assert (rows, bool(validated), checks) == (0, False, "rows failed: none")
    assert run(loadbob, "true")[0] == Outcome(0, done=1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("rows=5", "isn't JSON"),
        ("[5]", "isn't an object of JSON"),
        ('{"row": 5}', "has the unknown key 'row'. Did you mean 'rows'?"),
        ('{"rows": "5"}', "\"rows\": '5', which is no whole number from 0 on"),
        ('{"rows": -1}', "no whole number"),
        ('{"rows": 99999999999999999999}', "no whole number"),
        ('{"bytes": true}', "no whole number"),
        ('{"dataset": "bobot", "rows": 5}', "which the job doesn't write. Did you mean 'bobout'?"),
        ('{"checks": {"name": "sum"}}', 'has "checks" that are no list'),
        ('{"checks": [{"name": "sum", "passed": "yes"}]}', 'without "name" and "passed"'),
        ('{"metadata": [1]}', "no object of JSON"),
    ],
)
def test_an_answer_that_can_not_be_read_fails_the_chunk(
    loadbob: Store, line: str, reason: str
) -> None:
    outcome, lines = run(loadbob, f"cat > $DATAFLOW_RESULT <<'EOF'\n{{\"rows\": 1}}\n{line}\nEOF")

    assert outcome == Outcome(1, failed=1)
    [told] = [each for each in lines if "Reason: " in each]
    assert "Line 2 of DATAFLOW_RESULT " in told
    assert reason in told
    assert status(loadbob, "bobout", "1", "loadbob") == FAILED


def test_an_answer_as_long_as_data_is_refused(loadbob: Store) -> None:
    outcome, lines = run(loadbob, "head -c 5000000 /dev/zero > $DATAFLOW_RESULT")
    assert outcome == Outcome(1, failed=1)
    assert any("DATAFLOW_RESULT has 5,000,000 bytes" in line for line in lines)


def test_the_answer_of_a_failed_script_does_not_hide_its_exit_code(loadbob: Store) -> None:
    outcome, lines = run(loadbob, "echo nonsense > $DATAFLOW_RESULT; exit 3")
    assert outcome == Outcome(3, failed=1)
    assert any("Reason: exit code 3; Line 1 of DATAFLOW_RESULT" in line for line in lines)


def test_a_script_that_is_stopped_within_a_line_is_interrupted_and_has_not_failed(
    url: str, loadbob: Store
) -> None:
    body = "printf '{\"rows\":' > $DATAFLOW_RESULT; touch began; exec sleep 60"
    worker = subprocess.Popen([ODF, "run", *script(body)], env={**os.environ, "DATAFLOW_URL": url})
    deadline = time.monotonic() + 60
    while not Path("began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker.terminate()
    assert worker.wait(60) == 128 + signal.SIGTERM
    assert status(loadbob, "bobout", "1", "loadbob") == RESUBMIT


def test_the_code_is_that_of_the_script_when_it_was_started(loadbob: Store) -> None:
    body = "echo true > other; chmod +x other; mv other loadbob.sh"
    started = CodeVersion(script(body)).text()
    assert run(loadbob, body)[0] == Outcome(0, done=1)
    assert fact(loadbob, "code") == (started,)


def test_of_several_outputs_an_answer_says_which_it_is_about(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout", "rest"])
    put(store, "bobin", "1")
    put(store, "bobin", "2")
    told = answering('{"dataset": "rest", "rows": 1}', '{"dataset": "bobout", "rows": 2}')
    assert run(store, told)[0] == Outcome(0, done=1)
    assert (fact(store, "rows"), fact(store, "rows", datasetid="rest")) == ((2,), (1,))

    outcome, lines = run(store, answering('{"rows": 1}'))
    assert outcome == Outcome(1, failed=1)
    assert any('add "dataset": one of bobout, rest' in line for line in lines)


PIPES = """
import os
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    assert pipes.partition_key == os.environ["dataid"]
    assert pipes.job_name == "loadbob"
    assert pipes.asset_key == "bobout"
    pipes.log.warning("two are late")
    pipes.report_asset_materialization(
        metadata={"dagster/row_count": 7, "page": {"type": "url", "raw_value": "https://x.org"}},
        data_version="v2",
    )
    pipes.report_asset_check(
        check_name="sum", passed=PASSED, metadata={"reason": "sum is 3"}, severity="ERROR"
    )
"""


@pytest.mark.parametrize("dataid", ["1", "ü \"'\\ {}\n$HOME", "2026-11-01T05:00+01:00"])
def test_a_script_with_dagster_pipes_works_as_it_is(loadbob: Store, dataid: str) -> None:
    pytest.importorskip("dagster_pipes")
    if dataid != "1":
        sql(loadbob, "delete from datastatus")
        put(loadbob, "bobin", dataid)
    Path("work.py").write_text(PIPES.replace("PASSED", "True"))
    outcome, lines = run(loadbob, f"exec {sys.executable} work.py")

    assert outcome == Outcome(0, done=1)
    assert "WARNING: two are late" in lines
    rows, fingerprint, checks, metadata = fact(loadbob, "rows", "fingerprint", "checks", "metadata")
    assert (rows, fingerprint, checks) == (7, "v2", "sum passed")
    assert metadata == (
        '{"dagster/row_count": 7, "page": {"type": "url", "raw_value": "https://x.org"}}'
    )


def test_a_check_of_dagster_pipes_fails_the_chunk(loadbob: Store) -> None:
    pytest.importorskip("dagster_pipes")
    Path("work.py").write_text(PIPES.replace("PASSED", "False"))
    outcome, lines = run(loadbob, f"exec {sys.executable} work.py")
    assert outcome == Outcome(1, failed=1)
    assert any("Reason: NOT_VALIDATED: sum: sum is 3" in line for line in lines)


def test_a_nested_job_has_its_own_files(loadbob: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATAFLOW_RESULT", "DATAFLOW_FENCE", "DAGSTER_PIPES_CONTEXT"):
        monkeypatch.setenv(name, "of the outer job")
    body = 'echo "$DATAFLOW_RESULT $DATAFLOW_FENCE" > seen; [ -e "$DATAFLOW_FENCE" ]'
    assert run(loadbob, body)[0] == Outcome(0, done=1)
    assert "outer" not in Path("seen").read_text()


def test_without_a_folder_for_answers_the_script_still_runs(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    outcome, lines = run(loadbob, '[ -z "$DATAFLOW_RESULT$DATAFLOW_FENCE$DAGSTER_PIPES_MESSAGES" ]')
    assert outcome == Outcome(0, done=1)
    assert any("The script has no DATAFLOW_RESULT: /nowhere/" in line for line in lines)


def test_files_left_beside_an_answer_are_removed(loadbob: Store) -> None:
    body = 'mkdir "$(dirname $DATAFLOW_RESULT)/more"; touch "$(dirname $DATAFLOW_RESULT)/more/x"'
    assert run(loadbob, body)[0] == Outcome(0, done=1)


WAITING = """trap '' TERM
touch began
while [ -e "$DATAFLOW_FENCE" ]; do sleep 0.05; done
date +%s.%N > fence_gone
"""


def test_the_fence_goes_when_the_claim_is_lost(loadbob: Store) -> None:
    policy(loadbob, "loadbob", lease_seconds=1)

    def say(line: str) -> None:
        if "Launching" in line:
            expire(loadbob)
            loadbob.recover("loadbob")
            assert take(loadbob, "loadbob", owner="another")

    run_job(loadbob, "loadbob", script(WAITING), say=say)
    assert Path("fence_gone").exists()
    assert status(loadbob, "bobout", "1", "loadbob") == "RUNNING"


def test_the_fence_goes_before_the_lease_of_a_claim_that_can_not_be_renewed(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(loadbob, "loadbob", lease_seconds=3)

    def away(claims: object) -> list:
        raise OSError("the network is down")

    monkeypatch.setattr(loadbob, "heartbeat", away)
    began = time.time()
    outcome, _ = run(loadbob, WAITING)
    assert outcome == Outcome(0, done=1)
    assert float(Path("fence_gone").read_text()) - began < 3


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the fence is a plain file there")
def test_the_fence_is_removed_when_the_worker_is_killed(url: str, loadbob: Store) -> None:
    worker = subprocess.Popen(
        [ODF, "run", *script(f"echo $$ > pid\n{WAITING}")], env={**os.environ, "DATAFLOW_URL": url}
    )
    deadline = time.monotonic() + 60
    while not Path("began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not Path("fence_gone").exists()
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    while not Path("fence_gone").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for folder in Path(os.environ["TMPDIR"]).glob(f"{FOLDER_PREFIX}*"):  # what a kill leaves
        (folder / "fence").unlink()
        folder.rmdir()


def test_odf_alive_checks_the_claim_in_the_tables(loadbob: Store) -> None:
    [claim] = take(loadbob, "loadbob")
    environ = {
        "dataflow_jobid": "loadbob",
        "dataid": "1",
        "dataflow_generation": str(claim.generation),
    }
    assert is_alive(loadbob, environ=environ)
    assert is_alive(loadbob, "loadbob", "1", claim.generation, environ={})
    assert not is_alive(loadbob, "loadbob", "1", claim.generation + 1, environ={})
    expire(loadbob)
    assert not is_alive(loadbob, environ=environ)
    with pytest.raises(WrongUse, match="odf alive JOB DATAID"):
        is_alive(loadbob, environ={})


def test_a_script_asks_whether_its_claim_holds(url: str, loadbob: Store) -> None:
    body = (
        f"{ODF} alive || exit 9; {ODF} alive $dataflow_jobid $dataid --generation 999; echo $? > no"
    )
    environ = {**os.environ, "DATAFLOW_URL": url}
    done = subprocess.run([ODF, "run", *script(body)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path("no").read_text() == "4\n"
    assert "The claim is lost" in done.stderr


def test_history_shows_which_code_produced_a_chunk(loadbob: Store) -> None:
    (code := Path(".git")).mkdir()
    (code / "HEAD").write_text("ref: refs/heads/main\n")
    (code / "packed-refs").write_text(f"# pack-refs\n{'0123456789' * 4} refs/heads/main\n")
    assert run(loadbob, "true")[0] == Outcome(0, done=1)

    [(made, version)] = [
        (event.status_after, event.code) for event in history(loadbob) if event.code
    ]
    assert made == READY
    assert version == fact(loadbob, "code")[0]
    assert version.startswith("git:012345678901 file:")


def test_the_version_of_a_script_changes_with_its_text(tmp_path: Path) -> None:
    path = tmp_path / "load.py"
    path.write_text("print(1)\n")
    version = CodeVersion([sys.executable, str(path), "--fast"])
    before = version.text()
    assert before == version.text() == CodeVersion(["sh", str(path)], {"PATH": "/none"}).text()
    path.write_text("print(23)\n")
    assert version.text() != before
    assert CodeVersion(["no-such-program"]).text() is None


def test_the_commit_is_found_for_branches_worktrees_and_detached_heads(tmp_path: Path) -> None:
    assert git_commit(str(tmp_path)) is None or (Path(__file__).parents[2] / ".git").exists()
    git = tmp_path / "house" / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs/heads/main").write_text("a" * 40 + "\n")
    (jobs := tmp_path / "house" / "jobs").mkdir()
    assert git_commit(str(jobs)) == "a" * 12

    tree = git / "worktrees" / "other"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / "commondir").write_text("../..\n")
    (other := tmp_path / "other").mkdir()
    (other / ".git").write_text(f"gitdir: {tree}\n")
    assert git_commit(str(other)) == "a" * 12

    (git / "HEAD").write_text("b" * 40 + "\n")
    assert git_commit(str(jobs)) == "b" * 12
