"""`odf plan`, `apply` and `export`: differences are listed, and written once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster import Dataset, Flow, Job
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.config.credentials import password_of
from opendataflow_dagster.errors import CredentialError, FlowError, Refused, WrongUse
from opendataflow_dagster.flow.apply import apply_flow, export_flow
from opendataflow_dagster.flow.plan import FlowPlan, effects_of, plan_flow
from opendataflow_dagster.model import DIALS
from opendataflow_dagster.store import open_store, registry
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store.store import Store
from tests.support import store_fixtures
from tests.support.store_fixtures import check, close, put, register, sql, take

Odf = Callable[..., Result]

SALES = Dataset("sales", hostname="/data/sales", format="csv")
CHECKED = Dataset("checked", hostname="/data/checked")
CHECK = Job("check", inputs=["sales"], outputs=["checked"], run="./check.sh")
SHOP = Flow("shop", datasets=[SALES, CHECKED], jobs=[CHECK])


def shop(*, datasets: Any = (SALES, CHECKED), jobs: Any = (CHECK,), name: str = "shop") -> Flow:
    return Flow(name, datasets=datasets, jobs=jobs)


def job(**more: Any) -> Job:
    return Job("check", **{"inputs": ["sales"], "outputs": ["checked"], **more})


def pending(store: Store, jobid: str) -> list[str]:
    return sorted(dataid for job, dataid in store_fixtures.pending(store) if job == jobid)


def told(plan: FlowPlan) -> list[str]:
    """Each change as `action kind name`, with a `!` before a conflict."""
    return [
        f"{'!' if change.conflict else ''}{change.action} {change.kind} {change.name}"
        for change in plan.changes
    ]


def effects(store: Store, flow: Flow) -> dict[str, list[str]]:
    plan = plan_flow(store, flow)
    found = zip(plan.changes, effects_of(store, flow, plan), strict=True)
    return {change.name: sentences for change, sentences in found}


def registrations(store: Store) -> dict[str, Any]:
    """Return what a flow writes, without times, and without who and when."""
    columns = "datasetid, hostname, database, schemaname, tablename, username, format, chunkcolumn"
    dials = ", ".join(DIALS)
    return {
        "dataset": sorted(sql(store, f"select {columns}, domain, writemode, options from dataset")),
        "job": sorted(
            sql(store, "select jobid, itemtype, datasetid, itemvalue from job"), key=repr
        ),
        "dials": sorted(
            (row for row in sql(store, f"select jobid, {dials} from jobpolicy") if any(row[1:])),
            key=repr,
        ),
        "origin": sorted(sql(store, "select kind, name, origin, dials from origin")),
    }


@pytest.fixture
def odf(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Odf]:
    """Run `odf` on the tables of `store`."""
    monkeypatch.setenv("DATAFLOW_URL", url)

    def run(*words: str, code: int = 0, **more: Any) -> Result:
        result = CliRunner().invoke(app, list(words), prog_name="odf", **more)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        if code in (1, 2, 4):
            assert result.stderr.count("\n") == 1, result.stderr
            assert result.stderr.startswith("odf: ")
        return result

    yield run
    check(store)


# --- one flow and its tables ----------------------------------------------------------------------


def test_a_flow_is_applied_once_and_then_its_plan_is_empty(store: Store) -> None:
    put(store, "sales", "1")
    put(store, "sales", "2")
    assert told(plan_flow(store, SHOP)) == [
        "add dataset sales",
        "add dataset checked",
        "add job check",
    ]
    assert effects(store, SHOP)["check"] == ["2 chunks become claimable"]
    done = apply_flow(store, SHOP)
    assert told(done) == ["add dataset sales", "add dataset checked", "add job check"]
    store.fill()
    assert pending(store, "check") == ["1", "2"]
    assert told(plan_flow(store, SHOP)) == []
    before = registrations(store)
    history = sql(store, "select count(*) from registration")
    assert apply_flow(store, SHOP).changes == ()
    assert registrations(store) == before
    assert sql(store, "select count(*) from registration") == history
    assert [claim.dataid for claim in take(store, "check")] == ["1"]
    check(store)


def test_only_changes_are_listed_and_written(store: Store) -> None:
    apply_flow(store, shop(jobs=[job(environment={"MODE": "fast"})]))
    [(modified,)] = sql(store, "select modified from job where itemtype = 'IN'")
    changed = shop(
        datasets=[SALES, Dataset("checked", hostname="/new", options={"delimiter": ";"})],
        jobs=[job(environment={"MODE": "slow", "X": ""}, policy={"concurrency": 4})],
    )
    plan = plan_flow(store, changed)
    assert [
        (change.name, [each[:3] for each in change.differences]) for change in plan.changes
    ] == [
        (
            "checked",
            [("hostname", "/data/checked", "/new"), ("options", None, '{"delimiter": ";"}')],
        ),
        (
            "check",
            [
                ("environment.MODE", "fast", "slow"),
                ("environment.X", None, ""),
                ("policy.concurrency", None, "4"),
            ],
        ),
    ]
    apply_flow(store, changed)
    assert told(plan_flow(store, changed)) == []
    assert sql(store, "select modified from job where itemtype = 'IN'") == [(modified,)]


def test_a_change_by_hand_is_drift_that_apply_reverts(store: Store) -> None:
    apply_flow(store, SHOP)
    registry.add_dataset(store, "sales", hostname="/elsewhere")
    registry.add_job(store, "check", ["more"])
    assert told(plan_flow(store, SHOP)) == ["change dataset sales", "change job check"]
    sql(store, "delete from dataset where datasetid = 'checked'")
    assert told(plan_flow(store, SHOP))[1] == "add dataset checked"
    apply_flow(store, SHOP)
    assert told(plan_flow(store, SHOP)) == []
    assert sql(store, "select datasetid from job where itemtype = 'IN'") == [("sales",)]


def test_dials_that_the_flow_does_not_set_are_left_to_people(store: Store) -> None:
    apply_flow(store, shop(jobs=[job(policy={"concurrency": 4, "retry_delay": "10m"})]))
    registry.set_policy(store, "check", {"paused_until": "forever", "max_attempts": "3"})
    without = shop(jobs=[job(policy={"retry_delay": 600})])
    plan = plan_flow(store, without)
    assert [each[:3] for each in plan.changes[0].differences] == [("policy.concurrency", "4", None)]
    apply_flow(store, without)
    row = registry.policy(store, "check")
    assert (row["concurrency"], row["retry_delay"]) == (None, 600)
    assert (row["paused_until"], row["max_attempts"]) == ("forever", 3)
    moment = shop(jobs=[job(policy={"paused_until": "2030-03-01T12:00+02:00"})])
    apply_flow(store, moment)
    assert registry.policy(store, "check")["paused_until"] == "2030-03-01T10:00:00Z"
    assert told(plan_flow(store, moment)) == []


def test_what_the_flow_no_longer_declares_is_removed_but_its_chunks_stay(store: Store) -> None:
    for dataid in "12345":
        put(store, "sales", dataid)
    apply_flow(store, SHOP)
    store.finish(take(store, "check", k=2))
    registry.set_policy(store, "check", {"concurrency": "2"})
    less = shop(datasets=[SALES], jobs=[])
    assert told(plan_flow(store, less)) == ["remove job check", "remove dataset checked"]
    found = effects(store, less)
    assert found["check"] == [
        "no job can claim its 3 claimable chunks any more",
        "2 READY chunks lose their producer, and stay",
    ]
    assert found["checked"] == ["2 READY chunks stay with data and history"]
    apply_flow(store, less)
    assert registrations(store)["origin"] == [("dataset", "sales", "flow:shop", None)]
    assert sql(store, "select count(*) from datastatus where datasetid = 'checked'") == [(2,)]
    assert sql(store, "select count(*) from jobpolicy") == [(0,)]
    store.fill()
    check(store)
    apply_flow(store, Flow("shop"))
    assert registrations(store) == {"dataset": [], "job": [], "dials": [], "origin": []}


def test_a_running_job_is_neither_removed_nor_relinked(store: Store) -> None:
    put(store, "sales", "1")
    apply_flow(store, SHOP)
    [claim] = take(store, "check")
    before = registrations(store)
    for flow in (shop(jobs=[]), shop(jobs=[job(inputs=["other"])])):
        assert "1 chunk is running: apply refuses until then" in effects(store, flow)["check"]
        with pytest.raises(Refused, match="'check' is running on 1 chunk") as error:
            apply_flow(store, flow)
        assert error.value.code == "LOCKED"
        assert registrations(store) == before
    apply_flow(store, shop(jobs=[job(environment={"MODE": "slow"})]))
    store.finish(claim)
    apply_flow(store, shop(jobs=[]))


# --- whose rows -----------------------------------------------------------------------------------


def test_equal_rows_typed_by_hand_are_adopted_without_a_change(store: Store) -> None:
    registry.add_dataset(store, "sales", hostname="/data/sales", format="csv")
    register(store, "check", ["sales"], ["checked"])
    flow = shop(datasets=[SALES])
    plan = plan_flow(store, flow)
    assert plan.changes == ()
    assert set(plan.noted) == {("dataset", "sales"), ("job", "check")}
    apply_flow(store, flow)
    assert plan_flow(store, flow).noted == ()
    assert told(plan_flow(store, Flow("shop"))) == ["remove job check", "remove dataset sales"]


def test_rows_typed_by_hand_with_other_values_are_a_conflict(store: Store) -> None:
    registry.add_dataset(store, "sales", hostname="/other")
    before = registrations(store)
    assert told(plan_flow(store, SHOP))[0] == "!change dataset sales"
    with pytest.raises(Refused, match=r"'sales' can't be applied: registered by hand.*--adopt"):
        apply_flow(store, SHOP)
    assert registrations(store) == before
    assert told(apply_flow(store, SHOP, adopt=True))[0] == "change dataset sales"
    assert told(plan_flow(store, SHOP)) == []


def test_two_flows_share_what_is_equal_and_neither_takes_from_the_other(store: Store) -> None:
    apply_flow(store, SHOP)
    bank = Flow("bank", datasets=[SALES], jobs=[Job("sum", inputs=["sales"], outputs=["sums"])])
    assert told(plan_flow(store, bank)) == ["add job sum"]
    apply_flow(store, bank)
    other = Flow("bank", datasets=[Dataset("sales", hostname="/bank")])
    assert told(plan_flow(store, other)) == ["!change dataset sales", "remove job sum"]
    assert "declared by flow:shop" in plan_flow(store, other).changes[0].conflict
    # What only one of them drops stays; what it takes over is its own.
    dropped = shop(datasets=[CHECKED])
    assert told(plan_flow(store, dropped)) == []
    apply_flow(store, dropped)
    assert told(plan_flow(store, bank)) == []
    apply_flow(store, SHOP)
    apply_flow(store, other, adopt=True)
    assert told(plan_flow(store, SHOP)) == ["!change dataset sales"]
    assert told(plan_flow(store, other)) == []


def test_a_dataset_that_a_job_of_others_uses_is_not_removed(store: Store) -> None:
    apply_flow(store, SHOP)
    register(store, "hand", ["checked"], ["x"])
    flow = shop(datasets=[SALES], jobs=[])
    assert told(plan_flow(store, flow)) == ["remove job check", "!remove dataset checked"]
    with pytest.raises(Refused, match=r"'checked' can't be applied: 'hand' reads or writes it"):
        apply_flow(store, flow, adopt=True)
    own = shop(datasets=[CHECKED])  # its own job names it as it would name anything unregistered
    assert told(plan_flow(store, own)) == ["remove dataset sales"]
    assert "'sales' of job 'check' is neither declared" in plan_flow(store, own).notes[0]


def test_registrations_of_a_pipeline_belong_to_its_project(store: Store) -> None:
    registry.add_job(
        store, "clean", [], ["out"], {"project": "crm"}, replace=True, origin="project:crm"
    )
    register(store, "old", [], ["out2"], project="crm")  # by an older program
    apply_flow(store, SHOP)
    assert told(plan_flow(store, Flow("shop"))) == [
        "remove job check",
        "remove dataset sales",
        "remove dataset checked",
    ]
    for name, output in (("clean", "out"), ("old", "out2")):
        other = Flow("shop", jobs=[Job(name, outputs=["else"])])
        assert "declared by project:crm" in plan_flow(store, other).conflicts[0].conflict
        same = Flow("crm", jobs=[Job(name, outputs=[output], pipeline="crm")])
        assert plan_flow(store, same).changes == ()
        apply_flow(store, same)
        assert told(plan_flow(store, Flow("crm"))) == []
    registry.remove_job(store, "clean")
    assert ("job", "clean") not in {row[:2] for row in registrations(store)["origin"]}


# --- secrets --------------------------------------------------------------------------------------


def test_a_password_is_encrypted_compared_and_never_shown(
    odf: Odf, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSKEY", "Passkey-1")
    monkeypatch.setenv("PW", "Geheim-1")
    Path("flow.yml").write_text(
        "flow: shop\ndatasets:\n  orders: {hostname: db1, tablename: orders, password: '${PW}'}\n"
    )
    shown = [odf("plan", code=5), odf("plan", "--json", code=5), odf("plan", "--markdown", code=5)]
    shown += [odf("apply"), odf("plan")]
    [(value,)] = sql(store, "select encryptedpass from dataset")
    assert password_of("orders", value) == "Geheim-1"
    monkeypatch.setenv("PW", "Geheim-2")
    shown += [odf("plan", code=5), odf("plan", "--json", code=5), odf("apply"), odf("plan")]
    assert "password set → another one" in shown[5].stdout
    [(changed,)] = sql(store, "select encryptedpass from dataset")
    assert password_of("orders", changed) == "Geheim-2"
    shown.append(odf("export"))
    for result in shown:
        assert "Geheim" not in result.output
    assert changed in shown[-1].stdout
    text = Path("flow.yml").read_text()
    Path("flow.yml").write_text(text.replace("orders, password", "orders2, password"))
    odf("apply")
    assert sql(store, "select encryptedpass from dataset") == [(changed,)]
    monkeypatch.delenv("PW")
    assert "flow.yml:3: The environment has no PW" in odf("plan", code=2).stderr
    monkeypatch.setenv("PW", "Geheim-2")
    monkeypatch.setenv("PASSKEY", "other")
    assert "can't be decrypted" in odf("plan", code=4).stderr


def test_without_a_passkey_a_password_is_refused_before_anything_is_written(store: Store) -> None:
    flow = Flow("s", datasets=[SALES, Dataset("orders", hostname="db", password="${PW}")])
    environ = {"PW": "geheim"}
    assert len(plan_flow(store, flow, environ=environ).changes) == 2
    with pytest.raises(CredentialError, match="needs a passkey"):
        apply_flow(store, flow, environ=environ)
    assert registrations(store)["dataset"] == []


# --- the commands ---------------------------------------------------------------------------------


def test_plan_and_apply_by_hash(odf: Odf, store: Store) -> None:
    Path("flow.yml").write_text(
        "flow: shop\ndatasets: {a: {}, b: {}}\njobs:\n  j: {in: a, out: b, run: ./j.sh}\n"
    )
    planned = json.loads(odf("plan", "--json", code=5).stdout)
    assert [(each["action"], each["name"]) for each in planned["changes"]] == [
        ("add", "a"),
        ("add", "b"),
        ("add", "j"),
    ]
    assert f"Next: odf apply {planned['hash']}" in odf("plan", code=5).stderr
    stale = odf("apply", "0123456789ab", code=4).stderr
    assert f"the plan is now {planned['hash']}" in stale
    put(store, "a", "1")  # chunks don't make a plan stale
    assert "3 added" in odf("apply", planned["hash"]).stderr
    assert pending(store, "j") == ["1"]
    assert odf("plan").stdout == ""
    assert "nothing to do" in odf("apply").stderr
    [(who, why)] = set(sql(store, "select who, why from registration"))
    assert (who, why) == (registry.person(), "odf apply: shop")


def test_the_git_commit_is_recorded(odf: Odf, store: Store) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}

    def git(*words: str) -> str:
        line = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        done = subprocess.run(line, check=True, capture_output=True, text=True, env=environment)
        return done.stdout.strip()

    Path("flow.yml").write_text("flow: shop\ndatasets: {a: {}}\n")
    git("init", "-q")
    git("add", "flow.yml")
    git("commit", "-q", "-m", "x")
    commit = git("rev-parse", "HEAD")
    odf("apply")
    assert sql(store, "select revision from origin") == [(commit,)]
    Path("flow.yml").write_text("flow: shop\ndatasets: {a: {}, b: {}}\n")
    odf("apply")
    assert ("b", f"{commit}+") in sql(store, "select name, revision from origin")
    assert (f"odf apply: shop at {commit}+",) in sql(store, "select why from registration")


def test_a_target_overrides_the_settings_as_declared(
    odf: Odf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "prod.properties").write_text(f"url=sqlite:///{tmp_path}/prod.db\n")
    (folder / "flow.yml").write_text(
        "flow: shop\ndatasets: {a: {}}\n"
        "targets: {dev: {url: 'sqlite:///dev.db'}, prod: {properties: prod.properties},\n"
        "  env: {url: '${TABLES}'}}\n"
    )
    file = str(folder / "flow.yml")
    assert (
        f"SQLite file {folder}/dev.db"
        in odf("plan", "--file", file, "--target", "dev", code=5).stderr
    )
    assert not (folder / "dev.db").exists()
    hash = json.loads(odf("plan", "--file", file, "--target", "dev", "--json", code=5).stdout)[
        "hash"
    ]
    odf("apply", "aaaa", "--file", file, "--target", "dev", code=4)
    assert not (folder / "dev.db").exists()
    odf("apply", hash, "--file", file, "--target", "dev")
    odf("plan", "--file", file, "--target", "dev")
    monkeypatch.setenv("DATAFLOW_TARGET", "prod")
    odf("apply", "--file", file)
    assert (tmp_path / "prod.db").exists()
    odf("plan", "--file", file)
    assert (
        "no target 'prd'. Did you mean 'prod'?"
        in odf("plan", "--file", file, "--target", "prd", code=2).stderr
    )
    assert "has no TABLES" in odf("plan", "--file", file, "--target", "env", code=2).stderr
    monkeypatch.delenv("DATAFLOW_TARGET")
    odf("plan", "--file", file, code=5)  # of the tables that commands use here


def test_every_command_uses_the_target_that_is_chosen(tmp_path: Path) -> None:
    """In separate processes: `odf run` and `odf alive` work without click."""
    (tmp_path / "prod.properties").write_text("url=sqlite:///prod.db\n")
    (tmp_path / "flow.yml").write_text(
        "flow: shop\ndatasets: {a: {}, raw: {}}\n"
        "jobs: {make: {in: raw, out: a, run: 'sh -c \"echo $DATAFLOW_URL\"'}}\n"
        "targets: {dev: {url: 'sqlite:///dev.db'}, prod: {properties: prod.properties}}\n"
    )

    def odf(*words: str, code: int = 0, **env: str) -> str:
        line = [sys.executable, "-m", "opendataflow_dagster.cli", *words]
        done = subprocess.run(
            line, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    here = {"DATAFLOW_TARGET": "dev", "DATAFLOW_URL": "sqlite:////nowhere/else.db"}
    odf("apply", **here)
    odf("--target", "prod", "apply")
    odf("ready", "raw", "1", **here)
    assert f"sqlite:///{tmp_path}/dev.db" in odf("run", "make", **here)
    assert "READY" in odf("--target", "dev", "status", "make")
    assert "READY" not in odf("--target", "prod", "status", "make")
    assert not (tmp_path / ".dataflow").exists()
    assert "no target 'prd'. Did you mean 'prod'?" in odf("--target", "prd", "status", code=2)
    assert "both name tables" in odf("--config", "prod.properties", "status", code=2, **here)
    assert "both name tables" in odf("run", "--config", "x", "./x.sh", code=2, **here)
    (tmp_path / "flow.yml").unlink()
    assert "There is no flow.yml in this folder" in odf("run", "./x.sh", code=2, **here)


def test_a_flow_in_python_is_planned_by_its_name(odf: Odf, store: Store) -> None:
    file = f"flows_of_{store.db.dialect}.py"  # imported modules stay, of the other one, too
    Path(file).write_text(
        "from opendataflow_dagster import Dataset, Flow\n"
        "shop = Flow('shop', datasets=[Dataset('a')])\n"
    )
    assert "+ dataset" in odf("plan", "--file", f"{file}:shop", code=5).stdout
    odf("apply", "--file", f"{file}:shop")
    assert "no Flow called 'flow'" in odf("plan", "--file", file, code=2).stderr
    assert "There is no other.py" in odf("plan", "--file", "other.py", code=2).stderr


HOSTILE = ["; drop table job; --", "it's", "a|b", "<script>", "`x`", "%s", "${X}", "# x", "on", "é"]


def test_hostile_names_are_printed_safely_and_kept(odf: Odf, store: Store) -> None:
    flow = Flow(
        "a`|<b>",
        datasets=[Dataset(name, tablename="$${x} | <b>") for name in HOSTILE],
        jobs=[Job(name, inputs=[name], outputs=[f"out {name}"]) for name in HOSTILE],
    )
    apply_flow(store, flow)
    assert told(plan_flow(store, flow)) == []
    exported = odf("export")
    assert Flow.parse(exported.stdout).name == "a`|<b>"
    Path("flow.yml").write_text(exported.stdout)
    odf("plan")
    Path("flow.yml").write_text('flow: "a`|<b>"\n')
    shown = odf("plan", "--markdown", code=5).stdout
    rows = [line for line in shown.splitlines() if line.startswith("| remove")]
    assert len(rows) == 2 * len(HOSTILE)
    assert "<script>" not in shown
    for row in rows:
        assert row.replace("\\|", "").count("|") == 5, row


def test_an_empty_flow_and_a_missing_file(odf: Odf) -> None:
    assert "There is no flow.yml. Write one" in odf("plan", code=2).stderr
    Path("flow.yml").write_text("flow: shop\n")
    assert odf("plan").stdout == ""
    assert "nothing to do" in odf("apply").stderr


def test_misspelled_datasets_are_noted(odf: Odf, store: Store) -> None:
    Path("flow.yml").write_text(
        "flow: shop\ndatasets: {sales: {}, checked: {}}\njobs:\n  j: {in: slaes, out: checked}\n"
    )
    note = "flow.yml:4: dataset 'slaes' of job 'j' is neither declared nor registered. Did you mean"
    assert note in odf("plan", code=5).stderr


def test_a_circle_with_what_is_registered_is_refused(store: Store) -> None:
    register(store, "hand", ["checked"], ["sales"])
    with pytest.raises(FlowError, match="Together with registered jobs, these would wait"):
        plan_flow(store, SHOP)
    with pytest.raises(FlowError):
        apply_flow(store, SHOP)
    assert registrations(store)["dataset"] == []


def test_doctor_reports_drift(odf: Odf, store: Store) -> None:
    assert "flow.yml" not in odf("doctor").stdout
    Path("flow.yml").write_text("flow: shop\ndatasets: {a: {}}\n")

    def line() -> str:
        [found] = [each for each in odf("doctor").stdout.splitlines() if " flow " in each]
        return " ".join(found.split())

    assert line() == "warn flow 'shop' in flow.yml: 1 to add → odf plan"
    odf("apply")
    assert line() == "ok flow 'shop' in flow.yml: the tables are as it says"
    Path("flow.yml").write_text("flow: shop\ndatasets: {a: {hostnam: x}}\n")
    broken = CliRunner().invoke(app, ["doctor"])
    assert broken.exit_code == 1
    assert "fail flow flow.yml:2: dataset 'a' has an unknown key" in " ".join(broken.stdout.split())


# --- size, turns, kills ---------------------------------------------------------------------------


def large(count: int) -> Flow:
    return Flow(
        "large",
        datasets=[Dataset(f"d{n}", hostname=f"/data/{n}") for n in range(count)],
        jobs=[
            Job(f"j{n}", inputs=[f"d{n}"], outputs=[f"d{n + 1}"], policy={"concurrency": 2})
            for n in range(count - 1)
        ],
    )


def test_a_thousand_datasets_are_planned_in_two_seconds(store: Store) -> None:
    flow = large(1000)
    began = time.process_time()
    plan = plan_flow(store, flow)
    effects_of(store, flow, plan)
    assert time.process_time() - began < 2
    assert len(plan.changes) == 1999
    apply_flow(store, flow)
    began = time.process_time()
    assert plan_flow(store, flow).changes == ()
    assert time.process_time() - began < 2


def test_two_at_once_take_turns(store: Store, url: str) -> None:
    stores = [store, open_store(url)]
    start = threading.Barrier(2)

    def work(each: Store) -> int:
        start.wait()
        try:
            return len(apply_flow(each, large(50)).changes)
        finally:
            each.db.drop()

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(work, stores)) == [0, 99]
    assert told(plan_flow(store, large(50))) == []
    stores[1].close()


KILLED = """
import os, signal, sys
from opendataflow_dagster.flow.apply import apply_flow
from opendataflow_dagster.flow.flow import Flow
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store import open_store

