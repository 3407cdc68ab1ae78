"""A deploy that is broken, half written or half done: the previous version stays served."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendataflow_dagster.pipelines import deployment
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.pipelines.sandbox import surroundings
from opendataflow_dagster.pipelines.task_data import listing
from opendataflow_dagster.server.app import REFUSED
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_job
from tests.e2e.test_serve import ROW, Served
from tests.server.test_app import ADD, YML, Client, make_project, wait_until
from tests.support.disks import fill, small
from tests.support.postgres import Server
from tests.support.store_fixtures import close

STAYS = "The project stays unchanged: "

__all__ = ["small"]

LONG = 90
"""Seconds: on a busy machine, checking a version takes long."""

CONCAT = "pd.concat([df, pd.DataFrame([stream])], ignore_index=True)"
BROKEN = ADD.replace(CONCAT, "pd.concat(df, ")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_project(tmp_path / "shop")


@pytest.fixture
def client(sqlite_url: str, root: Path) -> Iterator[Client]:
    store = open_store(sqlite_url)
    store.init()
    with Client(store, root) as made:
        yield made
    close(store)


def refused(client: Client) -> str:
    """Return why newer files aren't served, by the log; clients learn only that it is so."""
    answer = client.http.get("/health")
    assert answer.status_code == 200, answer.text
    if "refused" not in answer.json():
        return ""
    assert answer.json()["refused"] == REFUSED
    return [line for line in client.said if line.startswith(STAYS)][-1].removeprefix(STAYS)


def test_a_syntax_error_leaves_the_served_version_unchanged(client: Client, root: Path) -> None:
    file = root / "pipelines" / "live" / "add.py"
    file.write_text(BROKEN)
    codes = set()

    def is_refused() -> bool:
        codes.add(client.post({"a": 1}).status_code)
        return bool(refused(client))

    wait_until(is_refused, LONG)
    assert refused(client) == "pipelines/live/add.py:6: SyntaxError: '(' was never closed"
    assert "odf_project_refused 1" in client.http.get("/metrics").text
    assert codes == {202}
    assert client.said == [STAYS + refused(client)]
    file.write_text(ADD)
    wait_until(lambda: not refused(client), LONG)
    assert "odf_project_refused 0" in client.http.get("/metrics").text
    assert client.post({"a": 1}).status_code == 202


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("project.yml", "pipelines: 7\n", "project.yml:1 must have `pipelines`: a list"),
        ("project.yml", "a: [\n", "project.yml:2 isn't YAML"),
        (
            "project.yml",
            YML.replace(
                "transformations: [add]\n  - slug: daily", "transformations: 5\n  - slug: daily"
            ),
            "project.yml:7: `transformations` must be a list",
        ),
        (
            "pipelines/live/add.py",
            "def go(df): return df\n",
            "pipelines/live/add.py has no function `run`",
        ),
        (
            "pipelines/live/add.py",
            "\nimport nowhere\n" + ADD,
            "pipelines/live/add.py:2: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (
            "pipelines/live/add.py",
            "import os\nos._exit(3)\n" + ADD,
            "pipelines/live/add.py: the process that loads it ended with code 3",
        ),
        ("later.py", "def f(:\n", "later.py:1: SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_with_its_place(
    client: Client, root: Path, name: str, text: str, why: str
) -> None:
    (root / name).write_text(text)
    wait_until(lambda: bool(refused(client)), LONG)
    assert refused(client).startswith(why)
    assert client.post({"a": 1}).status_code == 202


def test_a_file_that_is_missing_is_refused(client: Client, root: Path) -> None:
    for name in ("pipelines/live/add.py", "project.yml"):
        (root / name).unlink()
        wait_until(lambda name=name: refused(client).startswith(f"{name} doesn't exist"), LONG)
        assert client.post({"a": 1}).status_code == 202
    (root / "project.yml").write_text(YML)
    (root / "pipelines/live/add.py").write_text(ADD)
    wait_until(lambda: not refused(client), LONG)


def test_a_pipeline_that_is_removed_on_purpose_goes(client: Client, root: Path) -> None:
    (root / "project.yml").write_text("pipelines:\n  - {slug: quiet, transformations: [add]}\n")
    wait_until(lambda: client.post({"a": 1}).status_code == 404, LONG)
    assert refused(client) == ""
    assert client.post({"a": 1}, slug="quiet").status_code == 403


