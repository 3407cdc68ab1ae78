"""Run history: what is kept of each step, what is listed, and what a cleaning leaves."""

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.model import Claim
from opendataflow_dagster.store import history as stepping
from opendataflow_dagster.store.history import MAX_OUTPUT_BYTES, Cleaned, Step, clean, record, steps
from opendataflow_dagster.store.items import Accepted, Post, accept, payloads
from opendataflow_dagster.store.operations import delete_run, hold, resubmit
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, everything, expire, register, sql, take

Odf = Callable[..., Result]

KEPT = ("datastatus", "claim", "chunkfact", "pending", "dataevent", "job", "jobpolicy")


@pytest.fixture(autouse=True)
def pipeline(store: Store) -> None:
    register(store, "orders", [], ["sold"])
    register(store, "daily", [], ["report"])


@pytest.fixture
def odf(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> Odf:
    monkeypatch.setenv("DATAFLOW_URL", url)

    def run(*words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(words), prog_name="odf")
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def item(store: Store, key: str | None = None, jobid: str = "orders") -> str:
    [answer] = accept(store, [Post(jobid, ("1",), key)])
    assert isinstance(answer, Accepted)
    return answer.dataids[0]


def step(claim: Claim, number: int = 1, status: str = "READY", **told: object) -> Step:
    return Step(claim.jobid, claim.dataid, claim.generation, number, f"t{number}", status)._replace(
        **told  # type: ignore[arg-type]
    )


def test_a_step_is_recorded_as_it_begins_and_as_it_ends(store: Store) -> None:
    item(store)
    [claim] = take(store, "orders")
    now = store.now()
    record(store, [step(claim, status="RUNNING", started=now)])
    [began] = steps(store, "orders")
    assert (began["status"], began["ended"], began["rows"]) == ("RUNNING", None, None)
    record(
        store,
        [
            step(
                claim,
                status="FAILED",
                ended=now + 1.5,
                rows=7,
                stdout="hi\n",
                traceback="Traceback",
                reason="t1: no\nmore",
            )
        ],
    )

    [row] = steps(store, "orders", claim.dataid)
    assert row["started"].timestamp() == pytest.approx(now, abs=0.002)
    assert (row["ended"] - row["started"]).total_seconds() == pytest.approx(1.5, abs=0.002)
    assert (row["status"], row["rows"], row["stdout"]) == ("FAILED", 7, "hi\n")
    assert (row["traceback"], "\n" in row["reason"]) == ("Traceback", False)
    assert list(row) == list(Step._fields)
    check(store)


def test_both_ends_of_a_step_in_one_call(store: Store) -> None:
    item(store)
    [claim] = take(store, "orders")
    record(store, [step(claim, status="RUNNING", started=5.0), step(claim, ended=6.0)])
    [row] = steps(store, "orders")
    assert (row["status"], row["started"].timestamp(), row["ended"].timestamp()) == ("READY", 5, 6)
    record(store, [])


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ("a\0b", "a\N{REPLACEMENT CHARACTER}b"),
        ("\ud800", "?"),
        ("", ""),
        (None, None),
        ("日本 'quoted' \\ \x1b[31m\n", "日本 'quoted' \\ \x1b[31m\n"),
    ],
)
def test_printed_text_is_stored_as_far_as_databases_allow(
    store: Store, printed: str | None, kept: str | None
) -> None:
    record(store, [Step("orders", "1", 1, 1, "t", "READY", stdout=printed)])
    assert steps(store, "orders")[0]["stdout"] == kept


def test_a_long_output_is_cut_in_the_middle(store: Store) -> None:
    long = "begin" + "é" * MAX_OUTPUT_BYTES + "end"
    record(store, [Step("orders", "1", 1, 1, "t", "READY", stdout=long, traceback=long)])
    [row] = steps(store, "orders")
    for text in (row["stdout"], row["traceback"]):
        assert len(text.encode()) <= MAX_OUTPUT_BYTES
        assert text.startswith("beginé")
        assert text.endswith("éend")
        assert f"{MAX_OUTPUT_BYTES + 8} bytes left out" in text


def test_the_newest_runs_come_first_with_all_their_steps(store: Store) -> None:
    for generation, dataid in ((3, "b"), (12, "a"), (7, "a")):
        record(store, [Step("orders", dataid, generation, n, f"t{n}", "READY") for n in (2, 1, 3)])
    record(store, [Step("daily", "z", 99, 1, "t", "READY")])

    assert [(row["generation"], row["step"]) for row in steps(store, "orders", limit=2)] == [
        (12, 1),
        (12, 2),
        (12, 3),
        (7, 1),
        (7, 2),
        (7, 3),
    ]
    assert {row["generation"] for row in steps(store, "orders", "b")} == {3}
    assert {row["generation"] for row in steps(store, "orders", "a", 1)} == {12}
    assert steps(store, "nobody") == []
    with pytest.raises(WrongUse):
        steps(store, "orders", limit=0)


