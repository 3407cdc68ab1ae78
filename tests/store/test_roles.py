"""Who may do what with the tables on PostgreSQL: roles.sql, and errors that say what is missing."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import errors

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import NoDatabase, Refused
from opendataflow_dagster.model import Fact
from opendataflow_dagster.pipelines.project import new_project
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.database import SQL_FOLDER
from opendataflow_dagster.store.registry import set_policy
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server
from tests.support.store_fixtures import check, close, policy, put, register, sql, status, take

T = TypeVar("T")

ROLES = Path(SQL_FOLDER, "postgres", "roles.sql")
OWNER, WORKER, READER = NAMES = ("odf_test_owner", "odf_test_worker", "odf_test_reader")

OURS = """
select p.proname from pg_proc p where p.pronamespace = 'dataflow'::regnamespace and p.prosecdef
    and has_function_privilege({role}, p.oid, 'execute')
"""


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    """Tables that the superuser has created, and chunk 1 of `a` for `job`."""
    made = open_store(postgres_url)
    made.init()
    register(made, "job", ["a"], ["b"])
    put(made, "a", "1")
    yield made
    found = sql(made, "select rolname from pg_roles where rolname like 'odf_test%'")
    for (name,) in found:
        sql(made, f"reassign owned by {name} to postgres")
        sql(made, f"drop owned by {name}")
        sql(made, f"drop role {name}")
    close(made)


def psql(server: Server, url: str, *names: str, schema: str = "dataflow") -> None:
    given = dict(zip(("owner", "worker", "reader"), names, strict=True))
    told = [f"--set={name}={value}" for name, value in (given | {"schema": schema}).items()]
    program = server.bin / "psql"
    line = [
        program,
        "--no-psqlrc",
        "--set=ON_ERROR_STOP=1",
        *told,
        "--file",
        ROLES,
        "--dbname",
        url,
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def as_user(store: Store, name: str) -> Store:
    """The same tables as another user sees them."""
    sql(store, f"alter role {name} login")
    url = store.db.url.replace("//postgres@", f"//{name}@")  # type: ignore[attr-defined]
    return open_store(url)


def refused(store: Store, name: str, statement: str) -> None:
    url = store.db.url.replace("//postgres@", f"//{name}@")  # type: ignore[attr-defined]
    options = "-c search_path=dataflow"
    with (
        psycopg.connect(url, autocommit=True, options=options) as person,
        pytest.raises(errors.InsufficientPrivilege),
    ):
        person.execute(statement.encode())


def test_only_the_owner_may_call_functions_that_act_in_its_name(store: Store) -> None:
    assert sql(store, OURS.format(role="'public'")) == []
    put(store, "b", "1", jobid="job")
    sql(store, f"create role {READER} login")
    sql(store, f"grant usage, create on schema dataflow to {READER}")
    sql(store, f"grant select on all tables in schema dataflow to {READER}")
    for call in (
        "select sent_back(array['job'], array['1'], array[true])",
        "select judge(array['job'], array['1'])",
        "select fill_batch(cast(row('job', null, '', '', '') as fill), 1)",
        "select follow(1)",
        "create temp table t (i int); create trigger t before truncate on t "
        "for each statement execute function datastatus_truncated()",
    ):
        refused(store, READER, call)
    assert status(store, "b", "1", "job") == "READY"


def test_init_revokes_the_grants_of_older_tables(store: Store) -> None:
    sql(store, f"create role {WORKER} login")
    sql(store, f"grant select, insert, update, delete on claim to {WORKER}")
    sql(store, "grant execute on all functions in schema dataflow to public")
    store.init()
    assert sql(store, OURS.format(role="'public'")) == []
    may = sql(store, OURS.format(role=f"'{WORKER}'"))
    assert sorted(may) == [("fill_next",), ("judge",)], "who may claim must be able to judge"


def test_a_worker_works_and_changes_no_more(
    store: Store, postgres_server: Server, postgres_url: str
) -> None:
    psql(postgres_server, postgres_url, *NAMES)
    psql(postgres_server, postgres_url, *NAMES)  # once more changes nothing
    worker = as_user(store, WORKER)
    policy(store, "job", concurrency=1, max_attempts=2)
    claim = worker.claim("job", owner="w", only="1")[0]
    worker.confirm(claim)
    worker.fail(claim, "not this time")
    worker.finish(take(worker, "job"), [Fact("b", "1", rows=3)])
    assert status(store, "b", "1", "job") == "READY"
    set_policy(worker, "job", {"concurrency": "2"})
    worker.recover()
    worker.db.run("claims.tidy")
    for statement in (
        "truncate datastatus",
        "alter table datastatus disable trigger all",
        "drop table claim",
        "create table mine (i int)",
        "insert into dataevent (datasetid) values ('forged')",
        "delete from dataevent",
        "update dataevent set who = 'somebody else'",
        "update dataflow_meta set value = '99'",
        "insert into streamtoken (jobid, hash) values ('job', 'x')",
        "select sent_back(array['job'], array['1'], array[true])",
        "select fill_batch(cast(row('job', null, '', '', '') as fill), 1)",
    ):
        refused(store, WORKER, statement)
    check(store)
    worker.close()


def test_the_commands_of_a_worker(
    store: Store, postgres_server: Server, postgres_url: str, tmp_path: Path
) -> None:
    psql(postgres_server, postgres_url, *NAMES)
    url = as_user(store, WORKER).db.url  # type: ignore[attr-defined]
    script = tmp_path / "next.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    new_project(tmp_path / "shop")
    for line in (
        "ready b 1 2 3 4 5",
        f"dataset add b --hostname {tmp_path} --format csv --chunkcolumn c",
        "job add next --in b --out c",
        "policy next concurrency=4 batch_size=2",
        f"run {script}",
        f"run --all {script}",
        "resubmit next 1",
        "hold next 1",
        "release next 1",
        f"force next 2 {script}",
        "delete-run next 3",
        "split b --values x,y",
        "recover",
        "status",
        "why next 1",
        "history clean --days-old 1",
        "clean",
        "dml update&datastatus&set&modified=now()",
        "validate --project shop",
        "pipeline run clean_contacts --project shop",
        "history next 1",
        "doctor",
    ):
        words = [word.replace("&", " ") for word in line.split()]
        if "--project" in words:  # with a session of Spark, which other tests share here
            done = subprocess.run(
                [sys.executable, "-m", "opendataflow_dagster.cli", *words],
                env={**os.environ, "DATAFLOW_URL": url},
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            assert done.returncode == 0, f"{line}: {done.stderr}"
            continue
        done = CliRunner().invoke(app, words, env={"DATAFLOW_URL": url}, prog_name="odf")
        assert done.exit_code == 0, f"{line}: {done.output} {done.exception!r}"
    done = CliRunner().invoke(app, ["token", "clean_contacts"], env={"DATAFLOW_URL": url})
    assert done.exit_code == 1
    assert 'grant select, insert, update on "dataflow".streamtoken' in done.stderr


def test_a_reader_reads_and_changes_nothing(
    store: Store, postgres_server: Server, postgres_url: str
) -> None:
    from opendataflow_dagster.explain.explain import explain
    from opendataflow_dagster.store.overview import summary

    psql(postgres_server, postgres_url, *NAMES)
    reader = as_user(store, READER)
    assert summary(reader)
    assert explain(reader, "job")
    for statement in (
        "update datastatus set status = 'HOLD'",
        "insert into claim (jobid, dataid, generation) values ('job', '1', 1)",
        "delete from pending",
        "select nextval('generation')",
        "select * from streamtoken",
        "select judge(array['job'], array['1'])",
        "begin; lock table datastatus in share row exclusive mode",
        "select 1 from jobpolicy for update",
    ):
        refused(store, READER, statement)
    reader.close()


def test_a_worker_applies_a_flow_that_a_reader_may_only_plan(
    store: Store, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    psql(postgres_server, store.db.url, *NAMES)  # type: ignore[attr-defined]
    Path("flow.yml").write_text("flow: shop\ndatasets: {a: {}}\njobs: {k: {in: a, out: c}}\n")

    def odf(name: str, *words: str) -> Result:
        monkeypatch.setenv("DATAFLOW_URL", as_user(store, name).db.url)  # type: ignore[attr-defined]
        return CliRunner().invoke(app, words, prog_name="odf")

    assert odf(READER, "plan").exit_code == 5
    denied = odf(READER, "apply")
    assert denied.exit_code == 1
    [line] = denied.stderr.splitlines()
    assert "permission denied" in line
    assert "grant" in line
    assert odf(WORKER, "apply").exit_code == 0
    assert odf(READER, "plan").exit_code == 0
    assert odf(READER, "export").exit_code == 0
    check(store)


def test_a_worker_role_gets_notices_and_a_reader_claims_nothing(
    store: Store, postgres_server: Server, postgres_url: str
) -> None:
    psql(postgres_server, postgres_url, *NAMES)
    Path("flow.yml").write_text(
        "flow: shop\ndatasets: {x: {}, y: {}}\njobs: {next: {in: x, out: y, run: 'true'}}\n"
    )
    url = as_user(store, WORKER).db.url  # type: ignore[attr-defined]
    reads = as_user(store, READER).db.url  # type: ignore[attr-defined]
    for who, words in ((url, ["apply"]), (url, ["ready", "x", "1"])):
        done = CliRunner().invoke(app, words, env={"DATAFLOW_URL": who})
        assert done.exit_code == 0, done.output
    line = [sys.executable, "-m", "opendataflow_dagster.cli", "work", "--until-idle"]

    def work(who: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DATAFLOW_URL": who}
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)

    refused = work(reads)
    assert refused.returncode == 1
    assert "grant" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr
    done = work(url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(store, "y", "1", "next") == "READY"


def test_an_owner_makes_and_upgrades_the_tables(
    store: Store, postgres_server: Server, postgres_url: str
) -> None:
    psql(postgres_server, postgres_url, *NAMES)
    psql(postgres_server, postgres_url, *NAMES, schema="My new")
    owner = as_user(store, OWNER)
    owner.init()
    owner.close()
    new = open_store(owner.db.url, schema="My new")  # type: ignore[attr-defined]
    new.init()
    new.close()
    psql(postgres_server, postgres_url, *NAMES, schema="My new")
    other = open_store(owner.db.url.replace(OWNER, WORKER), schema="My new")  # type: ignore[attr-defined]
    sql(store, f"alter role {WORKER} login")
    with pytest.raises(Refused, match="isn't registered"):
        other.claim("job", owner="w")
    other.close()


def missing(error: NoDatabase) -> str:
    """Return the command that an error names."""
    text = str(error)
    assert "\n" not in text
    assert "roles.sql" in text
    [command] = re.findall(r"run: (grant .*?);", text)
    return command


def test_an_error_names_the_grant_that_is_missing(store: Store) -> None:
    """Each command is run as printed, until a user without any rights can work."""
    sql(store, f'create role "{WORKER}" login')
    worker = as_user(store, WORKER)
    policy(store, "job", concurrency=1)
    told: list[str] = []

    def done(work: Callable[[], T]) -> T:
        for _ in range(20):
            try:
                return work()
            except NoDatabase as error:
                told.append(missing(error))
                sql(store, told[-1])
        raise AssertionError(told)

    claims = done(lambda: worker.claim("job", owner="w", only="1"))
    done(lambda: worker.finish(claims))
    assert told[0] == f'grant usage on schema "dataflow" to "{WORKER}"'
    assert told[1] == f'grant select on "dataflow".dataflow_meta to "{WORKER}"'
    assert f'grant execute on function "dataflow".judge to "{WORKER}"' in told
    assert f'grant usage on sequence "dataflow".generation to "{WORKER}"' in told
    assert status(store, "b", "1", "job") == "READY"
    worker.close()


def test_init_without_the_rights_says_who_may(store: Store) -> None:
    sql(store, f"create role {READER} login")
    sql(store, f"grant usage on schema dataflow to {READER}")
    sql(store, f"grant select on all tables in schema dataflow to {READER}")
    reader = as_user(store, READER)
    with pytest.raises(NoDatabase, match=r"owner.*odf init --plan.*roles\.sql"):
        reader.init()
    new = open_store(reader.db.url, schema="new")  # type: ignore[attr-defined]
    with pytest.raises(NoDatabase, match=r"permission denied for database.*roles\.sql"):
        new.init()
    for each in (reader, new):
        each.close()
