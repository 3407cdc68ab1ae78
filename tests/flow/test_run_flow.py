"""`odf run JOB` and `odf run --all-jobs`: the flow knows what runs its jobs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opendataflow_dagster.cli.run_flow import in_order
from opendataflow_dagster.flow.apply import apply_flow
from opendataflow_dagster.flow.flow import Flow
from opendataflow_dagster.pipelines.project import TEMPLATE
from opendataflow_dagster.store import registry
from opendataflow_dagster.store.overview import failures
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, put, sql

EXAMPLES = Path(__file__).parents[1] / "projects" / "flow_page"

Odf = Callable[..., subprocess.CompletedProcess[str]]

FLOW = """
flow: shop
datasets: {raw: {}, a: {}, b: {}, c: {}}
jobs:
  third: {in: [a, b], out: c, run: log.sh 3}
  second: {in: a, out: b, run: ./log.sh 2 'two words'}
  first: {in: raw, out: a, run: ./log.sh 1}
  by_cron: {in: raw, out: d, run: ./log.sh cron, runs_in: cron}
  by_dagster: {in: raw, out: e, python: jobs.py:f, runs_in: dagster}
"""


@pytest.fixture
def odf(url: str, store: Store) -> Odf:
    """Run `odf` in a folder with a flow that is applied."""
    Path("flow.yml").write_text(FLOW)
    Path("log.sh").write_text(
        '#!/bin/sh\necho "$1 $dataid ${2:-}" >> log\n[ ! -e fail-$1-$dataid ]\n'
    )
    Path("log.sh").chmod(0o755)
    apply_flow(store, Flow.load())
    store.fill()

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "opendataflow_dagster.cli", "run", *words]
        env = {**os.environ, "DATAFLOW_URL": url}
        done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == code, done.stderr
        return done

    return run


def log() -> list[str]:
    path = Path("log")
    return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_is_run_by_its_name(odf: Odf, store: Store) -> None:
    put(store, "raw", "1")
    put(store, "raw", "2")
    odf("first")
    odf("--all", "second", "more")
    assert log() == ["1 1", "2 1 two words"]
    odf("--all", "--workers", "2", "first")
    assert sorted(log())[:2] == ["1 1", "1 2"]
    assert sql(store, "select count(*) from datastatus where datasetid = 'a'") == [(2,)]
    check(store)


def test_a_slash_and_an_existing_file_are_scripts(odf: Odf, store: Store) -> None:
    put(store, "raw", "1")
    Path("first").write_text("#!/bin/sh\necho file > log\n")
    Path("first").chmod(0o755)
    assert odf("--job", "first", "./first").returncode == 0
    assert log() == ["file"]
    Path("second").mkdir()  # a folder is no script
    odf("second")
    assert log() == ["file", "2 1 two words"]
    refused = odf("frist", code=127).stderr
    assert "no job 'frist', and PATH has no such program. Did you mean 'first'?" in refused


def test_a_job_that_is_misspelled_gets_a_suggestion(odf: Odf) -> None:
    job = Flow.load().jobs[0].jobid
    shown = odf(f"{job}x", code=127).stderr
    assert f"flow.yml has no job '{job}x'" in shown
    assert f"Did you mean '{job}'?" in shown
    assert f"odf run ./{job}x" in shown


def test_running_a_job_without_a_script_says_what_runs_it(odf: Odf) -> None:
    Path("flow.yml").write_text("flow: shop\njobs: {p: {out: x, pipeline: crm}, none: {out: y}}\n")
    assert "/crm' has no project.yml" in odf("p", code=2).stderr
    assert "odf run --job none SCRIPT" in odf("none", code=4).stderr
    Path("flow.yml").write_text("flow: shop\njobs: {p: {}}\n")
    assert "flow.yml:2: Job 'p' has no output" in odf("p", code=2).stderr


def test_a_pipeline_runs_on_the_tables_of_the_flow(odf: Odf, store: Store) -> None:
    """Its own run starts it, and `--all-jobs` continues with what waits."""
    shutil.copytree(TEMPLATE, "crm")
    Path("flow.yml").write_text(
        "flow: shop\njobs:\n  clean_contacts: {out: contacts_clean, pipeline: crm, engine: local}\n"
    )
    assert "3 rows in" in odf("clean_contacts").stderr
    assert len(Path("crm/output/clean_contacts.csv").read_text().splitlines()) == 4
    assert "pipeline, which takes no arguments" in odf("clean_contacts", "more", code=2).stderr
    assert "done 0, failed 0" in odf("--all-jobs").stderr
    sql(store, "update datastatus set status = 'RESUBMIT' where jobid = 'clean_contacts'")
    assert "done 1, failed 0" in odf("--all-jobs").stderr
    check(store)


FUNCTIONS = """
from opendataflow_dagster import Result

