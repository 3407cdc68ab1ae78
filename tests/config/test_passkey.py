"""The passkey: our processes keep it only in memory, where no script can read it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from opendataflow_dagster.config.credentials import encrypt, for_dataset
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import close, put, register, sql

BIN = Path(sys.executable).parent
CANARY = "canary-1f0e-passkey"
SECRET = "correct horse battery"

LOOK = """\
#!{python}
import os
found = []
for pid in os.listdir("/proc"):
    for name in ("environ", "cmdline"):
        try:
            data = open(f"/proc/{{pid}}/{{name}}", "rb").read()
        except OSError:
            continue
        if pid != "{test}" and b"{canary}" in data:
            found.append(f"{{pid}} {{name}} {{data}}")
open("found", "w").write("\\n".join(found))
open("password", "w").write(os.environ.get("bobin_password", ""))
"""
"""A script that looks for the passkey in the environment and command line of every process."""

POWERLESS = """
import ctypes, os, sys
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command as a user without root's privileges."""


def script(body: str, name: str = "loadbob") -> str:
    Path(name).write_text(body)
    Path(name).chmod(0o755)
    return f"./{name}"


def looker(name: str = "loadbob") -> str:
    return script(LOOK.format(python=sys.executable, canary=CANARY, test=os.getpid()), name)


@pytest.fixture
def bob(sqlite_url: str) -> Store:
    """A job `loadbob` that reads bobin, a dataset with a password."""
    store = open_store(sqlite_url)
    store.init()
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1.0")
    sql(
        store,
        "insert into dataset (datasetid, encryptedpass) values ('bobin', :value)",
        value=encrypt(SECRET, CANARY, purpose=for_dataset("bobin")),
    )
    yield store  # type: ignore[misc]
    close(store)


def run(
    store: Store, *words: str, code: int = 0, passkey: str | None = CANARY, **more: str
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"DATAFLOW_URL": f"sqlite:///{store.db.path}"}  # type: ignore[attr-defined]
    if passkey is not None:
        env["PASSKEY"] = passkey
    env |= more
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done


def odf(name: str = "odf") -> str:
    return str(BIN / name)


# --- scripts ---


def test_a_script_finds_the_passkey_in_no_process(bob: Store) -> None:
    run(bob, odf(), "run", looker())

    assert Path("password").read_text() == SECRET
    assert Path("found").read_text() == ""


def test_a_script_of_runjob_doesnt_see_its_key_argument(bob: Store) -> None:
    run(bob, odf("RunJob"), CANARY, looker(), passkey=None)

    assert Path("password").read_text() == SECRET
    assert Path("found").read_text() == ""


def test_a_forced_script_doesnt_see_the_passkey(bob: Store) -> None:
    run(bob, odf(), "force", "loadbob", "1.0", looker())

    assert Path("password").read_text() == SECRET
    assert Path("found").read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
@pytest.mark.parametrize("way", ["PASSKEY", "PASSKEY_FILE"])
def test_a_script_cannot_read_the_memory_of_its_parent(bob: Store, way: str) -> None:
    program = script(
        '#!/bin/sh\nfor each in environ mem maps; do cat "/proc/$PPID/$each" | head -c 1; done'
        " > read 2> refused\n"
    )
    key = Path("key")
    key.write_text(CANARY)
    more = {"PASSKEY": CANARY} if way == "PASSKEY" else {"PASSKEY_FILE": str(key)}

    run(bob, sys.executable, "-c", POWERLESS, odf(), "run", program, passkey=None, **more)

    assert Path("read").read_text() == ""
    assert Path("refused").read_text().count("ermission denied") == 3


def test_the_rest_of_the_environment_stays_as_it_was(bob: Store) -> None:
    program = script(
        f"#!{sys.executable}\nimport os, psutil\n"
        "print(psutil.Process(os.getppid()).environ()['LAST'])\n"
    )
    done = run(bob, odf(), "run", program, LAST="of all")

    assert done.stdout == "of all\n"


def test_a_run_without_a_passkey_can_be_looked_at(bob: Store) -> None:
    """Without a secret, debuggers and core dumps are allowed."""
    sql(bob, "update dataset set encryptedpass = null")
    program = script('#!/bin/sh\nhead -c 1 "/proc/$PPID/maps" > read\n')

    run(bob, sys.executable, "-c", POWERLESS, odf(), "run", program, passkey=None)

    assert Path("read").read_text() != ""


