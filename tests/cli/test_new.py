"""`odf new`: each kind runs at once, and an existing folder loses nothing."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.cli.setup import EXTRAS, template
from opendataflow_dagster.flow.flow import Flow
from tests.support.new_projects import play, steps_of_workflow

HOSTILE = 'it\'s: "new" $(touch x) é 😀 \x85 {a}'

READY = (
    "select datasetid, count(*) from datastatus where status = 'READY' group by datasetid "
    "order by datasetid"
)


def odf(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="odf")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("kind", "name"), [("scripts", HOSTILE), ("python", "my shop")])
def test_the_commands_of_the_readme_make_every_day_ready(kind: str, name: str) -> None:
    made = odf("new", name, "--kind", kind)
    assert made.exit_code == 0, made.output
    folder = Path(name)
    assert Flow.load(folder / "flow.yml").name == name

    lines = play(folder)

    assert lines[-2:] == ["odf status --grid", "python -m pytest"]
    done = subprocess.run(
        [sys.executable, "-m", "opendataflow_dagster.cli", "sql", READY],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-6:] == ["checked", "3", "report", "3", "sales", "3"]
    [report] = [
        path for path in Path(folder, "data/report").rglob("*.csv") if "2026-03-02" in str(path)
    ]
    assert report.read_text() == "shop,cents\nnorth,875\nsouth,1120\n"
    assert not list(Path().rglob("x"))


@pytest.mark.parametrize("kind", ["scripts", "python"])
def test_the_workflow_for_ci_tests_and_plans(kind: str) -> None:
    assert odf("new", "shop", "--kind", kind).exit_code == 0
    install, *steps = steps_of_workflow(Path("shop/.github/workflows/flow.yml"))
    assert install == f'pip install "opendataflow-dagster{EXTRAS[kind]}" pytest'
    environment = os.environ | {"GITHUB_STEP_SUMMARY": str(Path("summary.md").resolve())}
    for step in steps:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", step], cwd="shop", env=environment | {"PATH": path}, timeout=60
        )
        assert done.returncode == 0, step
    assert "5 to add" in Path("summary.md").read_text()
    flow = Path("shop/flow.yml")
    flow.write_text(flow.read_text().replace("run:", "rnu:").replace("python:", "pyhton:"))
    assert subprocess.run(["bash", "-e", "-c", steps[-1]], cwd="shop", env=environment).returncode


@pytest.mark.parametrize("kind", sorted(EXTRAS))
def test_each_kind_has_a_flow_or_a_project_data_a_readme_and_a_workflow(kind: str) -> None:
    done = odf("new", "shop", "--kind", kind)
    assert done.exit_code == 0, done.output
    assert "Next: cd shop && odf " in done.stderr
    found = files_of(Path("shop"))
    assert "project.yml" in found or "flow.yml" in found
    assert ".gitignore" in found
    assert "README.md" in found
    assert [name for name in found if name.endswith(".csv")]
    [workflow] = [name for name in found if name.startswith(".github/workflows/")]
    assert yaml.safe_load(found[workflow])["jobs"]
    assert not [name for name, text in found.items() if b"REQUIREMENTS" in text]
    for path in Path("shop").rglob("*.sh"):
        assert os.access(path, os.X_OK)


def test_an_invalid_flow_name_is_refused_in_one_line() -> None:
    for name, why in (
        ("a=b", "has a control character or '='"),
        ("a\nb", "has a control character"),
        (" ", "The project has no name"),
        ("", "The project has no name"),
        ("x" * 240, ""),
    ):
        done = odf("new", name, "--kind", "scripts")
        assert done.stderr.count("\n") == 1
        assert why in done.stderr
        assert (done.exit_code, done.stdout) == ((2, "") if why else (0, ""))
    assert [path.name for path in Path().iterdir()] == ["x" * 240]


def test_a_folder_that_holds_anything_is_left_alone() -> None:
    Path("shop").mkdir()
    Path("shop/notes").write_text("mine")
    for kind in EXTRAS:
        done = odf("new", "shop", "--kind", kind)
        assert done.exit_code == 2
        assert "isn't empty" in done.stderr
    Path("file").touch()
    assert "is a file" in odf("new", "file", "--kind", "python").stderr
    Path("link").symlink_to("nowhere")
    assert odf("new", "link", "--kind", "python").exit_code == 2
    assert files_of(Path("shop")) == {"notes": b"mine"}


def test_in_an_existing_folder_only_missing_files_are_added() -> None:
    mine = {"README.md": "mine\n", ".gitignore": "*.pyc\n", "data/sales/2026-03-01.csv": "a,1\n"}
    for name, text in mine.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("pyproject.toml").symlink_to("nowhere.toml")

    done = odf("new", ".", "--kind", "scripts")

    assert done.exit_code == 0, done.output
    assert "Add to .gitignore: .dataflow/" in done.stderr
    assert "8 files added; 4 files left unchanged." in done.stderr
    assert "+ jobs/check.sh" in done.stdout.splitlines()
    assert {name: Path(name).read_text() for name in mine} == mine
    assert Path("pyproject.toml").is_symlink()
    assert not Path("nowhere.toml").exists()
    before = files_of(Path())
    again = odf("new", ".", "--kind", "scripts")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "Nothing to add" in again.stderr
    assert files_of(Path()) == before


def test_a_file_in_the_way_of_a_new_one_is_refused() -> None:
    Path("jobs.py").write_text("def mine(): ...\n")
    done = odf("new", ".", "--kind", "python")
    assert done.exit_code == 2
    assert "jobs.py already exists" in done.stderr
    assert list(files_of(Path())) == ["jobs.py"]
    Path("flow.yml").write_text("flow: mine\njobs: {}\n")
    assert odf("new", ".", "--kind", "python").exit_code == 0
    assert set(files_of(Path())) == {
        "jobs.py",
        "flow.yml",
        "flow.schema.json",
        "pyproject.toml",
        ".gitignore",
        ".github/workflows/flow.yml",
    }


def test_a_killed_odf_new_is_finished_by_the_next_one() -> None:
    files = list(template("python", Path.cwd().name).items())
    for path, text in files[: len(files) // 2]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert odf("new", ".", "--kind", "python").exit_code == 0
    assert set(files_of(Path())) == {str(path) for path, _ in files}
    assert str(files[-1][0]) == "flow.yml"


def test_two_concurrent_runs_create_one_complete_folder() -> None:
    line = [sys.executable, "-m", "opendataflow_dagster.cli", "new", ".", "--kind", "scripts"]
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda _: subprocess.run(line, timeout=60).returncode, range(2)))
    assert codes == [0, 0]
    expected = {
        str(path): text.encode() for path, text in template("scripts", Path.cwd().name).items()
    }
    assert files_of(Path()) == expected


@pytest.mark.parametrize(
    ("name", "text", "hook"),
    [
        ("workspace.yaml", "load_from: []\n", "flow_definitions.py"),
        ("pyproject.toml", "[tool.dagster]\nmodule_name = 'shop'\n", "flow_definitions.py"),
        ("shop/assets.py", "import dagster as dg\n", "flow_definitions.py"),
        ("definitions.py", "from dagster import asset\n", "flow_definitions.py"),
        (
            "pyproject.toml",
            "[tool.dg.project]\nroot_module = 'shop'\n",
            "src/shop/defs/dataflow.py",
        ),
    ],
)
def test_a_dagster_project_gets_a_module_beside_its_own(name: str, text: str, hook: str) -> None:
    Path("src/shop/defs").mkdir(parents=True)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)

    done = odf("new", ".")

    assert done.exit_code == 0, done.output
    assert ("dg.Definitions.merge(defs, flow_definitions.defs)" in done.stderr) == ("/" not in hook)
    assert Path(name).read_text() == text
    depth = hook.count("/")
    assert f'parents[{depth}] / "flow.yml"' in Path(hook).read_text()
    added = set(files_of(Path())) - {name}
    assert added == {
        hook,
        "flow.yml",
        "flow.schema.json",
        "flow_jobs.py",
        "tests/test_flow.py",
        "README.md",
        ".gitignore",
        ".github/workflows/flow.yml",
        *(f"data/sales/2026-03-0{day}.csv" for day in (1, 2, 3)),
    }
    workflow = Path(".github/workflows/flow.yml")
    assert "python -m pytest tests/test_flow.py" in steps_of_workflow(workflow)
    assert "Nothing to add" in odf("new", ".").stderr
    workflow.unlink()  # with a flow.yml of one's own, there may be no such test
    assert odf("new", ".").stdout == f"+ {workflow}\n"
    assert not [step for step in steps_of_workflow(workflow) if "pytest " in step]


def test_a_project_that_already_uses_build_definitions_gets_no_second_one() -> None:
    Path("definitions.py").write_text("import dagster as dg\ndefs = build_definitions(dataflow)\n")
    done = odf("new", ".")
    assert 'Give it to your build_definitions: flow="flow.yml".' in done.stderr
    assert not Path("flow_definitions.py").exists()
    Path("definitions.py").write_text("import dagster as dg\nbuild_definitions(flow='flow.yml')\n")
    assert "Give it" not in odf("new", ".").stderr


def test_a_folder_without_dagster_isnt_treated_as_a_dagster_project() -> None:
    for place in ("venv/lib/x.py", ".hidden/x.py", "tests/x.py"):
        Path(place).parent.mkdir(parents=True)
        Path(place).write_text("import dagster\n")
    Path("mine.py").write_text("import dagsterlike\n")
    Path("pyproject.toml").write_text("not [toml")
    done = odf("new", ".")
    assert done.exit_code == 2
    assert "isn't empty" in done.stderr