store, deadly = open_store(sys.argv[1]), int(sys.argv[2])
plain, count = store.db.execute, 0

def execute(text, params):
    global count
    count += 1
    if count == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(text, params)

store.db.execute = execute
apply_flow(store, Flow.load("flow.yml"))
print(count)
"""


def test_an_apply_that_is_killed_has_changed_nothing(store: Store, url: str) -> None:
    put(store, "a", "1")
    Path("flow.yml").write_text(
        "flow: shop\ndatasets: {a: {}, b: {}}\njobs:\n"
        "  j: {in: a, out: b, policy: {concurrency: 3}}\n  k: {in: b, out: c}\n"
    )
    before = registrations(store)
    planned = told(plan_flow(store, Flow.load()))
    line = [sys.executable, "-c", KILLED, url]
    for deadly in range(4, 40, 2):
        done = subprocess.run([*line, str(deadly)], capture_output=True, text=True)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        if plan_flow(store, Flow.load()).changes:
            assert registrations(store) == before
            assert told(plan_flow(store, Flow.load())) == planned
    apply_flow(store, Flow.load())
    assert told(plan_flow(store, Flow.load())) == []
    store.fill()
    assert pending(store, "j") == ["1"]
    check(store)


# --- export ---------------------------------------------------------------------------------------


def test_an_export_leaves_out_what_a_flow_cant_declare(odf: Odf, store: Store) -> None:
    registry.add_dataset(store, "good", hostname="${x}", options='{"delimiter": ";"}')
    for host in ("one", "two"):
        sql(store, "insert into dataset (datasetid, hostname) values ('twice', :host)", host=host)
    sql(store, "insert into dataset (datasetid, encryptedpass) values ('clear', 'Geheim-1')")
    sql(store, "insert into dataset (datasetid) values ('line' || chr(10) || 'feed')") if (
        store.db.dialect == "postgres"
    ) else sql(store, "insert into dataset (datasetid) values ('line' || char(10) || 'feed')")
    register(store, "unwritten", ["a"], [])
    registry.add_job(store, "theirs", [], ["o"], origin="project:crm")
    exported = odf("export", "--flow", "shop")
    assert "Geheim" not in exported.output
    flow = Flow.parse(exported.stdout)
    assert [dataset.datasetid for dataset in flow.datasets] == ["good"]
    assert flow.jobs == ()
    assert exported.stdout.count("# Left out: ") == 5
    Path("flow.yml").write_text(exported.stdout)
    assert odf("plan").stdout == ""


def test_an_export_needs_a_name_where_there_are_several_flows(odf: Odf, store: Store) -> None:
    assert export_flow(store).text.splitlines()[1] == f"flow: {Path.cwd().name}"
    apply_flow(store, SHOP)
    assert Flow.parse(export_flow(store).text).name == "shop"
    apply_flow(store, Flow("bank", datasets=[Dataset("b")]))
    assert "several flows: 'bank', 'shop'" in odf("export", code=2).stderr
    shown = odf("export", "--flow", "bank").stdout
    assert [each.datasetid for each in Flow.parse(shown).datasets] == ["b"]
    with pytest.raises(WrongUse):
        export_flow(store, "")
    close(store)


# --- the names of domains -------------------------------------------------------------------------


def test_a_domain_with_chunks_keeps_its_name(store: Store) -> None:
    apply_flow(store, SHOP)
    archive = Dataset("archive", hostname="/data/archive")
    joined = job(inputs=["sales", "archive"])
    renamed = shop(datasets=[SALES, CHECKED, archive], jobs=[joined])
    assert not plan_flow(store, renamed).conflicts  # it has no chunks: nothing is called by it yet

    put(store, "sales", "1")
    before = registrations(store)
    for flow, dataset, was in (
        (renamed, "sales", "archive"),
        (shop(datasets=[replace(SALES, domain="till's"), CHECKED]), "sales", "till's"),
    ):
        [conflict] = plan_flow(store, flow).conflicts
        assert (conflict.name, conflict.may_adopt) == (dataset, False)
        assert conflict.conflict == (
            f"its partitions have the name 'sales' in the tables, and {was!r} in this flow: "
            "add `domain: sales` to it"
        )
        for adopt in (False, True):
            with pytest.raises(Refused, match="add `domain: sales` to it"):
                apply_flow(store, flow, adopt=adopt)
        with pytest.raises(Refused, match="add `domain: sales` to it"):
            apply_flow(store, flow, additions=True)
    assert registrations(store) == before

    kept = shop(datasets=[replace(SALES, domain="sales"), CHECKED, archive], jobs=[joined])
    apply_flow(store, kept)
    assert set(read_catalog(store).domains.values()) == {"sales"}
    assert not plan_flow(store, kept).changes


def test_of_two_flows_the_second_takes_the_name_that_the_first_gave(store: Store) -> None:
    apply_flow(store, SHOP)
    put(store, "sales", "1")
    other = Flow("mail", jobs=[Job("send", inputs=["archive", "checked"], outputs=["mails"])])
    [conflict] = plan_flow(store, other).conflicts
    assert (conflict.kind, conflict.name) == ("job", "send")
    assert conflict.conflict == (
        "its partitions have the name 'sales' in the tables, and 'archive' in this flow: declare "
        "dataset 'archive' with `domain: sales`"
    )
    declared = replace(other, datasets=[Dataset("archive", domain="sales")])
    apply_flow(store, declared)
    assert not plan_flow(store, declared).changes
    assert not plan_flow(store, SHOP).changes


def test_a_line_in_a_file_is_named_with_its_place(store: Store) -> None:
    put(store, "sales", "1")
    flow = Flow.parse(
        "flow: shop\ndatasets:\n  sales: {hostname: /s}\n  archive: {hostname: /a}\n"
        "jobs:\n  check: {in: [sales, archive], out: [checked]}\n"
    )
    [conflict] = plan_flow(store, flow).conflicts
    assert conflict.conflict.endswith("add `domain: sales` to it at flow.yml:3")


def test_a_part_that_splits_off_gets_a_name_of_its_own(store: Store) -> None:
    apply_flow(store, SHOP)
    put(store, "sales", "1")
    put(store, "checked", "1")
    apply_flow(store, shop(jobs=[]))
    assert read_catalog(store).domains == {"sales": "sales", "checked": "checked"}
