"""A run sees one version of each source, whatever happens to it meanwhile."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from opendataflow_dagster.dagster import resources
from opendataflow_dagster.errors import Refused
from opendataflow_dagster.pipelines import sources
from opendataflow_dagster.pipelines.frames import Source, as_pandas
from opendataflow_dagster.pipelines.project import Project
from opendataflow_dagster.pipelines.runner import Buffer, InBuffer
from opendataflow_dagster.pipelines.sources import CsvSource, InMemory, Once, Shelf
from tests.dagster.test_pipeline_steps import Twice

HEADS = {
    "pandas": "import pandas as pd\n\ndef run(df, prices):",
    "spark": "from pyspark.sql import DataFrame\n\ndef run(df: DataFrame, prices: DataFrame):",
}
JOINED = {
    "pandas": 'df = df.merge(prices, on="sku")',
    "spark": 'df = df.join(prices, "sku")',
}


def project(steps: list[str]) -> dict[str, str]:
    """Each step joins the prices; the first one changes their file, as somebody else might."""
    files = {
        "sources/orders.csv": "sku\nA\n",
        "sources/prices.csv": "sku,price\nA,1\n",
        "project.yml": "pipelines: [{slug: p, sources: [orders, prices], "
        f"transformations: [{', '.join(f'step{at}' for at in range(len(steps)))}]}}]",
    }
    for at, kind in enumerate(steps):
        renamed = f'withColumnRenamed("price", "p{at}")'
        if kind != "spark":
            renamed = f'rename(columns={{"price": "p{at}"}})'
        changed = (
            ""
            if at
            else (
                "\n    with open('sources/prices.csv', 'w') as file:"
                "\n        file.write('sku,price\\nA,2000\\n')"
            )
        )
        files[f"pipelines/p/step{at}.py"] = (
            f"{HEADS[kind]}\n    {JOINED[kind]}\n    df = df.{renamed}{changed}\n    return df\n"
        )
    return files


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
    "steps", [["pandas", "pandas"], ["pandas", "spark"], ["spark", "spark", "pandas"]], ids="-".join
)
def test_all_steps_see_one_version(twice: Twice, steps: list[str]) -> None:
    written = twice.write(project(steps))
    for made in (twice.by_dagster(written, "p"), twice.by_command(written, "p")):
        [row] = pd.read_csv(BytesIO(made["p.csv"])).to_dict("records")
        assert row == {"sku": "A"} | {f"p{at}": 1 for at in range(len(steps))}


def test_a_large_file_that_spark_reads_is_refused_once_it_has_changed(
    twice: Twice, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = twice.write(project(["spark", "spark"]))
    monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 0)
    for way in (twice.by_dagster, twice.by_command):
        with pytest.raises(AssertionError, match=r"sources/prices\.csv has changed since this run"):
            way(written, "p")


class Unversioned(Source):
    """Rows without a version, such as a table's."""

    location = "there"

    def __init__(self, path: Path) -> None:
        self._path, self.reads = path, 0

    def pandas(self) -> Any:
        self.reads += 1
        return pd.read_csv(self._path)

    def spark(self, spark: SparkSession) -> DataFrame:
        self.reads += 1
        return spark.read.csv(str(self._path), header=True, schema="n int")


@pytest.fixture(params=["memory", "buffer"])
def shelf(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Shelf:
    if request.param == "memory":
        return InMemory(again=True)
    buffer = Buffer(Project(tmp_path, "", (), {}), "p", 1)
    return InBuffer(buffer, 1, lambda: spark, again=True)


@pytest.mark.parametrize("first", ["pandas", "spark"])
def test_rows_without_a_known_version_are_kept(
    shelf: Shelf, spark: SparkSession, tmp_path: Path, first: str
) -> None:
    path = tmp_path / "n.csv"
    path.write_text("n\n1\n2\n")
    source = Unversioned(path)
    given = [Once(source, shelf), Once(source, shelf)]
    for at, once in enumerate(given):
        for kind in ["pandas", "spark"] if first == "pandas" else ["spark", "pandas"]:
            frame = once.pandas() if kind == "pandas" else as_pandas(once.spark(spark))
            assert frame["n"].tolist() == [1, 2]
        path.write_text(f"n\n{at}\n")
    assert source.reads == 1


def test_a_file_that_is_read_again_is_the_same_or_what_was_kept(
    shelf: Shelf, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 0)
    path = tmp_path / "n.csv"
    path.write_text("n\n1\n")
    once = Once(CsvSource(str(path), "n"), shelf)
    assert as_pandas(once.spark(spark))["n"].tolist() == [1]
    path.write_text("n\n1\n2\n")
    with pytest.raises(Refused, match="has changed since this run"):
        once.pandas()
    path.unlink()
    with pytest.raises(Refused, match="doesn't exist"):
        Once(CsvSource(str(path), "n"), shelf).pandas()
