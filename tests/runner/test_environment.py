"""The environment of a job's script: the original's contract, exactly, and none of its leaks."""

import pytest

from opendataflow_dagster.config.credentials import encrypt, for_dataset
from opendataflow_dagster.errors import CredentialError, Refused
from opendataflow_dagster.model import Claim
from opendataflow_dagster.runner.environment import JobEnvironment, job_environment
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import register, sql

CLAIM = Claim("loadbob", "1.0", 7, "worker", 1, 120.0, None)
CHUNK = {
    "dataid": "1.0",
    "jobid": "loadbob",
    "dataflow_jobid": "loadbob",
    "dataflow_generation": "7",
}


def dataset(store: Store, datasetid: str, **columns: str | None) -> None:
    names = ["datasetid", *columns]
    sql(
        store,
        f"insert into dataset ({', '.join(names)}) values (:{', :'.join(names)})",
        datasetid=datasetid,
        **columns,
    )


def read(store: Store, **environ: str) -> JobEnvironment:
    return job_environment(store, store.read_plan("loadbob"), environ)


def told(store: Store, **environ: str) -> dict[str, str]:
    return read(store, **environ).for_chunk(CLAIM)


def both(**variables: str) -> dict[str, str]:
    """Return the variables, and what scripts written against H2 call them."""
    named = dict(variables)
    for name, value in variables.items():
        datasetid, _, column = name.rpartition("_")
        named[f"{datasetid}_{column.upper()}"] = value
    return named


