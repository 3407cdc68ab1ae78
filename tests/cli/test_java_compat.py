"""What the original's QUICKSTART and examples say to type works here as it stands.

Every difference that stays is listed in docs/migrating.md.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opendataflow_dagster.cli import java_compat
from opendataflow_dagster.config.credentials import PROPERTIES, decrypt, password_of
from opendataflow_dagster.errors import Refused, WrongUse
from opendataflow_dagster.model import FAILED, READY, RESUBMIT, RUNNING
from opendataflow_dagster.runner.run import end, run_job, start
from opendataflow_dagster.store import csv_dump, open_store
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import everything, put, register, sql, status

BIN = Path(sys.executable).parent
TABLES = "sqlite:///.dataflow/dataflow.db"
Utility = Callable[..., str]


@pytest.fixture
def utility(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Utility:
    """Run `./utility.sh WORD…` without an error; return what it prints."""
    monkeypatch.setenv("PASSKEY", "plugh")

    def typed(*words: str) -> str:
        try:
            code = java_compat.run_utility(list(words))
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert not code, printed.err
        return printed.out + printed.err

    return typed


def typed(line: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell with our commands in the path."""
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"} | environ
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )


def script(path: Path | str, text: str) -> None:
    Path(path).write_text(f"#!/bin/sh\n{text}\n")
    Path(path).chmod(0o755)


def quickstart(utility: Utility) -> None:
    """Follow steps 2 to 4 of QUICKSTART.md, which are also in example 0."""
    utility("createtables")
    for statement in (
        "insert into dataset (datasetid) values  ('bobin')",
        "insert into dataset (datasetid) values  ('bobout')",
        "insert into job (datasetid,itemtype,jobid) values ('bobout','OUT','loadbob')",
        "insert into job (datasetid,itemtype,jobid) values ('bobin' ,'IN', 'loadbob')",
        "insert into datastatus (dataid,datasetid,jobid,locktype,modified,status) "
        "values ('1.0','bobin','fakejob', 'OUT',now(),'READY')",
    ):
        assert utility("dml", statement) == "1 rows affected\n"


def test_the_quickstart_runs_as_written(utility: Utility) -> None:
    quickstart(utility)
    text = 'echo "running loadbob with dataid $dataid partition of input  $bobin_DATASETID"'
    script("loadbob.sh", text)
    ran = typed(
        """
        RunJob ./loadbob.sh
        RunJob ./loadbob.sh
        """
    )
    lines = [re.sub(r"^\w+ \w+ .* \d{4}: ", "", line) for line in ran.stdout.splitlines()]
    assert lines == [
        "Launching ./loadbob.sh with dataid 1.0",
        "running loadbob with dataid 1.0 partition of input  bobin",
        "Job ./loadbob.sh is complete. Updating status",
        "1 rows updated to READY for loadbob and 1.0 1 IN file-local locks released",
        "no suitable data available for job. Not running it: all done (1 chunk)",
    ]
    for listing in (utility("runs"), utility("sql", "select * from datastatus")):
        rows = {tuple(line.split()[:5]) for line in listing.splitlines()[1:]}
        assert rows == {
            ("bobout", "loadbob", "1.0", "OUT", "READY"),
            ("bobin", "fakejob", "1.0", "OUT", "READY"),
        }
    assert "to RESUBMIT for loadbob and 1.0" in utility("endjob", "loadbob", "1.0", "RESUBMIT")
    assert "RESUBMIT" in utility("runs")
    assert utility("dml", "update datastatus set status='READY' where jobid='loadbob'")


def test_example_0_starts_and_ends_a_job_by_hand(utility: Utility) -> None:
    quickstart(utility)
    context = json.loads(utility("startjob", "loadbob"))
    assert context[0] == {"dataid": "1.0"}
    assert {"bobin_datasetid": "bobin"} in context
    rows = utility("sql", "select * from datastatus")
    assert {" ".join(row.split()[:5]) for row in rows.splitlines()[1:]} == {
        "bobin fakejob 1.0 OUT READY",
        "bobout loadbob 1.0 OUT RUNNING",
        "bobin loadbob 1.0 IN RUNNING",
    }
    assert utility("endjob", "loadbob", "1.0", "READY") == (
        "1 rows updated to READY for loadbob and 1.0 1 IN file-local locks released\n"
    )
    utility("deleterun", "loadbob", "1.0")
    assert "loadbob" not in utility("runs")