def test_a_pipeline_that_takes_no_items_any_more_goes(client: Client, root: Path) -> None:
    (root / "pipelines/live/add.py").write_text("def run(df):\n    return df\n")
    wait_until(lambda: client.post({"a": 1}).status_code == 404, LONG)
    assert refused(client) == ""


def test_a_pipeline_that_cannot_be_a_job_is_refused(client: Client, root: Path) -> None:
    add_job(client.store, "taken", ["a"], ["b"])
    (root / "project.yml").write_text(YML + "  - {slug: taken, transformations: [add]}\n")
    (root / "pipelines/taken").mkdir()
    (root / "pipelines/taken/add.py").write_text(ADD)
    wait_until(lambda: refused(client).startswith("Pipeline 'taken' of 'shop' can't be"), LONG)
    assert client.post({"a": 1}).status_code == 202
    assert client.post({"a": 1}, slug="taken").status_code == 404


def test_while_the_database_is_away_nothing_is_refused(
    postgres_url: str, postgres_server: Server, root: Path
) -> None:
    store = open_store(postgres_url)
    store.init()
    with Client(store, root, patience=0.5) as client:
        postgres_server.stop("immediate")
        (root / "project.yml").write_text(YML + "  - {slug: more, transformations: [add]}\n")
        (root / "pipelines/more").mkdir()
        (root / "pipelines/more/add.py").write_text(ADD)
        wait_until(lambda: "The database can't be used" in " ".join(client.said), LONG)
        assert "refused" not in client.http.get("/health").json()
        postgres_server.start()
        wait_until(lambda: client.post({"a": 1}, slug="more").status_code == 403, LONG)
        assert not [line for line in client.said if "stays unchanged" in line]
    close(store)


def test_faults_present_at_the_start_do_not_block_new_versions(sqlite_url: str, root: Path) -> None:
    (root / "pipelines/quiet/add.py").write_text(BROKEN)
    (root / "template.py").write_text("{{ not python }}\n")
    store = open_store(sqlite_url)
    store.init()
    with Client(store, root) as client:
        assert client.post({"a": 1}, slug="quiet").status_code == 404
        (root / "project.yml").write_text(
            YML + "  - {slug: more, sources: [orders], transformations: [add]}\n"
        )
        (root / "pipelines/more").mkdir()
        (root / "pipelines/more/add.py").write_text(ADD)
        wait_until(lambda: client.post({"a": 1}, slug="more").status_code == 403, LONG)
        (root / "pipelines/quiet/add.py").write_text(ADD)
        wait_until(lambda: client.post({"a": 1}, slug="quiet").status_code == 403, LONG)
        (root / "pipelines/quiet/add.py").write_text(BROKEN)  # now it was good before
        wait_until(lambda: refused(client).startswith("pipelines/quiet/add.py:6"), LONG)
        assert client.post({"a": 1}, slug="quiet").status_code == 403
    close(store)


HELPED = ROW.replace("import pandas as pd", "import pandas as pd\nfrom helper import mark").replace(
    "len(df)", "mark(len(df))"
)


@pytest.mark.timeout(400)
def test_the_worker_continues_with_the_last_valid_files(served: Served) -> None:
    file, helper = served.root / "pipelines" / "live" / "add.py", served.root / "helper.py"
    helper.write_text("def mark(n):\n    return f'old {n}'\n")
    file.write_text(HELPED)
    names: dict[str, str] = {}

    def done(name: str) -> str:
        dataid = served.post(name).json()["dataid"]
        wait_until(lambda: served.status(dataid) in ("READY", "FAILED"), LONG)
        assert served.status(dataid) == "READY", served.said()
        lines = (served.root / "output" / "live.csv").read_text().splitlines()
        names.update(line.split(",") for line in lines[1:])
        return names[name]

    served.start()
    served.warm()
    assert done("a") == "old 1"

    # The second file of the deploy comes later; what the first needs isn't there until then.
    file.write_text(HELPED.replace("import mark", "import newer").replace("mark(", "newer("))
    wait_until(lambda: "refused" in served.health(), LONG)
    assert served.health()["refused"] == REFUSED
    assert f"{STAYS}pipelines/live/add.py:4: ImportError: " in served.said()
    assert done("b") == "old 1"

    # Nor does a worker that starts anew in the meantime import the files that are refused.
    served.worker().kill()
    wait_until(lambda: served.health().get("worker") == "restarting", LONG)
    helper.write_text("def newer(n:\n")
    file.unlink()
    served.warm()
    assert done("c") == "old 1"

    helper.write_text("def newer(n):\n    return f'new {n}'\n")
    file.write_text(HELPED.replace("import mark", "import newer").replace("mark(", "newer("))
    wait_until(lambda: "refused" not in served.health(), LONG)
    wait_until(lambda: done(f"d{len(names)}") == "new 1", LONG)
    assert served.statuses().keys() == {"READY"}
    assert {each.name for each in served.root.iterdir()} == {
        ".dataflow",
        "helper.py",
        "output",
        "pipelines",
        "project.yml",
        "sources",
    }


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "shop")
    yield made
    made.close()