def test_each_column_is_a_variable_in_both_cases(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    dataset(store, "bobin", hostname="h", database="d", schemaname="s", tablename="t", username="u")
    dataset(store, "bobout", format="csv")

    assert told(store, HOME="/root") == {
        "HOME": "/root",
        **CHUNK,
        **both(
            bobin_datasetid="bobin", bobin_hostname="h", bobin_database="d", bobin_schemaname="s"
        ),
        **both(bobin_tablename="t", bobin_username="u", bobin_itemtype="IN"),
        **both(bobout_datasetid="bobout", bobout_format="csv", bobout_itemtype="OUT"),
    }


def test_custom_columns_and_duplicate_rows_become_variables(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    sql(store, "alter table dataset add column shards integer")
    dataset(store, "bobin", hostname="first")
    dataset(store, "bobin", hostname="second")
    sql(store, "update dataset set shards = 12")

    variables = told(store)

    assert variables["bobin_shards"] == variables["bobin_SHARDS"] == "12"
    assert variables["bobin_hostname"] == "first"


def test_nothing_of_the_callers_leaks_in(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    dataset(store, "bobin", tablename="t")
    stale = {
        "dataid": "999",
        "jobid": "other",
        "dataflow_generation": "3",
        "dataflow_note": "x",
        "bobin_hostname": "old",
        "bobin_HOSTNAME": "old",
        "bobin_password": "old",
        "bobin_PASSWORD": "old",
        "bobin_chunklower": "0",
        "bobout_datasetid": "bobout",
        "bobout_itemtype": "OUT",
    }

    assert told(store, mine="kept", **stale) == {
        "mine": "kept",
        **CHUNK,
        **both(bobin_datasetid="bobin", bobin_tablename="t", bobin_itemtype="IN"),
    }


def test_scripts_receive_no_secrets_of_odf(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    secrets = {"PASSKEY": "plugh", "PASSKEY_FILE": "/key", "DATAFLOW_ENCRYPTED": "abc"}
    url = "postgresql://u@h/d"

    assert told(store, DATAFLOW_URL="postgresql://u:secret@h/d", **secrets) == CHUNK
    assert told(store, DATAFLOW_URL="jdbc:postgresql://h/d?password=secret") == CHUNK
    assert told(store, DATAFLOW_URL=url) == {**CHUNK, "DATAFLOW_URL": url}


@pytest.mark.parametrize(
    "value", ["$(touch x)", "a'b\"c;d`e`", "two\nlines", " ", "", "pässwörd 🎈"]
)
def test_a_value_is_kept_exactly(store: Store, value: str) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"], MY_ITEM=value)
    dataset(
        store,
        "bobin",
        hostname=value,
        encryptedpass=encrypt(value, "key", purpose=for_dataset("bobin")),
    )

    variables = told(store, PASSKEY="key")

    assert (
        variables["bobin_hostname"] == variables["MY_ITEM"] == variables["bobin_password"] == value
    )


def test_passwords_of_the_original_are_decrypted(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    dataset(
        store,
        "bobin",
        encryptedpass="jClqNN2z5hhv5O8PFDnHeyCq1iOsnyojoZ4cYxqx9wQB0aIaeroPzG9/7ICvM+h8",
    )
    dataset(store, "bobout", encryptedpass=None)

    variables = told(store, PASSKEY="plugh", bobout_password="stale")

    assert variables["bobin_password"] == variables["bobin_PASSWORD"] == 'pässwörd "q" $HOME'
    assert variables["bobin_encryptedpass"].startswith("jClqNN2z")
    assert "bobout_password" not in variables


@pytest.mark.parametrize("environ", [{}, {"PASSKEY": "wrong"}])
def test_a_password_that_cannot_be_decrypted_is_refused(
    store: Store, environ: dict[str, str]
) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"])
    dataset(store, "bobin", encryptedpass=encrypt("secret", "key", purpose=for_dataset("bobin")))

    with pytest.raises(CredentialError, match="encryptedpass of dataset 'bobin'"):
        read(store, **environ)
    assert job_environment(store, store.read_plan("loadbob"), environ, secrets=False)


def test_odd_datasetids_keep_their_name_and_get_one_for_shells(store: Store) -> None:
    register(store, "loadbob", ["my-data.x", "1st"], ["bobout"])
    dataset(store, "my-data.x", hostname="h")
    dataset(store, "1st", hostname="one")

    variables = told(store, **{"my_data_x_tablename": "stale"})

    for name in (
        "my-data.x_hostname",
        "my-data.x_HOSTNAME",
        "my_data_x_hostname",
        "my_data_x_HOSTNAME",
    ):
        assert variables[name] == "h"
    assert variables["1st_hostname"] == variables["_1st_hostname"] == "one"
    assert "my_data_x_tablename" not in variables


def test_an_alias_never_stands_for_the_wrong_dataset(store: Store) -> None:
    register(store, "loadbob", ["a-b", "a_b", "c-d", "c.d"], ["bobout"])
    for datasetid in ("a-b", "a_b", "c-d", "c.d"):
        dataset(store, datasetid, hostname=f"of {datasetid}")
    sql(store, "update dataset set tablename = 't' where datasetid = 'a-b'")

    variables = told(store)

    assert variables["a_b_hostname"] == "of a_b"
    assert "a_b_tablename" not in variables  # it is a_b's, and NULL
    assert "c_d_hostname" not in variables
    assert variables["c.d_hostname"] == "of c.d"


def test_today_and_datasets_that_are_not_registered_have_no_variables(store: Store) -> None:
    register(store, "loadbob", ["today", "nowhere"], ["bobout"])
    dataset(store, "today", hostname="h")

    assert told(store) == CHUNK


def test_the_jobs_own_items_become_variables(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"], REGION="eu", dsn="host=x user=y")

    assert told(store, REGION="us") == {**CHUNK, "REGION": "eu", "dsn": "host=x user=y"}


@pytest.mark.parametrize(
    "name", ["PATH", "LD_PRELOAD", "BASH_ENV", "PYTHONPATH", "IFS", "dataid", "PASSKEY"]
)
def test_an_item_that_would_hijack_the_process_is_refused(store: Store, name: str) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"], **{name: "x"})

    with pytest.raises(Refused, match=name):
        read(store)


def test_a_column_that_would_hijack_the_process_is_refused(store: Store) -> None:
    register(store, "loadbob", ["LD"], ["bobout"])
    dataset(store, "LD", hostname="h")
    assert told(store)["LD_hostname"] == "h"

    sql(store, "alter table dataset add column preload varchar")

    with pytest.raises(Refused, match="preload"):
        read(store)


def test_the_bounds_of_a_split_chunk_become_variables(store: Store) -> None:
    register(store, "loadbob", ["big", "bobin"], ["bobout"])
    sql(
        store,
        "insert into chunkrange (datasetid, dataid, lower_bound, upper_bound) "
        "values ('big', '1.0', '100', '200'), ('big', '2.0', '200', null)",
    )
    environment = read(store, big_chunkupper="stale")

    first, second, third = (
        environment.for_chunk(CLAIM._replace(dataid=each)) for each in ("1.0", "2.0", "3.0")
    )

    assert {name: first[name] for name in first if name.startswith("big")} == both(
        big_chunklower="100", big_chunkupper="200"
    )
    assert {name: second[name] for name in second if name.startswith("big")} == both(
        big_chunklower="200"
    )
    assert third == {**CHUNK, "dataid": "3.0"}


def test_the_place_of_each_dataset_becomes_a_variable(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout", "file", "bare"])
    dataset(store, "bobin", hostname="h", database="d", schemaname="s", tablename="t")
    dataset(store, "bobout", database="d", schemaname="", tablename="t")
    dataset(store, "file", hostname="/data/x")
    dataset(store, "bare")

    assert read(store).locations == {"bobin": "h/d/s.t", "bobout": "d/t", "file": "/data/x"}


def test_a_nul_is_refused_with_the_row_that_has_it(sqlite_store: Store) -> None:
    register(sqlite_store, "loadbob", ["bobin"], ["bobout"])
    dataset(sqlite_store, "bobin", hostname="a\0b")
    with pytest.raises(Refused, match="hostname of dataset 'bobin' has a NUL"):
        read(sqlite_store)

    sql(sqlite_store, "delete from dataset")
    with pytest.raises(Refused, match="dataid of job 'loadbob' has a NUL"):
        read(sqlite_store).for_chunk(CLAIM._replace(dataid="1\0"))


def test_the_context_for_other_languages_is_the_originals_list(store: Store) -> None:
    register(store, "loadbob", ["bobin"], ["bobout"], REGION="eu")
    dataset(
        store,
        "bobin",
        hostname="h",
        encryptedpass=encrypt("secret", "key", purpose=for_dataset("bobin")),
    )
    environment = read(store, PASSKEY="key", HOME="/root")

    open_context = environment.context(CLAIM)

    assert open_context == [
        {"dataid": "1.0"},
        {"bobin_datasetid": "bobin"},
        {"bobin_hostname": "h"},
        {"bobin_itemtype": "IN"},
        {"REGION": "eu"},
        {"jobid": "loadbob"},
        {"dataflow_jobid": "loadbob"},
        {"dataflow_generation": "7"},
    ]
    assert {"bobin_password": "secret"} in environment.context(CLAIM, secrets=True)


@pytest.fixture
def sqlite_store(sqlite_url: str):
    from tests.support.store_fixtures import close, open_store

    made = open_store(sqlite_url)
    made.init()
    yield made
    close(made)
