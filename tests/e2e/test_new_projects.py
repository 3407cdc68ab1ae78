"""`odf new`: the kinds that start Spark or Dagster do what their READMEs say."""

import subprocess
import sys
from pathlib import Path

from tests.support.new_projects import play


def odf(*words: str, cwd: str = ".") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "opendataflow_dagster.cli", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ready_chunks(folder: str) -> str:
    return odf(
        "sql",
        "select datasetid, count(*) from datastatus where status = 'READY' group by datasetid "
        "order by datasetid",
        cwd=folder,
    )


def test_the_kind_spark() -> None:
    odf("new", "my shop", "--kind", "spark")
    play(Path("my shop"))
    assert ready_chunks("my shop").split()[-6:] == ["checked", "3", "report", "3", "sales", "3"]
    assert list(Path("my shop/data/report").rglob("*.parquet"))


def test_the_kind_pipeline() -> None:
    odf("new", "my shop")
    play(Path("my shop"))
    assert Path("my shop/output/clean_contacts.csv").exists()
