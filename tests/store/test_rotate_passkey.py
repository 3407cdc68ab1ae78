"""A new passkey: everything or nothing, even after a kill."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.config import credentials
from opendataflow_dagster.config.credentials import (
    PROPERTIES,
    common_salt,
    decrypt,
    encrypt,
    for_dataset,
)
from opendataflow_dagster.config.settings import load_settings, parse_properties
from opendataflow_dagster.errors import CredentialError, DataflowError
from opendataflow_dagster.store import rotate_passkey
from opendataflow_dagster.store.store import Store

OLD, NEW = "plugh", "xyzzy-is-new"
LEGACY = "U3iP2Wxdjmo63GI4YtVBuJIGf0v5nj3r1KpKzsHsGc4gow=="  # `secret` by plugh, of the original


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "COST", (4, 8, 1))


def add(store: Store, datasetid: str, value: str | None) -> None:
    store.db.execute(
        store.db.translate("insert into dataset (datasetid, encryptedpass) values (:id, :value)"),
        {"id": datasetid, "value": value},
    )


def by(key: str, datasetid: str, text: str = "secret") -> str:
    return encrypt(text, key, purpose=for_dataset(datasetid))


def values(store: Store) -> list[tuple[str, str]]:
    return store.db.execute("select datasetid, encryptedpass from dataset order by 1, 2", {})[0]


def texts(store: Store, key: str) -> dict[str, str]:
    return {
        datasetid: decrypt(value, key, purpose=for_dataset(datasetid))
        for datasetid, value in values(store)
        if value
    }


@pytest.fixture
def filled(store: Store, url: str, tmp_path: Path) -> Store:
    """Three datasets and a properties file by the old key; one is twice, one the original's."""
    add(store, "bob", LEGACY)
    add(store, "ann", by(OLD, "ann", "pässwörd"))
    add(store, "twice", by(OLD, "twice", "one"))
    add(store, "twice", values(store)[2][1])
    add(store, "none", None)
    add(store, "empty", "")
    secret = encrypt("of the database", OLD, purpose=PROPERTIES)
    (tmp_path / "dataflow.properties").write_text(
        f"# ours\nurl={url}\nencrypted={secret}\nspark.master=local\n"
    )
    return store


def in_file(key: str) -> str:
    found = parse_properties(Path("dataflow.properties").read_text())
    assert found["spark.master"] == "local"
    return decrypt(found["encrypted"], key, purpose=PROPERTIES)


def rotate() -> rotate_passkey.Rotated:
    return rotate_passkey.rotate(load_settings(environ={}), OLD, NEW, {})


ALL = {"bob": "secret", "ann": "pässwörd", "twice": "one"}


def test_everything_is_encrypted_again(filled: Store) -> None:
    before = values(filled)
    assert rotate() == (4, True, 0)
    assert texts(filled, NEW) == ALL
    assert in_file(NEW) == "of the database"
    after = values(filled)
    assert not set(before) & set(after) - {("none", None), ("empty", "")}
    salts = {value.split(".")[3] for _, value in after if value}
    assert len(salts) == 1, "one key derivation serves all"
    with pytest.raises(CredentialError):
        texts(filled, OLD)
    assert rotate() == (0, False, 4)
    assert values(filled) == after


def test_a_value_that_fits_neither_key_is_named_and_nothing_changes(filled: Store) -> None:
    add(filled, "strange", by("another", "strange"))
    add(filled, "moved", by(OLD, "somewhere else"))
    before, file = values(filled), Path("dataflow.properties").read_bytes()
    with pytest.raises(DataflowError, match=r"'moved', .*'strange'") as caught:
        rotate()
    assert caught.value.exit_code == 1
    assert values(filled) == before
    assert Path("dataflow.properties").read_bytes() == file


def test_the_same_key_twice_renews_the_originals_values(filled: Store) -> None:
    done = rotate_passkey.rotate(load_settings(environ={}), OLD, OLD, {})
    assert done == (1, False, 3)
    assert dict(values(filled))["bob"].startswith("odf1.")
    assert texts(filled, OLD) == ALL


