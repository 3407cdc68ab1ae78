"""Registration: datasets, jobs, dials; what is refused, and what is kept unchanged."""

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from opendataflow_dagster.config.credentials import decrypt, for_dataset
from opendataflow_dagster.errors import CredentialError, Refused, WrongUse
from opendataflow_dagster.model import DATASET_COLUMNS, DIALS, MAX_ID_BYTES
from opendataflow_dagster.store import registry
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, expire, pending, put, register, sql, take

ROOT = Path(__file__).parents[2]

ODD = [
    "a,b",
    "it's",
    'quo"te',
    "../up",
    "$(x)",
    "`x`",
    "; drop table job; --",
    "emoji😀",
    "e\u0301",
    "\u00e9",
    "Bob",
    "bob",
    " space ",
    "%s",
    "{0}",
    ":name",
    "x" * MAX_ID_BYTES,
    "back\\slash",
    "*",
    "?",
]
"""Ids that are kept exactly: NFC is not NFD, Bob is not bob."""

REFUSED = ["", "x" * 10_000, "a\0b", "\udcff", "é" * (MAX_ID_BYTES // 2 + 1)]
CONTROL = ["line\nfeed", "tab\t", "a=b", "\x7f"]


def test_the_lists_of_columns_are_those_of_the_tables(store: Store) -> None:
    """And in the same order: SQLite's history compares texts that contain them in order."""
    wanted = {"dataset": ["datasetid", *DATASET_COLUMNS], "jobpolicy": ["jobid", *DIALS]}
    page = (ROOT / "docs" / "tables.md").read_text()
    for table, names in wanted.items():
        _, cursor = store.db.execute(f"select * from {table} limit 0", None)
        assert [column[0] for column in cursor.description if column[0] != "modified"] == names
        row = page.partition(f"| `{table}` |")[2].partition("\n")[0]
        assert set(names) <= set(re.findall(r"\w+", row)), f"docs/tables.md lacks one of {table}"


def test_a_column_of_a_dataset_is_registered_listed_and_remembered(store: Store) -> None:
    encrypted = "ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj"
    special = {"encryptedpass": encrypted, "writemode": "append", "options": '{"delimiter": ";"}'}
    values = {name: special.get(name, f"the {name}") for name in DATASET_COLUMNS}
    registry.add_dataset(store, "bob", **values)

    [row] = registry.datasets(store)
    assert row == {"datasetid": "bob"} | values | {"encryptedpass": encrypted[:10] + "..."}
    [(content,)] = sql(store, "select content from registration where n > 0")
    assert set(json.loads(content)) == set(DATASET_COLUMNS)
    registry.add_dataset(store, "bob", **dict.fromkeys(DATASET_COLUMNS, ""))
    assert registry.datasets(store) == [{"datasetid": "bob"} | dict.fromkeys(DATASET_COLUMNS)]


def test_a_dataset_is_registered_then_changed(store: Store) -> None:
    assert registry.add_dataset(store, "bob", hostname="db1", tablename="bob", schemaname="public")
    assert not registry.add_dataset(store, "bob", hostname="db2", schemaname="")

    [row] = registry.datasets(store)
    assert list(row) == [
        "datasetid",
        "hostname",
        "database",
        "schemaname",
        "tablename",
        "username",
        "encryptedpass",
        "format",
        "chunkcolumn",
        "domain",
        "writemode",
        "options",
    ]
    assert (row["hostname"], row["tablename"], row["schemaname"]) == ("db2", "bob", None)


def test_how_a_pipeline_writes_is_one_of_two_words(store: Store) -> None:
    registry.add_dataset(store, "bob", writemode="replace")
    registry.add_dataset(store, "bob", hostname="db1")
    with pytest.raises(WrongUse, match="append or replace"):
        registry.add_dataset(store, "bob", writemode="overwrite")
    assert [row["writemode"] for row in registry.datasets(store)] == ["replace"]
    registry.add_dataset(store, "bob", writemode="")
    assert [row["writemode"] for row in registry.datasets(store)] == [None]


def test_duplicate_rows_of_older_versions_are_kept_and_changed_together(store: Store) -> None:
    for host in ("one", "two"):
        sql(store, "insert into dataset (datasetid, hostname) values ('bob', :host)", host=host)

    assert not registry.add_dataset(store, "bob", tablename="t")
    assert [(row["hostname"], row["tablename"]) for row in registry.datasets(store)] == [
        ("one", "t"),
        ("two", "t"),
    ]


def test_a_password_is_encrypted_for_its_dataset_and_never_shown(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSKEY", "plugh")
    registry.add_dataset(store, "bob", password="hunter2 secret")

    [(value,)] = sql(store, "select encryptedpass from dataset")
    assert decrypt(value, "plugh", purpose=for_dataset("bob")) == "hunter2 secret"
    assert registry.datasets(store)[0]["encryptedpass"] == value[:10] + "..."


@pytest.mark.parametrize(
    "place",
    [
        {"hostname": "jdbc:mysql://h/d?password=hunter2"},
        {"hostname": "jdbc:sqlserver://h;user=u;password=hunter2"},
        {"hostname": "jdbc:mysql://address=(host=h)(user=u)(password=hunter2)/d"},
        {"hostname": "jdbc:mysql://(host=h,user=u,Password = hunter2)/d"},
        {"hostname": "postgresql://u:hunter2@h"},
        {"database": "postgresql://u:hunter2@h/d"},
        {"hostname": "s3a://key:hunter2@bucket"},
    ],
)
def test_a_password_in_a_url_is_refused(store: Store, place: dict[str, str]) -> None:
    with pytest.raises(WrongUse, match="use --password") as caught:
        registry.add_dataset(store, "bob", **place)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert registry.datasets(store) == []


def test_without_a_passkey_no_password_is_stored(store: Store) -> None:
    with pytest.raises(CredentialError, match="PASSKEY"):
        registry.add_dataset(store, "bob", password="hunter2")
    assert registry.datasets(store) == []


def test_an_unencrypted_password_is_refused_and_not_shown(store: Store) -> None:
    with pytest.raises(WrongUse, match="odf encrypt --dataset bob") as caught:
        registry.add_dataset(store, "bob", encryptedpass="hunter2")
    assert "hunter2" not in str(caught.value)

    sql(store, "insert into dataset (datasetid, encryptedpass) values ('old', 'hunter2')")
    assert registry.datasets(store)[0]["encryptedpass"] == "..."

    legacy = "ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj"
    registry.add_dataset(store, "older", encryptedpass=legacy)
    assert registry.datasets(store)[1]["encryptedpass"] == "ZpLfE+uTYE..."


@pytest.mark.parametrize("name", ["today", *REFUSED, *CONTROL])
def test_an_id_that_cannot_be_kept_is_refused_in_one_line(store: Store, name: str) -> None:
    one_line(lambda: registry.add_dataset(store, name))
    one_line(lambda: registry.add_job(store, name if name != "today" else "", ["a"], ["b"]))
    one_line(lambda: registry.add_job(store, "j", ["a"], [name]))
    if name != "today":
        one_line(lambda: registry.add_job(store, "j", [name], ["b"]))
    assert sql(store, "select * from job") == sql(store, "select * from dataset") == []


def one_line(act: Callable[[], object]) -> None:
    with pytest.raises(WrongUse) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    str(caught.value).encode()


def test_odd_ids_are_kept_exactly(store: Store) -> None:
    for name in ODD:
        assert registry.add_dataset(store, name, hostname=name)
        registry.add_job(
            store, name, [name], [name + "out" if len(name) < 400 else "out"], {"V": name}
        )

    assert sorted(row["datasetid"] for row in registry.datasets(store)) == sorted(ODD)
    assert {row["hostname"] for row in registry.datasets(store)} == set(ODD)
    for name in ODD:
        assert [
            row["itemvalue"] for row in registry.jobs(store, name) if row["itemtype"] == "V"
        ] == [name]
        assert store.read_plan(name).inputs == (name,)


def test_a_job_is_all_of_its_rows(store: Store) -> None:
    put(store, "a", "1")
    put(store, "b", "1")
    added = registry.add_job(store, "join", ["a", "b"], ["c"], {"MODE": "fast"})

    assert added.rows == 4
    assert [
        (row["itemtype"], row["datasetid"], row["itemvalue"]) for row in registry.jobs(store)
    ] == [
        ("IN", "a", None),
        ("IN", "b", None),
        ("MODE", None, "fast"),
        ("OUT", "c", None),
    ]
    assert list(registry.jobs(store)[0]) == [
        "jobid",
        "itemtype",
        "datasetid",
        "itemvalue",
        "modified",
    ]
    assert all(row["modified"] for row in registry.jobs(store))
    assert pending(store) == {("join", "1"): 1}
    check(store)


def test_unregistered_datasets_are_tracked_and_reported(store: Store) -> None:
    registry.add_dataset(store, "a")
    notes = registry.add_job(store, "j", ["a", "today"], ["c"]).notes

    [note] = notes
    assert "'c'" in note
    assert "odf dataset add c" in note
    assert store.read_plan("j").outputs == ("c",)


def test_dont_copy_9_a_job_without_output_is_refused(store: Store) -> None:
    with pytest.raises(WrongUse, match="--out"):
        registry.add_job(store, "j", ["a"])
    assert registry.jobs(store) == []


def test_dont_copy_10_a_dataset_that_is_both_input_and_output_is_refused(store: Store) -> None:
    with pytest.raises(WrongUse, match="would read and write 'a'"):
        registry.add_job(store, "j", ["a"], ["a", "b"])
    registry.add_job(store, "j", ["a"], ["b"])
    with pytest.raises(WrongUse, match="would read and write 'b'"):
        registry.add_job(store, "j", ["b"])
    assert len(registry.jobs(store)) == 2


@pytest.mark.parametrize(
    "name", ["PATH", "LD_PRELOAD", "BASH_ENV", "PYTHONPATH", "IFS", "dataid", "", "in", "OUT"]
)
def test_a_variable_that_would_hijack_a_process_is_refused(store: Store, name: str) -> None:
    one_line(lambda: registry.add_job(store, "j", [], ["b"], {name: "1"}))
    assert registry.jobs(store) == []


def test_a_value_that_no_variable_can_have_is_refused(store: Store) -> None:
    for value in ("a\0b", "\udcff"):
        one_line(lambda value=value: registry.add_job(store, "j", [], ["b"], {"V": value}))
        one_line(lambda value=value: registry.add_dataset(store, "d", hostname=value))


@pytest.mark.parametrize("name", ["split", "external"])
def test_the_job_ids_of_chunks_without_a_job_are_reserved(store: Store, name: str) -> None:
    one_line(lambda: registry.add_job(store, name, [], ["b"]))


def test_adding_to_a_job_adds_what_is_not_there(store: Store) -> None:
    registry.add_job(store, "j", ["a"], ["c"], {"V": "1"})
    assert registry.add_job(store, "j", ["a", "b"], ["c"], {"V": "2", "W": "3"}).rows == 2

    assert store.read_plan("j").inputs == ("a", "b")
    assert dict(store.read_plan("j").environment) == {"V": "2", "W": "3"}
    assert registry.add_job(store, "j", ["a"]).rows == 0


def test_duplicate_rows_of_a_job_are_kept(store: Store) -> None:
    register(store, "old", ["a", "a"], ["c", "c"], V="1")
    register(store, "old", V="2")

    assert registry.add_job(store, "old", ["a", "b"]).rows == 1
    assert len(registry.jobs(store, "old")) == 7
    assert store.read_plan("old").inputs == ("a", "b")
    put(store, "a", "1")
    put(store, "b", "1")
    assert [claim.dataid for claim in take(store, "old")] == ["1"]
    check(store)


def test_a_job_of_the_original_without_output_can_be_repaired(store: Store) -> None:
    register(store, "old", ["a"])
    with pytest.raises(WrongUse, match="--out"):
        registry.add_job(store, "old", ["b"])
    registry.add_job(store, "old", [], ["c"])
    assert store.read_plan("old").flaw == ""


def test_replacing_leaves_only_the_named_datasets_and_judges_again(store: Store) -> None:
    put(store, "a", "1")
    put(store, "b", "2")
    register(store, "j", ["a", "a"], ["c"], V="1")
    assert pending(store) == {("j", "1"): 1}

    registry.add_job(store, "j", ["b"], ["d"], replace=True)
    assert [(row["itemtype"], row["datasetid"]) for row in registry.jobs(store)] == [
        ("IN", "b"),
        ("OUT", "d"),
    ]
    assert pending(store) == {("j", "2"): 1}
    check(store)


def test_a_refused_replacement_changes_nothing(store: Store) -> None:
    registry.add_job(store, "j", ["a"], ["c"])
    with pytest.raises(WrongUse, match="--out"):
        registry.add_job(store, "j", ["b"], replace=True)
    assert store.read_plan("j").inputs == ("a",)


def test_datasets_are_not_taken_from_a_job_that_runs(store: Store) -> None:
    put(store, "a", "1")
    registry.add_job(store, "j", ["a"], ["c", "d"])
    [claim] = take(store, "j", owner="alice")

    with pytest.raises(Refused, match="alice") as caught:
        registry.add_job(store, "j", ["a"], ["c"], replace=True)
    assert caught.value.code == "LOCKED"
    registry.add_job(store, "j", ["a"], ["c", "d"], {"V": "1"}, replace=True)
    store.finish(claim)
    registry.add_job(store, "j", ["a"], ["c"], replace=True)
    check(store)


def test_two_registrations_at_once_leave_one_row_each(store: Store) -> None:
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        registry.add_dataset(store, "bob", hostname="h")
        registry.add_job(store, "j", ["a"], ["b"])
        store.db.drop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.datasets(store)) == 1
    assert len(registry.jobs(store)) == 2


def test_dials_are_set_and_reset(store: Store) -> None:
    registry.add_job(store, "j", ["a"], ["b"])
    assert registry.policy(store, "j") == {"jobid": "j"} | dict.fromkeys(registry.DIALS)

    row = registry.set_policy(
        store,
        "j",
        {
            "concurrency": "0",
            "max_attempts": "3",
            "retry_delay": "5m",
            "max_losses": "9",
            "lease_seconds": "90",
            "batch_size": "10",
            "time_limit": "1h",
            "every_minutes": "15",
            "fold_after": "1h",
            "on_stale": "Skip",
        },
    )
    assert row == {
        "jobid": "j",
        "concurrency": 0,
        "max_attempts": 3,
        "max_losses": 9,
        "retry_delay": 300,
        "lease_seconds": 90,
        "batch_size": 10,
        "time_limit": 3600,
        "paused_until": None,
        "every_minutes": 15,
        "fold_after": 3600,
        "on_stale": "skip",
    }
    row = registry.set_policy(store, "j", {"concurrency": "none", "max_attempts": ""})
    assert (row["concurrency"], row["max_attempts"], row["batch_size"]) == (None, None, 10)


def test_a_pause_takes_effect_and_ends(store: Store) -> None:
    put(store, "a", "1")
    registry.add_job(store, "j", ["a"], ["b"])
    for when in ("forever", "+2h", "+30m", "2999-01-01", "2999-01-01T00:00+02:00"):
        assert registry.set_policy(store, "j", {"paused_until": when})["paused_until"]
        assert take(store, "j") == [], when
    assert registry.set_policy(store, "j", {"paused_until": "forever"})["paused_until"] == "forever"
    assert registry.set_policy(store, "j", {"paused_until": "2999-01-01T00:00Z"})[
        "paused_until"
    ] == ("2999-01-01T00:00:00Z")
    assert registry.set_policy(store, "j", {"paused_until": "no"})["paused_until"] is None
    assert len(take(store, "j")) == 1


def test_a_time_without_offset_is_in_the_configured_zone(store: Store) -> None:
    store.timezone = "Asia/Tokyo"
    registry.add_job(store, "j", [], ["b"])
    row = registry.set_policy(store, "j", {"paused_until": "2999-01-01T09:00"})
    assert row["paused_until"] == "2999-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("concurrency", "-1"),
        ("concurrency", "two"),
        ("max_attempts", "0"),
        ("batch_size", "99999999999"),
        ("lease_seconds", "0"),
        ("retry_delay", "soon"),
        ("paused_until", "tomorrow"),
        ("paused_until", "+x"),
        ("paused_until", "9999-12-31T23:59-12:00x"),
        ("concurency", "1"),
    ],
)
def test_an_invalid_value_of_a_dial_is_refused(store: Store, key: str, value: str) -> None:
    registry.add_job(store, "j", [], ["b"])
    with pytest.raises(WrongUse, match=r"concurrency|at least|Write it like"):
        registry.set_policy(store, "j", {key: value, "max_attempts": value})
    assert sql(store, "select * from jobpolicy") == []


def test_a_pause_may_last_until_the_end_of_time(store: Store) -> None:
    registry.add_job(store, "j", [], ["b"])
    assert (
        registry.set_policy(store, "j", {"paused_until": "9999-12-31T23:59-12:00"})["paused_until"]
        == "forever"
    )


def test_a_job_that_is_not_registered_has_no_dials(store: Store) -> None:
    for act in (
        lambda: registry.policy(store, "j"),
        lambda: registry.set_policy(store, "j", {"concurrency": "1"}),
    ):
        with pytest.raises(Refused, match="odf job add j") as caught:
            act()
        assert caught.value.code == "NOT_REGISTERED"


def test_a_dial_works_on_the_next_claim(store: Store) -> None:
    for dataid in "123":
        put(store, "a", dataid)
    registry.add_job(store, "j", ["a"], ["b"])
    registry.set_policy(store, "j", {"concurrency": "1"})
    assert len(store.claim("j", owner="w", k=3)) == 1
    expire(store)
    registry.set_policy(store, "j", {"concurrency": "none"})
    assert len(store.claim("j", owner="w2", k=3)) == 2
    assert os.environ.get("PASSKEY") is None