def test_a_run_that_failed_outside_its_steps_says_why(store: Store, odf: Odf) -> None:
    published, early, lost, good = (item(store) for _ in range(4))
    claims = {claim.dataid: claim for claim in take(store, "orders", k=4)}
    now = store.now()
    record(
        store,
        [
            step(claims[published], started=now, ended=now),
            step(claims[lost], started=now, ended=now),
            step(claims[lost], 2, "RUNNING", started=now),
            step(claims[good], started=now, ended=now),
        ],
    )
    store.fail(claims[published], "output isn't a folder")
    store.fail(claims[early], "no such source")
    store.finish(claims[good])
    expire(store, claims[lost])
    store.recover()

    def listed(dataid: str | None = None) -> list[tuple]:
        found = steps(store, "orders", dataid)
        assert all(list(row) == list(Step._fields) for row in found)
        return [(row["dataid"], row["step"], row["status"], row["reason"]) for row in found]

    gone = "worker didn't come back: claim 1 of 5 lost"
    assert listed() == [
        (good, 1, "READY", None),
        (lost, 1, "READY", None),
        (lost, 2, "FAILED", gone),
        (early, 1, "FAILED", "no such source"),
        (published, 1, "READY", None),
        (published, 2, "FAILED", "output isn't a folder"),
    ]
    assert listed(early) == [(early, 1, "FAILED", "no such source")]
    assert listed(published)[-1][-1] == "output isn't a folder"
    assert [row["dataid"] for row in steps(store, "orders", limit=3)] == [good, lost, lost, early]
    shown = odf("history", "--pipeline", "orders", published).stdout.splitlines()
    assert "(the run)" in shown[2]
    assert shown[2].endswith("output isn't a folder")
    [row] = json.loads(odf("history", "--pipeline", "orders", early, "--json").stdout)
    assert (row["transformation"], row["status"], row["stdout"]) == (None, "FAILED", None)

    # What a later run made READY has nothing to tell that no step tells.
    resubmit(store, "orders", [published, early])
    for claim in take(store, "orders", k=2):
        store.finish(claim)
    assert listed(early) == []
    assert len(listed(published)) == 2
    check(store)


def test_a_cleaning_leaves_whatever_could_run_and_every_status(store: Store) -> None:
    ready, failed, held, back, gone = (item(store, key) for key in ("a", "b", "c", "d", None))
    claims = {claim.dataid: claim for claim in take(store, "orders", k=5)}
    record(store, [step(claim, number) for claim in claims.values() for number in (1, 2)])
    for dataid in (ready, back, gone):
        store.finish(claims[dataid])
    store.fail(claims[failed], "no")
    store.fail(claims[held], "no")
    hold(store, "orders", [held])
    resubmit(store, "orders", [back])
    delete_run(store, "orders", gone)
    waiting, running = item(store), item(store)
    [claim] = store.claim("orders", owner="me", only=running)
    record(store, [step(claim, status="RUNNING")])
    sql(store, "update streamkey set received = '2020-01-01 00:00:00'")

    before = everything(store)
    assert clean(store, plan=True) == Cleaned(10, 2, 1)
    assert everything(store) == before
    assert clean(store) == Cleaned(10, 2, 1)
    after = everything(store)
    assert {table: after[table] for table in KEPT} == {table: before[table] for table in KEPT}
    assert set(payloads(store, "orders", [ready, failed, held, back, gone, waiting, running])) == {
        failed,
        held,
        back,
        waiting,
        running,
    }
    assert [row["dataid"] for row in steps(store, "orders") if row["transformation"]] == [running]
    assert clean(store) == Cleaned(0, 0, 0)
    check(store)


def test_a_cleaning_of_one_pipeline_and_of_what_is_old(store: Store) -> None:
    now = store.now()
    for jobid in ("orders", "daily"):
        for days in (0, 3, 40):
            dataid = item(store, f"{days}", jobid)
            [claim] = take(store, jobid)
            at = now - days * 86400
            record(
                store,
                [
                    step(claim, 1, started=at - 5 * 86400, ended=at - 5 * 86400),
                    step(claim, 2, started=at, ended=at),
                ],
            )
            store.finish(claim)
            for table, key in (("streamitem", "dataid"), ("streamkey", "idempotency")):
                sql(
                    store,
                    f"update {table} set received = :at where jobid = :j and {key} = :k",
                    at=stepping.to_table(store, stepping.datetime.fromtimestamp(at, stepping.UTC)),
                    j=jobid,
                    k=dataid if key == "dataid" else f"{days}",
                )

    assert clean(store, "orders", days_old=30, plan=True) == Cleaned(2, 1, 1)
    assert clean(store, "orders", days_old=30) == Cleaned(2, 1, 1)
    assert clean(store, "orders", days_old=2) == Cleaned(2, 1, 1), "a run goes whole"
    assert clean(store, "orders", plan=True) == Cleaned(2, 1, 0), "a key of today is remembered"
    assert clean(store, "orders") == Cleaned(2, 1, 0)
    assert clean(store, "nobody") == Cleaned(0, 0, 0)
    assert clean(store, plan=True) == Cleaned(6, 3, 2)
    assert clean(store) == Cleaned(6, 3, 2)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(WrongUse):
            clean(store, days_old=wrong)