def test_health_knows_a_full_disk_of_the_database(small: Path, root: Path) -> None:
    store = open_store(f"sqlite:///{small}/db/dataflow.db")
    store.init()
    with Client(store, root) as client:
        assert client.http.get("/health").json() == {
            "status": "ok",
            "database": True,
            "worker": "off",
        }
        filler = fill(small)
        answer = client.http.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {
            "status": "unavailable",
            "database": True,
            "full": ["database"],
            "worker": "off",
        }
        assert "retry-after" in answer.headers
        wait_until(lambda: str(small) in " ".join(client.said))
        filler.unlink()
        assert client.http.get("/health").json()["status"] == "ok"
        assert client.post({"a": 1}).status_code == 202
    close(store)


def test_health_knows_a_full_disk_of_the_project(small: Path, sqlite_url: str) -> None:
    root = make_project(small / "shop")
    store = open_store(sqlite_url)
    store.init()
    with Client(store, root) as client:
        fill(small)
        answer = client.http.get("/health")
        assert answer.status_code == 200  # items are durable, and wait
        assert answer.json()["full"] == ["project"]
        assert client.post({"a": 1}).status_code == 202
    close(store)


# --- the versions ---


class Versions:
    """A project, and how its deploys are judged, with our own clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.said, self.now = root, list[str](), 0.0
        monkeypatch.setattr(deployment.time, "monotonic", lambda: self.now)
        self.deploys = deployment.Deploys(read_project(root), say=self.said.append)
        self.file = root / "pipelines" / "live" / "add.py"

    def look(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.deploys.refresh(lambda _: None)

    def served(self, name: str = "pipelines/live/add.py") -> str:
        return (self.deploys.folder / name).read_text()


@pytest.fixture
def versions(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Versions]:
    made = Versions(root, monkeypatch)
    yield made
    made.deploys.close()
    assert not made.deploys.folder.parent.exists()


def test_a_file_that_is_still_being_written_is_waited_for(versions: Versions) -> None:
    whole = ADD + "\n\nX = 1\n"
    for end in range(0, len(whole) + 1, 20):  # each part is there for half a second
        versions.file.write_text(whole[:end])
        versions.look()
        assert versions.served() == ADD
    versions.file.write_text(whole)
    versions.look()
    versions.look()
    assert versions.served() == ADD
    versions.look()
    assert versions.served() == whole
    assert not versions.said


def test_a_version_that_changes_while_it_is_checked_is_not_taken(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = deployment.check

    def slow(version: Path, local: bool) -> deployment.Faults:
        versions.file.write_text(BROKEN)
        return check(version, local)

    monkeypatch.setattr(deployment, "check", slow)
    versions.file.write_text(ADD + "\nX = 1\n")
    versions.look()
    versions.look(2)
    assert versions.served() == ADD
    assert not versions.said


def test_a_refused_version_is_loaded_again_later(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import of_later\n" + ADD
    versions.file.write_text(text)
    versions.look()
    versions.look(2)
    assert "No module named 'of_later'" in versions.deploys.refused
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "of_later.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    versions.look(2)
    assert versions.deploys.refused
    versions.look(deployment.RELOAD_SECONDS)
    assert versions.deploys.refused == ""
    assert versions.served() == text


def test_only_code_is_copied(versions: Versions) -> None:
    """All else is where it was, whichever way the code names it; a write there isn't lost."""
    folder = versions.deploys.folder.resolve()
    assert folder.name == versions.root.name  # the name of a project that declares none
    assert not (folder / "pipelines" / "live" / "add.py").is_symlink()
    (versions.root / "output").mkdir()
    for name in ("sources", "output"):
        assert (folder / name).resolve() == versions.root / name
    (versions.root / "rates.json").write_text("1")
    versions.look()
    versions.look(2)
    folder = versions.deploys.folder.resolve()
    (versions.root / "rates.json").write_text("2")
    assert (folder / "rates.json").read_text() == "2"
    with surroundings(folder):
        assert Path.cwd() == versions.root
        Path("made.txt").write_text("here")
    assert (versions.root / "made.txt").read_text() == "here"


