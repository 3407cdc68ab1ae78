"""Dagster and `odf pipeline run` write the same bytes for a project."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from opendataflow_dagster import pipeline_assets
from opendataflow_dagster.dagster import resources
from opendataflow_dagster.pipelines import runner
from opendataflow_dagster.pipelines.jobs import plans_of
from opendataflow_dagster.pipelines.project import open_project, project_settings, read_project
from opendataflow_dagster.pipelines.run import run_pipeline
from opendataflow_dagster.pipelines.transformation import TransformationError
from opendataflow_dagster.store.history import steps
from tests.dagster.test_assets import Ran

PROJECTS = Path(__file__).parents[1] / "projects"
KEY = "one"

MONEY = {
    "utils/things.py": """
        class Money:
            def __init__(self, cents):
                self.cents = cents
            def __str__(self):
                return f"{self.cents / 100:.2f}"
    """,
    "sources/orders.csv": "sku,cents\nA,150\nB,5\n",
    "pipelines/p/priced.py": """
        from utils.things import Money

        def run(df):
            df["price"] = df["cents"].map(Money)
            return df
    """,
    "pipelines/p/doubled.py": """
        from utils.things import Money

        def run(df):
            assert {type(each) for each in df["price"]} == {Money}
            df["twice"] = [Money(2 * each.cents) for each in df["price"]]
            return df
    """,
}


class Twice:
    """A project that runs both ways, each in its own folder."""

    def __init__(self, folder: Path, spark: SparkSession, instance: dg.DagsterInstance) -> None:
        self.folder, self.spark, self.instance = folder, spark, instance

    def write(self, files: dict[str, str]) -> Path:
        """A project of these files, with a pipeline `p` of all its transformations."""
        root = self.folder / "written"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text).lstrip("\n"))
        if not (root / "project.yml").exists():
            steps = [Path(each).stem for each in files if each.startswith("pipelines/p/")]
            sources = [Path(each).stem for each in files if each.startswith("sources/")]
            (root / "project.yml").write_text(
                f"pipelines: [{{slug: p, sources: {sources}, transformations: {steps}}}]"
            )
        return root

    def by_command(self, project: Path, slug: str) -> dict[str, bytes]:
        root = shutil.copytree(project, self.folder / "command" / slug)
        said: list[str] = []
        settings = project_settings(root)
        store = open_project(settings)
        try:
            outcome = run_pipeline(
                store,
                read_project(root),
                slug,
                settings,
                say=said.append,
                environ=os.environ,
                session=lambda: self.spark,
            )
        finally:
            store.close()
        assert outcome.failed == 0, "\n".join(said)
        return outputs(root)

    def by_dagster(self, project: Path, slug: str) -> dict[str, bytes]:
        root = shutil.copytree(project, self.folder / "dagster" / slug)
        [output] = plans_of(read_project(root))[slug].outputs
        key = dg.AssetKey(output.replace("-", "_"))
        asset = next(each for each in pipeline_assets(root) if each.key == key)
        self.instance.add_dynamic_partitions(asset.partitions_def.name, [KEY])  # type: ignore
        ran = Ran(
            dg.materialize([asset], instance=self.instance, partition_key=KEY, raise_on_error=False)
        )
        assert ran.success, ran.reason
        return outputs(root)


def outputs(root: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in (root / "output").glob("*.csv")}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def twice(spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance) -> Iterator[Twice]:
    yield Twice(tmp_path, spark, instance)
    for opened in resources._stores.values():
        opened.close()
    resources._stores.clear()


@pytest.mark.parametrize(
    ("project", "slug"),
    [
        ("old_style", "clean_rentals"),
        ("two_ways", "orders"),
        ("two_ways", "orders_spark"),
    ],
)
def test_dagster_and_odf_pipeline_run_write_the_same_bytes(
    twice: Twice, project: str, slug: str
) -> None:
    given = PROJECTS / project
    made = twice.by_dagster(given, slug)
    assert list(made) == [f"{slug}.csv"]
    assert made == twice.by_command(given, slug)


def test_cells_may_have_classes_of_the_project(twice: Twice) -> None:
    project = twice.write(MONEY)
    made = twice.by_dagster(project, "p")
    assert made["p.csv"] == b"sku,cents,price,twice\nA,150,1.50,3.00\nB,5,0.05,0.10\n"
    assert made == twice.by_command(project, "p")


def test_a_frame_that_cant_be_kept_fails_its_transformation(
    twice: Twice, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = twice.write(MONEY)

    def refused(frame: object, root: Path) -> bytes:
        raise TransformationError("A frame has a value that can't be sent to another process")

    monkeypatch.setattr(runner, "dumped", refused)
    with pytest.raises(AssertionError, match="priced: A frame has a value that can't be sent"):
        twice.by_dagster(project, "p")
    with closing(open_project(project_settings(twice.folder / "dagster" / "p"))) as store:
        [step] = steps(store, "p")
    assert (step["transformation"], step["status"]) == ("priced", "FAILED")