def copy(chunk):
    if chunk.dataid == "2":
        raise ValueError("no such day")
    print("made", chunk.dataid)
    return {"e": f"{chunk.dataid}\\n".encode(), "f": Result(rows=7)}

def with_context(chunk, context): ...
"""


def test_a_python_function_is_run_by_its_name(odf: Odf, store: Store) -> None:
    Path("flow.yml").write_text(
        "flow: shop\ndatasets: {raw: {}, e: {hostname: ./e, format: csv}}\n"
        "jobs: {by_hand: {in: raw, out: [e, f], python: jobs.py:copy}}\n"
    )
    Path("jobs.py").write_text(FUNCTIONS)
    apply_flow(store, Flow.load())
    store.fill()
    for dataid in "123":
        put(store, "raw", dataid)
    done = odf("--all", "--workers", "2", "by_hand", code=1)
    assert "Reason: ValueError: no such day" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["made 1", "made 3"]
    assert [path.read_text() for path in sorted(Path("e").rglob("[!_.]*.csv"))] == ["1\n", "3\n"]
    facts = "select dataid, rows, code like '%file:%' from chunkfact where datasetid = 'f'"
    assert [tuple(row) for row in sql(store, f"{facts} order by dataid")] == [
        ("1", 7, True),
        ("3", 7, True),
    ]
    sql(store, "update datastatus set status = 'RESUBMIT' where dataid = '1' and jobid = 'by_hand'")
    assert "All jobs of 'shop': done 1, failed 0" in odf("--all-jobs").stderr
    check(store)


@pytest.mark.parametrize(
    ("named", "text", "why"),
    [
        ("nothere.py:copy", "", "there is no file"),
        ("jobs.py:cpoy", FUNCTIONS, "Did you mean 'copy'?"),
        ("jobs.py:with_context", FUNCTIONS, "must take one argument, the chunk"),
        ("jobs.py:copy", "import nothere", "can't be imported: ModuleNotFoundError: No module"),
        ("jobs.py:copy", "def copy(:", "can't be imported: SyntaxError"),
    ],
)
def test_a_faulty_function_is_reported_in_one_line(
    odf: Odf, named: str, text: str, why: str
) -> None:
    Path("flow.yml").write_text(f"flow: shop\njobs: {{by_hand: {{out: x, python: {named}}}}}\n")
    Path("jobs.py").write_text(text)
    refused = odf("by_hand", code=2)
    assert why in refused.stderr
    assert refused.stderr.count("\n") == 1


EXPECTING = """
flow: shop
datasets:
  raw: {}
  made: {hostname: ./made, expect: {exists: true, rows: {min: 2}}}
  copy: {hostname: ./copy, format: csv, expect: {exists: true}}
jobs:
  make: {in: raw, out: made, run: ./make.sh}
  copy: {in: made, out: copy, python: jobs.py:copy}