def test_example_1_registers_datasets(utility: Utility) -> None:
    utility("createtables")
    encrypted = utility("crypt", "-e", "plugh").strip()
    utility(
        "dml",
        "insert into dataset (datasetid,hostname,database, schemaname,tablename,username,"
        "encryptedpass) values  ('datastatus','localhost', 'dataflow','dataflow','datastatus', "
        f"'etl','{encrypted}')",
    )
    utility(
        "dml",
        "insert into dataset (datasetid,hostname,database, schemaname,tablename,username) "
        "values  ('datastatusextract','localhost','file:','/data/dataflow/','datastatus','etl')",
    )
    assert password_of("datastatus", encrypted) == "plugh"
    assert decrypt(encrypted, "plugh", purpose=PROPERTIES) == "plugh"
    assert utility("crypt", "-d", encrypted) == "plugh\n"
    listed = utility("datasets")
    assert f"{encrypted[:10]}..." in listed
    assert encrypted not in listed
    assert "/data/dataflow/" in listed


def test_example_4_runs_once_a_day(utility: Utility) -> None:
    utility("createtables")
    for statement in (
        "insert into job (datasetid,itemtype,jobid) values ('today','IN',   'validate_datastatus')",
        "insert into job (datasetid,itemtype,jobid) "
        "values ('datastatus','OUT'   ,'validate_datastatus')",
        "insert into dataset (datasetid) values ('datastatus')",
        "insert into job (datasetid,itemtype,jobid) values ('datastatus','IN','extract')",
        "insert into job (datasetid,itemtype,jobid) values ('extracted','OUT','extract')",
    ):
        utility("dml", statement)
    for name in ("validate_datastatus", "extract"):
        script(f"{name}.sh", 'test "$dataid" = "$(date +%F)"')
    store = open_store(TABLES)
    for name in ("validate_datastatus", "extract"):
        for done in (1, 0):
            outcome = run_job(store, name, [f"./{name}.sh"], say=lambda line: None)
            assert (outcome.code, outcome.done) == (0, done)
    store.close()
    assert json.loads(utility("getjob", "extract"))[0]["datasetid"] == "datastatus"
    assert "validate_datastatus" in utility("jobs")


def test_an_unknown_utility_is_named_in_the_error(utility: Utility) -> None:
    for words, line in (
        (["nonsense"], "no command of that name"),
        (["SetDataStatus"], "odf ready"),
    ):
        with pytest.raises(WrongUse, match=line):
            java_compat.run_utility(words)
    assert java_compat.run_utility([]) == 2
    assert java_compat.run_utility(["crypt", "-x"]) == 2


def test_a_cron_line_finds_the_tables_beside_its_script_or_its_command(
    utility: Utility, tmp_path: Path
) -> None:
    quickstart(utility)
    here = Path.cwd()
    script("loadbob.sh", 'echo "$dataid here"; odf runs >/dev/null')
    (here / "RunJob").symlink_to(BIN / "RunJob")
    away = tmp_path / "away"
    away.mkdir()
    ran = typed(f"RunJob {here}/loadbob.sh", Path("/"))
    assert "1.0 here" in ran.stdout
    utility("endjob", "loadbob", "1.0", "RESUBMIT")
    (here / ".dataflow").rename(here / "moved")
    (here / "dataflow.properties").write_text("url=sqlite:///moved/dataflow.db\n")
    ran = typed(f"{here}/RunJob ./loadbob.sh; pwd", away)
    assert "1.0 here" in ran.stdout
    assert ran.stdout.splitlines()[-1] == str(away)
    script(away / "loadbob.sh", "true")
    lost = typed(f"RunJob {away}/loadbob.sh", Path("/"))
    assert lost.returncode == 1
    assert f"no .dataflow/dataflow.db, in / or {away} or {BIN}. Put the file" in lost.stderr