def test_a_key_is_answered_as_before_though_its_item_was_cleaned(store: Store) -> None:
    dataid = item(store, "k")
    store.finish(take(store, "orders"))
    assert clean(store) == Cleaned(0, 1, 0)
    [again] = accept(store, [Post("orders", ("1",), "k")])
    assert isinstance(again, Accepted)
    assert (again.dataids, again.again) == ((dataid,), True)


def test_many_are_cleaned_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "CLEANED_PAGE_ROWS", 7)
    for jobid in ("daily", "orders"):
        accept(store, [Post(jobid, ("1",), f"{n}") for n in range(30)])
        claims = take(store, jobid, k=99)
        store.finish(claims)
        record(store, [step(claim, number) for claim in claims for number in (1, 2, 3)])
    sql(store, "update streamkey set received = '2020-01-01 00:00:00'")
    assert clean(store, "daily") == Cleaned(90, 30, 30)
    assert clean(store) == Cleaned(90, 30, 30)
    assert steps(store, "orders") == []


def test_the_command_lists_steps_and_shows_one_run_in_full(store: Store, odf: Odf) -> None:
    item(store)
    [claim] = take(store, "orders")
    record(
        store,
        [
            step(claim, 1, started=10.0, ended=10.25, rows=3, stdout="three rows\n\x1b[2J"),
            step(
                claim,
                2,
                "FAILED",
                started=11.0,
                ended=12.0,
                reason="t2: KeyError: 'sku'",
                traceback="Traceback …\nKeyError: 'sku'\n",
            ),
        ],
    )
    listed = odf("history", "--pipeline", "orders").stdout
    assert "t2: KeyError: 'sku'" in listed
    assert "FAILED" in listed
    assert "three rows" not in listed

    shown = odf("history", "--pipeline", "orders", claim.dataid).stdout
    assert f"--- t1, generation {claim.generation}: stdout\nthree rows\n\\x1b[2J\n" in shown
    assert "2: traceback\nTraceback …\nKeyError: 'sku'\n" in shown

    rows = json.loads(odf("history", "--pipeline", "orders", "--json").stdout)
    assert [(row["transformation"], row["seconds"], row["rows"]) for row in rows] == [
        ("t1", 0.25, 3),
        ("t2", 1.0, None),
    ]
    assert "stdout" not in rows[0]
    [first, second] = json.loads(
        odf("history", "--pipeline", "orders", claim.dataid, "--json").stdout
    )
    assert (first["stdout"], second["traceback"]) == (
        "three rows\n\x1b[2J",
        "Traceback …\nKeyError: 'sku'\n",
    )

    nothing = odf("history", "--pipeline", "daily")
    assert (nothing.stdout, nothing.stderr) == (
        "",
        "No run of it is recorded. See `odf pipeline list`.\n",
    )
    assert "There is no pipeline 'nobody'" in odf("history", "--pipeline", "nobody", code=4).stderr
    odf("history", "--pipeline", "orders", "--follow", code=2)


def test_the_command_counts_first_and_cleans_then(store: Store, odf: Odf) -> None:
    item(store)
    [claim] = take(store, "orders")
    record(store, [step(claim, started=store.now())])
    store.finish(claim)

    assert (
        odf("history", "clean", "--plan").stderr
        == "1 step, 1 payload and 0 keys would be removed.\n"
    )
    assert odf("history", "clean", "--days-old", "1").stderr.startswith("0 steps, 0 payloads")
    [row] = json.loads(odf("history", "clean", "--pipeline", "orders", "--json").stdout)
    assert row == {"pipeline": "orders", "steps": 1, "items": 1, "keys": 0}
    odf("history", "clean", "something", code=2)
    odf("history", "clean", "--days-old", "-1", code=2)
    check(store)


def test_a_cleaning_knows_pipelines_that_are_or_were(store: Store, odf: Odf) -> None:
    assert "no pipeline 'typo'" in odf("history", "clean", "--pipeline", "typo", code=4).stderr
    assert "0 steps" in odf("history", "clean", "--pipeline", "daily").stderr
    item(store)
    [claim] = take(store, "orders")
    record(store, [step(claim, started=store.now())])
    store.finish(claim)
    sql(store, "delete from job where jobid = 'orders'")
    store._plans.clear()

    clean_old = ("history", "clean", "--pipeline", "orders", "--days-old", "1")
    assert "0 steps" in odf(*clean_old).stderr
    assert "1 step, 1 payload" in odf("history", "clean", "--pipeline", "orders").stderr
    assert "0 steps" in odf("history", "clean", "--pipeline", "orders").stderr