"""


def test_expectations_of_the_flow_gate_each_chunk(odf: Odf, store: Store) -> None:
    Path("flow.yml").write_text(EXPECTING)
    Path("make.sh").write_text(
        "#!/bin/sh\nmkdir -p made\n[ $dataid = 1 ] || : > made/$dataid.csv\n"
        '[ $dataid = 4 ] || echo "{\\"rows\\": $dataid}" >> "$DATAFLOW_RESULT"\n'
    )
    Path("make.sh").chmod(0o755)
    Path("jobs.py").write_text(
        "def copy(chunk):\n    return None if chunk.dataid == '3' else b'a\\n'\n"
    )
    Path("copy").mkdir()
    apply_flow(store, Flow.load())
    store.fill()
    for dataid in "12345":
        put(store, "raw", dataid)

    done = odf("--all-jobs", "--workers", "2", code=1)

    assert "done 5, failed 3" in done.stderr.splitlines()[-1]
    why = {
        (row["jobid"], row["dataid"]): str(row["why"]).replace(os.getcwd(), "")
        for row in failures(store)
    }
    assert (
        why
        == {
            ("make", "1"): (
                "NOT_VALIDATED: exists: nothing in /made is named after chunk '1'; "
                "rows: 1, where at least 2 are expected"
            ),
            ("make", "4"): "NOT_VALIDATED: rows: the number of rows is unknown",
            ("copy", "3"): "NOT_VALIDATED: exists: there is no folder /copy",
        }
        or why["copy", "3"] == "NOT_VALIDATED: exists: nothing in /copy is named after chunk '3'"
    )
    facts = "select datasetid, dataid, validated, checks from chunkfact where validated is not null"
    validated = {(row[0], row[1]): (bool(row[2]), row[3]) for row in sql(store, facts)}
    assert validated["made", "2"] == (True, "exists passed; rows passed")
    assert validated["made", "4"][0] is False
    assert validated["copy", "5"] == (True, "exists passed")
    odf("--all", "--job", "make", "./make.sh")  # a script by its path isn't the flow's
    check(store)


@pytest.mark.parametrize(("rows", "ended"), [(1, "done 1, failed 0"), (0, "done 0, failed 1")])
def test_the_expectations_of_the_page(odf: Odf, store: Store, rows: int, ended: str) -> None:
    shutil.copy(EXAMPLES / "expect" / "flow.yml", "flow.yml")
    Path("check.sh").write_text(
        "mkdir -p data/checked && echo 1 > data/checked/$dataid.csv\n"
        f'echo \'{{"rows": {rows}}}\' >> "$DATAFLOW_RESULT"\n'
    )
    apply_flow(store, Flow.load())
    put(store, "sales", "2026-11-01")
    assert ended in odf("--all", "check", code=1 - rows).stderr


def test_all_jobs_are_run_in_the_order_of_their_data(odf: Odf, store: Store) -> None:
    for dataid in "123":
        put(store, "raw", dataid)
    Path("fail-2-2").touch()
    done = odf("--all-jobs", code=1)
    assert "All jobs of 'shop': done 8, failed 1... " not in done.stderr
    assert done.stderr.splitlines()[-1] == "All jobs of 'shop': done 7, failed 1"
    order = [line.split()[0] for line in log()]
    assert order == ["1"] * 3 + ["2"] * 3 + ["3"] * 2
    assert "cron" not in order
    Path("fail-2-2").unlink()
    assert "done 0, failed 0" in odf("--all-jobs").stderr
    sql(store, "update datastatus set status = 'RESUBMIT' where status = 'FAILED'")
    assert "done 2, failed 0" in odf("--all-jobs", "--workers", "2").stderr
    odf("--all-jobs", "--strict", code=3)
    check(store)


def test_a_job_that_cannot_run_does_not_stop_the_others(odf: Odf, store: Store) -> None:
    put(store, "raw", "1")
    text = FLOW.replace("first: {in: raw, out: a, run: ./log.sh 1}", "first: {in: raw, out: a}")
    Path("flow.yml").write_text(text + "  fourth: {in: raw, out: f, run: ./log.sh 4}\n")
    apply_flow(store, Flow.load())
    store.fill()
    done = odf("--all-jobs", code=1)
    assert "Job 'first' of flow.yml has no script" in done.stderr
    assert log() == ["4 1"]
    registry.set_policy(store, "fourth", {"paused_until": "forever"})
    put(store, "raw", "2")
    assert odf("--all-jobs", code=1).stderr.count("fourth") >= 1


def test_all_jobs_need_a_flow_and_no_script(odf: Odf) -> None:
    assert "name no script or job" in odf("--all-jobs", "./log.sh", code=2).stderr
    Path("flow.yml").unlink()
    assert "There is no flow.yml" in odf("--all-jobs", code=2).stderr


def test_jobs_are_ordered_after_those_whose_data_they_read() -> None:
    names = [job.jobid for job in in_order(Flow.parse(FLOW))]
    assert names.index("first") < names.index("second") < names.index("third")