def test_the_same_key_twice_renews_weak_values_and_gives_all_one_salt(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = encrypt("x", OLD, purpose=for_dataset("alone"), salt=b"another salt....")
    add(filled, "alone", alone)
    monkeypatch.setattr(credentials, "COST", (4, 8, 2))

    rotate_passkey.rotate(load_settings(environ={}), OLD, OLD, {})

    found = [value for _, value in values(filled) if value]
    assert {value.split(".")[2] for value in found} == {"4-8-2"}
    assert len({value.split(".")[3] for value in found}) == 1
    assert texts(filled, OLD) == {**ALL, "alone": "x"}


def test_a_random_key_is_printed_and_used(filled: Store, tmp_path: Path) -> None:
    (tmp_path / "new.key").write_text(odf("key").stdout)
    done = odf("rotate", env={"PASSKEY": OLD, "NEW_PASSKEY_FILE": str(tmp_path / "new.key")})

    assert done.exit_code == 0, done.output
    assert texts(filled, (tmp_path / "new.key").read_text().strip()) == ALL
    assert {value.split(".")[0] for _, value in values(filled) if value} == {"odf2"}


def test_a_half_done_rotation_is_completed(filled: Store) -> None:
    salt = common_salt(value for _, value in values(filled) if value)
    add(filled, "done", encrypt("x", NEW, purpose=for_dataset("done"), salt=salt))
    assert rotate() == (4, True, 1)
    assert texts(filled, NEW)["done"] == "x"


def test_a_row_changed_meanwhile_is_not_overwritten(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if filled.db.dialect == "sqlite":
        pytest.skip("nobody else writes while SQLite's transaction is open")
    import psycopg

    change, calls = filled.db.__class__.change, []

    def interfering(self: object, name: str, **params: object) -> int:
        if name == "credentials.replace" and not calls:
            calls.append(name)
            with psycopg.connect(filled.db.url) as other:  # type: ignore[attr-defined]
                other.execute(
                    "update dataflow.dataset set encryptedpass = %s where datasetid = 'ann'",
                    (by(OLD, "ann", "changed"),),
                )
        return change(self, name, **params)  # type: ignore[arg-type]

    monkeypatch.setattr(filled.db.__class__, "change", interfering)
    rotate()
    assert texts(filled, NEW) == ALL | {"ann": "changed"}


def test_two_rotations_at_once_come_out_whole(filled: Store) -> None:
    results: list[object] = []

    def work() -> None:
        try:
            results.append(rotate())
        except DataflowError as error:
            results.append(error)

    both = [threading.Thread(target=work) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert [result for result in results if not isinstance(result, rotate_passkey.Rotated)] == []
    assert texts(filled, NEW) == ALL
    assert in_file(NEW) == "of the database"


CHILD = """
import sys, time
from opendataflow_dagster.config import credentials
from opendataflow_dagster.store import rotate_passkey as rotation
from opendataflow_dagster.config.settings import load_settings
from opendataflow_dagster.store.database import Database

credentials.COST = (4, 8, 1)
where = sys.argv[1]

def pause(name):
    if name == where:
        print("here", flush=True)
        time.sleep(60)

change = Database.change
count = 0
def changed(self, name, **params):
    global count
    done = change(self, name, **params)
    count += 1
    pause(f"row {count}")
    return done
Database.change = changed

rows = rotation._rotate_rows
def rotated(store, keys):
    done = rows(store, keys)
    pause("committed")
    return done
rotation._rotate_rows = rotated

replace = rotation.replace_property
def replaced(path, key, value):
    replace(path, key, value)
    pause("replaced")
rotation.replace_property = replaced

rotation.rotate(load_settings(environ={}), "plugh", "xyzzy-is-new", {})
"""


@pytest.mark.parametrize("where", ["row 1", "row 3", "committed", "replaced"])
def test_a_rotation_killed_anywhere_is_completed_by_the_next(filled: Store, where: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, where], stdout=subprocess.PIPE, cwd=Path.cwd(), text=True
    )
    assert child.stdout
    assert child.stdout.readline() == "here\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    time.sleep(0.1)

    found = texts_by_either(filled)
    assert found == ALL, "each value is whole, by one key or the other"
    rotate()
    assert texts(filled, NEW) == ALL
    assert in_file(NEW) == "of the database"


def texts_by_either(store: Store) -> dict[str, str]:
    try:
        return texts(store, NEW)
    except CredentialError:
        return texts(store, OLD)


# --- the commands ---


def odf(*words: str, text: str | None = None, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=text, env=env or {}, prog_name="odf")


def test_the_command_rotates_and_shows_no_secret(filled: Store, tmp_path: Path) -> None:
    (tmp_path / "new.key").write_text(NEW + "\n")
    done = odf("rotate", env={"PASSKEY": OLD, "NEW_PASSKEY_FILE": str(tmp_path / "new.key")})
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("4 rows of dataset and `encrypted` of the properties file")
    assert texts(filled, NEW) == ALL
    for word in (OLD, NEW, "secret", "pässwörd"):
        assert word not in done.output


def test_without_a_new_key_it_says_how_to_give_one(filled: Store) -> None:
    done = odf("rotate", env={"PASSKEY": OLD})
    assert done.exit_code == 4
    assert "NEW_PASSKEY_FILE" in done.stderr


def test_text_goes_in_by_standard_input_and_comes_out_whole() -> None:
    for text in ("secret", 'pässwörd "q" $HOME', "two\nlines", " blanks "):
        value = odf("encrypt", text=text + "\n", env={"PASSKEY": OLD}).stdout.strip()
        assert value.startswith("odf1.")
        assert odf("decrypt", text=value, env={"PASSKEY": OLD}).stdout == text + "\n"


def test_a_value_is_bound_to_its_dataset() -> None:
    value = odf("encrypt", "--dataset", "bob", text="secret", env={"PASSKEY": OLD}).stdout
    assert odf("decrypt", "--dataset", "bob", text=value, env={"PASSKEY": OLD}).stdout == "secret\n"
    assert odf("decrypt", "--dataset", "ann", text=value, env={"PASSKEY": OLD}).exit_code == 4
    assert odf("decrypt", text=LEGACY, env={"PASSKEY": OLD}).stdout == "secret\n"


@pytest.mark.parametrize(
    "words",
    [
        ["encrypt", "hunter2"],
        ["decrypt", "hunter2"],
        ["encrypt", "--hunter2"],
        ["rotate", "hunter2"],
        ["encrypt", "--dataset", "bob", "--", "hunter2"],
    ],
)
def test_a_secret_as_an_argument_is_refused_and_not_repeated(words: list[str]) -> None:
    done = odf(*words, env={"PASSKEY": OLD})
    assert done.exit_code == 2
    assert "hunter2" not in done.output
    assert "arguments" in done.stderr or "argument" in done.stderr


def test_without_a_key_it_says_what_to_set() -> None:
    done = odf("encrypt", text="secret")
    assert done.exit_code == 4
    assert "PASSKEY_FILE" in done.stderr