def test_a_chunk_is_forced_in_the_order_of_each_version(utility: Utility) -> None:
    quickstart(utility)
    script("loadbob.sh", 'echo "$dataid" $1')
    ran = typed(
        """
        ForceJob ./loadbob.sh 7.0 more
        ForceJob loadbob ./loadbob.sh
        ForceCmd loadbob "set" | grep ^bobin_datasetid=
        """
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[1] == "7.0 more"
    assert lines[-1] == "bobin_datasetid=bobin"
    outs = utility("sql", "select dataid from datastatus where jobid = 'loadbob'").split()[1:]
    assert len(outs) == 3
    assert len([each for each in outs if "T" in each]) == 2
    assert json.loads(utility("forcejob", "loadbob"))[0]["dataid"][10] == "T"


def test_odf_end_gives_a_claim_back(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1.0")
    start(store, "loadbob")
    assert status(store, "bobout", "1.0", "loadbob") == RUNNING
    assert "to RESUBMIT for loadbob and 1.0 1 IN" in end(store, "loadbob", "1.0", RESUBMIT)
    assert status(store, "bobout", "1.0", "loadbob") == RESUBMIT
    start(store, "loadbob")
    end(store, "loadbob", "1.0", FAILED)
    assert "1 rows updated to RESUBMIT" in end(store, "loadbob", "1.0", RESUBMIT)
    assert status(store, "bobout", "1.0", "loadbob") == RESUBMIT
    with pytest.raises(Refused):
        end(store, "loadbob", "2.0", RESUBMIT)
    with pytest.raises(WrongUse, match="READY, FAILED or RESUBMIT, not 'GOOD'"):
        end(store, "loadbob", "1.0", "GOOD")


# --- H2, by CSV ---------------------------------------------------------------------------------

H2 = {  # as CSVWRITE writes it: names in upper case, texts in quotes, NULL as nothing
    "dataset": '"DATASETID","HOSTNAME","DATABASE","SCHEMANAME","TABLENAME","USERNAME",'
    '"ENCRYPTEDPASS"\n"bobin","host ""a"", b",,,,"etl",\n"bobout",,,,,,\n',
    "job": '"JOBID","ITEMTYPE","DATASETID","ITEMVALUE","MODIFIED"\n'
    '"loadbob","IN","bobin",,\n"loadbob","OUT","bobout",,"2025-12-01 15:00:00"\n'
    '"loadbob","COLOUR",,"red",\n',
    "datastatus": '"DATAID","DATASETID","JOBID","LOCKTYPE","MODIFIED","STATUS"\n'
    '"1.0","bobin","fakejob","OUT","2025-12-01 15:46:19.56124","READY"\n'
    '"2.0","bobin","fakejob","OUT","2025-12-01 15:46:19.5","READY"\n'
    '"1.0","bobout","loadbob","OUT","2025-12-01 16:08:49.740813","READY"\n',
}


def write(folder: Path, **files: str) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return str(folder)


def test_the_tables_of_h2_are_loaded_and_dumped(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "h2", **H2)
    assert csv_dump.load(store, folder) == {"dataset": 2, "job": 3, "datastatus": 3}
    assert csv_dump.load(store, folder) == {"dataset": 0, "job": 0, "datastatus": 0}

    assert sql(store, "select hostname, username from dataset where datasetid = 'bobin'") == [
        ('host "a", b', "etl")
    ]
    [claim] = store.claim("loadbob", owner="somebody")
    assert claim.dataid == "2.0"
    store.fail(claim, "no")
    assert dict(store.read_plan("loadbob").environment) == {"COLOUR": "red"}

    again = str(tmp_path / "dumped")
    assert csv_dump.dump(store, again) == {"dataset": 2, "job": 3, "datastatus": 4}
    assert csv_dump.load(store, again) == {"dataset": 0, "job": 0, "datastatus": 0}
    with pytest.raises(Refused, match=r"dataset\.csv already exists"):
        csv_dump.dump(store, again)
    new = open_store(f"sqlite:///{tmp_path}/new.db")
    new.init()
    assert csv_dump.load(new, again) == {"dataset": 2, "job": 3, "datastatus": 4}
    assert status(new, "bobout", "2.0", "loadbob") == FAILED
    assert status(new, "bobout", "1.0", "loadbob") == READY
    new.close()


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({}, "has none of dataset.csv, job.csv, datastatus.csv"),
        ({"job": "jobid,colour\na,b\n"}, "job.csv has no column itemtype"),
        ({"dataset": "datasetid,colour\na,b\n"}, "dataset.csv has a column 'colour'"),
        ({"job": "jobid,itemtype\na\n"}, "job.csv:2 has 1 values for 2 columns"),
        ({"job": "jobid,itemtype\n,IN\n"}, "job.csv:2 has no jobid"),
        ({"dataset": 'datasetid\n"a\n'}, "isn't CSV in UTF-8"),
        (
            {"job": "jobid,itemtype,modified\na,IN,yesterday\n"},
            "has the time 'yesterday', which isn't",
        ),
        (
            {"dataset": "datasetid,hostname\nnew,\nbobin,other\n"},
            "dataset bobin has a different hostname here than in the file. Nothing was loaded",
        ),
    ],
)
def test_a_load_that_fails_changes_nothing(
    sqlite_url: str, tmp_path: Path, files: dict[str, str], line: str
) -> None:
    store = open_store(sqlite_url)
    store.init()
    sql(store, "insert into dataset (datasetid, hostname) values ('bobin', 'here')")
    before = everything(store)
    with pytest.raises((WrongUse, Refused), match=line.replace("(", r"\(")):
        csv_dump.load(store, write(tmp_path / "in", **files))
    assert everything(store) == before
    store.close()
