"""Which execution a change of a chunk belongs to, in the change log."""

import pytest

from opendataflow_dagster.model import ITEM_WORKER, WORK_OWNER, new_owner
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.history import events_after
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import register, sql


def executions(store: Store, jobid: str) -> list[str | None]:
    """Return the executions of the changes of a job's outputs, in order."""
    events = [each for each in events_after(store, None)[0] if each.locktype == "OUT"]
    return [event.execution for event in events if event.jobid == jobid]


def test_workers_of_a_process_are_one_execution(store: Store) -> None:
    register(store, "copy", ["orders"], ["copies"])
    operations.ready(store, "orders", ["1", "2", "3", "4"])
    one, other, run, item = (
        store.claim("copy", owner=new_owner() + more)[0]
        for more in ("", "", " of run 7", ITEM_WORKER)
    )
    assert one.owner != other.owner
    store.finish(one)
    store.fail(other, "no")
    store.finish(run)
    store.fail(item, "no")
    process = one.owner.rpartition(".")[0]
    begun, ended = executions(store, "copy")[:4], executions(store, "copy")[4:]
    assert begun[:3] == [process, process, "dagster:7"]
    assert (begun[3] or "").startswith("items:")
    assert ended == begun


def test_a_running_chunk_belongs_to_its_execution_no_matter_who_settles_it(store: Store) -> None:
    register(store, "copy", ["orders"], ["copies"])
    operations.ready(store, "orders", ["1", "2"])
    [claim] = store.claim("copy", owner=new_owner(), only="1", lease=-1)
    store.claim("copy", owner=new_owner(), only="2")
    assert store.recover("copy")
    sql(store, "update datastatus set status = 'HOLD' where dataid = '2' and jobid = 'copy'")
    assert set(executions(store, "copy")) == {claim.owner.rpartition(".")[0]}


def test_by_hand_a_transaction_is_an_execution(store: Store) -> None:
    operations.ready(store, "orders", ["1", "2"])
    row = "insert into datastatus (datasetid, jobid, dataid, locktype, status) values "
    sql(
        store,
        f"{row} ('made', 'java', '1', 'OUT', 'RUNNING'), ('made', 'java', '2', 'OUT', 'READY')",
    )
    sql(store, "update datastatus set status = 'READY' where jobid = 'java' and dataid = '1'")
    assert len(set(executions(store, "external"))) == 1
    by_hand = executions(store, "java")
    assert by_hand == [by_hand[0]] * 3, "the end belongs to what was RUNNING"
    assert by_hand[0] not in (None, *executions(store, "external"))


def test_processes_started_by_odf_work_claim_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not new_owner().endswith(WORK_OWNER)
    monkeypatch.setenv("DATAFLOW_WORK", "1")
    assert new_owner().endswith(WORK_OWNER)


def test_chunks_resubmitted_by_a_dagster_run_belong_to_the_run(store: Store) -> None:
    register(store, "copy", ["orders"], ["copies"])
    operations.ready(store, "orders", ["1"])
    [claim] = store.claim("copy", owner=new_owner())
    store.finish(claim)
    operations.resubmit(store, "copy", ["1"], who="dagster run 7")
    assert executions(store, "copy")[-1] == "dagster:7"


@pytest.mark.parametrize(
    ("name", "index", "details"),
    [
        ("latest", "dataevent_by_chunk", {"datasetid": "orders", "chunks": '[{"dataid": "1"}]'}),
        ("changes", "dataevent_by_execution", {"execution": "x", "jobid": "copy", "most": 9}),
    ],
)
def test_an_executions_changes_are_found_without_reading_the_whole_log(
    store: Store, name: str, index: str, details: dict
) -> None:
    operations.ready(store, "orders", [str(number) for number in range(300)])
    explain = "explain" if store.db.dialect == "postgres" else "explain query plan"
    rows, _ = store.db.execute(f"{explain} {store.db.statement(f'executions.{name}')}", details)
    plan = str(rows)
    assert index in plan
    assert "dataevent_in_order" not in plan