def test_a_cluster_gets_what_the_project_has(versions: Versions) -> None:
    """Data folders that a version links to are sent; folders that the project links to aren't."""
    (versions.root / "data").mkdir()
    (versions.root / "data" / "a.csv").write_text("1")
    (versions.root / "pipelines" / "loop").symlink_to(versions.root)
    versions.look()
    versions.look(2)
    names = {name for name, _, _ in listing(versions.deploys.folder.resolve())}
    assert names == {name for name, _, _ in listing(versions.root)}
    assert "data/a.csv" in names


def test_pandas_that_runs_elsewhere_is_only_parsed(root: Path) -> None:
    file = root / "pipelines" / "live" / "add.py"
    file.write_text("import only_there\n" + ADD)
    (root / "project.yml").write_text("pipelines:\n  - {slug: live, transformations: [add]}\n")
    assert deployment.check(_version(root), local=False) == {}
    assert list(deployment.check(_version(root), local=True)) == ["pipelines/live/add.py"]
    file.write_text(
        "import only_there\nfrom pyspark.sql import DataFrame\n\n"
        "def run(df: DataFrame, stream=None):\n    return df\n"
    )
    assert list(deployment.check(_version(root), local=False)) == ["pipelines/live/add.py"]


def test_a_file_that_never_finishes_loading_is_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "pipelines" / "live" / "add.py").write_text("import time\ntime.sleep(600)\n" + ADD)
    monkeypatch.setattr(deployment, "CHECK_SECONDS", 8.0)
    assert deployment.check(_version(root), local=True)["pipelines/live/add.py"] == (
        "pipelines/live/add.py: it didn't load within 8 s"
    )


def _version(root: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=root.parent)) / root.name
    deployment._copy(root, listing(root), folder)
    return folder


def test_leftovers_of_a_killed_server_are_removed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = deployment.Deploys(read_project(root), say=print)
    left = tmp_path / f"{deployment.PREFIX}left"
    (left / "1").mkdir(parents=True)
    for folder in (left, kept.folder.parent):
        os.utime(folder, (0, 0))
    other = deployment.Deploys(read_project(root), say=print)
    assert not left.exists()
    assert (kept.folder / "project.yml").exists()
    kept.close()
    other.close()


def test_without_room_for_the_copy_it_says_so(
    small: Path, root: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small))
    monkeypatch.setattr("opendataflow_dagster.pipelines.deployment.RELOAD_SECONDS", 2.0)
    store = open_store(sqlite_url)
    store.init()
    with Client(store, root) as client:
        filler = fill(small)
        assert client.http.get("/health").json()["full"] == ["temporary files"]
        (root / "pipelines/live/add.py").write_text(ADD + "# longer\n" * 1000)
        wait_until(lambda: "No space left" in refused(client), LONG)
        assert client.post({"a": 1}).status_code == 202
        filler.unlink()
        wait_until(lambda: not refused(client), LONG)
    close(store)


NATIVE = """
from pyspark.sql import DataFrame, functions as F
from helper import mark

def run(df: DataFrame, stream=None) -> DataFrame:
    return df.limit(1).select(F.lit(stream["name"]).alias("name"), F.lit(mark()).alias("mark"))
"""


@pytest.mark.timeout(400)
def test_modules_on_the_driver_belong_to_the_served_version(served: Served) -> None:
    helper = served.root / "helper.py"
    helper.write_text("def mark():\n    return 'old'\n")
    (served.root / "pipelines" / "live" / "add.py").write_text(NATIVE)
    served.start()
    served.warm()

    def marks() -> str:
        dataid = served.post(f"a{served.statuses().total()}").json()["dataid"]
        wait_until(lambda: served.status(dataid) in ("READY", "FAILED"), LONG)
        return (served.root / "output" / "live.csv").read_text().split(",")[-1].strip()

    assert marks() == "old"
    helper.write_text("def mark(:\n")
    wait_until(lambda: f"{STAYS}helper.py:1: Syntax" in served.said(), LONG)
    assert marks() == "old"
    helper.write_text("def mark():\n    return 'new'\n")
    wait_until(lambda: marks() == "new", LONG)
    assert served.statuses().keys() == {"READY"}
