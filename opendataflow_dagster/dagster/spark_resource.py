"""The Spark session as a Dagster resource, with the settings that `odf` would use here."""

from typing import Any

import dagster as dg

from ..config.settings import load_settings

try:
    from dagster_pyspark import LazyPySparkResource  # pyright: ignore[reportAssignmentType]
except ImportError:  # without dagster-pyspark, all works except annotations with its class

    class LazyPySparkResource(dg.ConfigurableResource):
        """What `SparkResource` needs of it."""


class SparkResource(LazyPySparkResource):
    """A LazyPySparkResource with the Java, the defaults and the settings of OpenDataFlow.

    All steps of a process share the session, and none of them stops it.

    Attributes:
        spark_config: Settings of Spark, flat or nested. They override the environment, which
            overrides `config`.
        config: The path of the properties file; by default `dataflow.properties`.

    Example:
        resources = {"pyspark": SparkResource(spark_config={"spark.master": "local[4]"})}
    """

    spark_config: dict[str, Any] = {}  # noqa: RUF012 - a field: pydantic copies it
    config: str | None = None
    app: str = "dagster"

    @property
    def spark_session(self) -> Any:
        """The session of this process, started on first use."""
        from ..spark.session import spark_session

        return spark_session(
            _flat(self.spark_config), app=self.app, settings=load_settings(self.config)
        )

    @property
    def spark_context(self) -> Any:
        """The session's context; Spark Connect sessions have none."""
        return self.spark_session.sparkContext


def _flat(nested: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten `{"spark": {"ui": {"enabled": …}}}` to `{"spark.ui.enabled": …}`."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found