# --- a file that is open already ---


def test_a_passkey_file_may_be_a_descriptor_which_no_script_gets(bob: Store) -> None:
    """No script can read a file of root's that a service manager opens for us."""
    program = script(
        "#!/bin/sh\nls -l /proc/self/fd > fds\nprintf '%s' \"$bobin_password\" > password\n"
    )
    Path("key").write_text(CANARY + "\n")
    put(bob, "bobin", "2.0")
    with open("key") as opened:
        Path("key").chmod(0)
        subprocess.run(
            [sys.executable, "-c", POWERLESS, odf(), "run", "--all", program],
            pass_fds=[opened.fileno()],
            check=True,
            timeout=60,
            env=os.environ
            | {
                "DATAFLOW_URL": f"sqlite:///{bob.db.path}",  # type: ignore[attr-defined]
                "PASSKEY_FILE": f"/dev/fd/{opened.fileno()}",
            },
        )

    assert Path("password").read_text() == SECRET
    assert str(Path("key").resolve()) not in Path("fds").read_text()


def test_a_descriptor_that_is_not_open_is_one_line(bob: Store) -> None:
    refused = run(bob, odf(), "run", looker(), code=4, passkey=None, PASSKEY_FILE="/dev/fd/77")

    assert refused.stderr.startswith("odf: The passkey file '/dev/fd/77'")
    assert refused.stderr.count("\n") == 1
    assert not Path("found").exists()


# --- functions and transformations, in a process of ours ---

TELL = """
import os
from pathlib import Path
print("told by", sorted(os.environ.items()))
if os.access("/proc/self/environ", os.R_OK):
    print("told by", Path("/proc/self/environ").read_bytes())
expected_inputs = [{"a": 1}]
expected_output = [{"a": 1, "b": 2}]
def run(df):
    print("told by", sorted(os.environ.items()))
    df["b"] = 2
    return df
"""


def project() -> Path:
    root = Path("project")
    (root / "pipelines" / "p").mkdir(parents=True)
    (root / "pipelines" / "p" / "t.py").write_text(TELL)
    (root / "sources").mkdir()
    (root / "sources" / "a.csv").write_text("a\n1\n")
    (root / "project.yml").write_text(
        "pipelines:\n  - slug: p\n    sources: [a]\n    destination: d\n    transformations: [t]\n"
    )
    return root


def test_validate_shows_the_passkey_to_no_transformation(bob: Store) -> None:
    done = run(bob, odf(), "validate", "--project", str(project()), "--json")

    assert "told by" in done.stdout
    assert CANARY not in done.stdout + done.stderr


# --- handing on ---


def python(body: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=60,
    )


IN_DAGSTER = """
import json, multiprocessing, os, sys

def tell(way):
    import os
    from opendataflow_dagster.config.credentials import find_passkey
    block = open("/proc/self/environ", "rb").read() if os.access("/proc/self/environ", 4) else b""
    told = [way, find_passkey(), os.environ.get("PASSKEY"), b"canary" in block]
    print(json.dumps(told), flush=True)

def nested(way):
    tell(way)
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(way + " again",))
    child.start()
    child.join()

if __name__ == "__main__":
    import opendataflow_dagster
    opendataflow_dagster.DataflowResource
    tell("itself")
    for way in ("spawn", "forkserver", "fork"):
        child = multiprocessing.get_context(way).Process(target=nested, args=(way,))
        child.start()
        child.join()
        assert child.exitcode == 0
"""


def test_processes_that_a_code_location_starts_get_it_by_a_pipe() -> None:
    Path("told.py").write_text(IN_DAGSTER)
    done = subprocess.run(
        [sys.executable, "told.py"],
        env=os.environ | {"PASSKEY": CANARY},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each[0] for each in told] == [
        "itself",
        "spawn",
        "spawn again",
        "forkserver",
        "forkserver again",
        "fork",
        "fork again",
    ]
    assert [each[1:] for each in told] == [[CANARY, None, False]] * 7


def test_the_passkey_is_pickled_for_a_child_and_for_nothing_else() -> None:
    done = python(
        """
        import multiprocessing, pickle
        import opendataflow_dagster
        opendataflow_dagster.DataflowResource
        print(pickle.dumps(dict(
            (name, each) for name, each in multiprocessing.current_process()._config.items()
            if name != "authkey"
        )))
        print(multiprocessing.current_process()._config)
        """,
        PASSKEY=CANARY,
    )
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout
