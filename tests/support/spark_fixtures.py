"""The Spark session that all tests share: one Java, started when the first test needs it."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONF = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
}


@pytest.fixture(scope="session")
def spark_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """The session itself; its Java works in a folder that no test looks into."""
    from opendataflow_dagster.spark.session import spark_session

    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("spark"))
    try:
        session = spark_session(CONF, app="tests", short=True)
    finally:
        os.chdir(before)
    yield session
    session.stop()


@pytest.fixture
def spark(spark_for_all: "SparkSession") -> Iterator["SparkSession"]:
    """A session on local[2] with 1 GB: settings that a test changed are reset after it."""
    from opendataflow_dagster.spark.session import _SessionRequest

    before, asked, refused = (
        dict(spark_for_all.conf.getAll),
        _SessionRequest.asked,
        _SessionRequest.refused,
    )
    yield spark_for_all
    _SessionRequest.asked, _SessionRequest.refused = asked, refused
    after = dict(spark_for_all.conf.getAll)
    for key in after.keys() - before.keys():
        spark_for_all.conf.unset(key)
    for key, value in before.items():
        if after.get(key) != value and spark_for_all.conf.isModifiable(key):
            spark_for_all.conf.set(key, value)
