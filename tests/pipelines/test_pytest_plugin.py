"""The pytest plugin: transformations as tests, and nothing for those without a project."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from opendataflow_dagster.pipelines.project import new_project

ROOT = Path(__file__).parents[2]
PLUGIN = "opendataflow_dagster.pipelines.pytest_plugin"
TEST = "def test_other():\n    import warnings\n    warnings.warn('no error here')\n"


def pytest(*words: str) -> subprocess.CompletedProcess[str]:
    # Named, so that it is there just once whether or not the entry point is installed.
    line = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *words]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environ.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)


def test_the_entry_point_is_the_plugin() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared["pytest11"] == {"opendataflow": PLUGIN}


def test_a_project_that_is_named_is_tested() -> None:
    new_project(Path("shop"))
    done = pytest("shop/project.yml", "-v")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "project.yml::clean_contacts::tidy_names PASSED" in done.stdout
    assert "3 passed" in done.stdout
    one = pytest("shop/project.yml::clean_contacts::add_country")
    assert "1 passed" in one.stdout


def test_a_project_is_tested_beside_other_tests() -> None:
    new_project(Path("shop"))
    Path("test_other.py").write_text(TEST)
    done = pytest("--dataflow-project", "shop", "-W", "default")
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert "4 passed" in pytest(".", "shop/project.yml", "-W", "default").stdout
    assert "1 passed" in pytest(".", "-W", "default").stdout
    chosen = pytest("--dataflow-project", "shop", "-k", "tidy")
    assert "1 passed, 3 deselected" in chosen.stdout


def test_a_failure_shows_what_differs_and_what_was_printed() -> None:
    new_project(Path("shop"))
    file = Path("shop/pipelines/clean_contacts/tidy_names.py")
    text = file.read_text().replace('"Ada Lovelace"', '"Ada"')
    text = text.replace("    return", "    print('x y z')\n    return")
    file.write_text(text + "\nimport warnings\nwarnings.warn('old', FutureWarning)\n")
    done = pytest("shop/project.yml", "-W", "error")

    assert done.returncode == 1
    assert "column 'name', row 0: expected 'Ada', got 'Ada Lovelace'" in done.stdout
    assert "x y z" in done.stdout
    assert "pytest_plugin.py" not in done.stdout
    assert "1 failed, 2 passed" in done.stdout


def test_faults_of_a_pipeline_and_of_a_project_are_failures() -> None:
    new_project(Path("shop"))
    yml = Path("shop/project.yml")
    yml.write_text(yml.read_text().replace("destination: contacts_clean", "destination: [a]"))
    done = pytest("shop/project.yml")
    assert "1 failed, 3 passed" in done.stdout
    assert "`destination` is a list" in done.stdout
    yml.write_text("pipelines: [")
    broken = pytest("shop/project.yml")
    assert "isn't YAML" in broken.stdout
    assert "1 error" in broken.stdout
    nowhere = pytest("--dataflow-project", "nowhere")
    assert nowhere.returncode == 4
    assert "has no project.yml" in nowhere.stderr


def test_a_project_yml_that_is_not_named_is_ignored() -> None:
    """Other tools have such a file, too; and pytest imports neither pandas nor more of ours."""
    Path("project.yml").write_text("of: another tool")
    Path("conftest.py").write_text(
        "import sys\n"
        "def pytest_sessionfinish():\n"
        "    ours = [m for m in sys.modules if m.startswith('opendataflow_dagster')]\n"
        "    print('LOADED', sorted(ours), 'pandas' in sys.modules)\n"
    )
    Path("test_other.py").write_text("def test_other(): pass\n")
    done = pytest("-s", ".")

    assert "1 passed" in done.stdout, done.stdout + done.stderr
    names = ["opendataflow_dagster", "opendataflow_dagster.pipelines", PLUGIN]
    assert f"LOADED {names} False" in done.stdout
