"""Projects as people have them: they run unchanged, and make what plain pandas makes."""

import os
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.pipelines.project import TEMPLATE, Project, read_project
from opendataflow_dagster.pipelines.transformation import load

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "07_project"
OLD = TESTS / "projects" / "old_style"

PLAIN = """
import importlib, sys
import pandas as pd
slug, sources, names = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
dfs = [pd.read_csv(f"sources/{source}.csv") for source in sources]
stdout, sys.stdout = sys.stdout, sys.stderr
for name in names:
    run = importlib.import_module(f"pipelines.{slug}.{name}").run
    dfs[0] = run(*dfs[: run.__code__.co_argcount])
dfs[0].to_csv(stdout, index=False)
"""


def plainly(project: Project, slug: str) -> str:
    """What a Python without us makes of a pipeline."""
    pipeline = project.pipeline(slug)
    words = [slug, ",".join(pipeline.sources), ",".join(pipeline.transformations)]
    done = subprocess.run(
        [sys.executable, "-B", "-c", PLAIN, *words],
        cwd=project.root,
        timeout=60,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def ours(project: Project, slug: str) -> str:
    pipeline = project.pipeline(slug)
    frames = [pd.read_csv(project.source_file(source)) for source in pipeline.sources]
    for name in pipeline.transformations:
        frames[0], _ = load(project, slug, name)(frames)
    out = StringIO()
    frames[0].to_csv(out, index=False)
    return out.getvalue()


@pytest.mark.parametrize("root", [EXAMPLE, OLD], ids=lambda root: root.name)
def test_a_project_validates(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "here")
    files = {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()}

    done = CliRunner().invoke(app, ["validate", "--project", str(tmp_path / "here")])

    assert done.exit_code == 0, done.output
    assert "all pass" in done.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert after == files


@pytest.mark.parametrize(
    ("root", "slug", "rows"),
    [(EXAMPLE, "daily_sales", 2), (OLD, "clean_rentals", 3), (TEMPLATE, "clean_contacts", 3)],
    ids=["example", "old", "new"],
)
def test_a_pipeline_returns_the_same_as_plain_pandas(root: Path, slug: str, rows: int) -> None:
    shutil.copytree(root, "here")
    project = read_project(Path("here"))
    made = ours(project, slug)
    assert made == plainly(project, slug)
    assert len(made.splitlines()) == rows + 1


def test_the_old_style_uses_what_people_use() -> None:
    """The project is worth its name only as long as these are in it."""
    text = "".join(path.read_text() for path in OLD.rglob("*.py"))
    used = [
        "itertuples",
        "np.where",
        ".first()",
        "pd.merge",
        ".loc[",
        "pd.to_datetime",
        "inplace=True",
        "expected_input =",
        "from utils.",
        "stream=None",
        "print(",
    ]
    assert [each for each in used if each not in text] == []
    assert any("-" in path.stem for path in OLD.rglob("*.py"))
