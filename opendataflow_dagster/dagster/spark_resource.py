"""The session of Spark as a Dagster resource, as `odf` would start it here."""

from typing import Any

import dagster as dg

from ..config.settings import load_settings

try:
    from dagster_pyspark import LazyPySparkResource  # pyright: ignore[reportAssignmentType]
except ImportError:  # without it everything works but what is annotated with its class

    class LazyPySparkResource(dg.ConfigurableResource):
        """The same interface."""

        spark_config: dict[str, Any]

        @property
        def spark_session(self) -> Any:
            """The session, made when it is asked for."""

        @property
        def spark_context(self) -> Any:
            """Its context, which a session of Spark Connect has not."""
            return self.spark_session.sparkContext


class SparkResource(LazyPySparkResource):
    """A LazyPySparkResource with Java, defaults and settings of OpenDataFlow.

    `spark_config`, flat or nested, beats the environment, which beats the file `config`, by default
    `dataflow.properties`. All steps of a process share the session, and none of them ends it.
    """

    spark_config: dict[str, Any] = {}  # noqa: RUF012 - a field: pydantic copies it
    config: str | None = None
    app: str = "dagster"

    @property
    def spark_session(self) -> Any:
        """The session of this process, made when it is asked for."""
        from ..spark.session import spark_session

        return spark_session(
            _flat(self.spark_config), app=self.app, settings=load_settings(self.config)
        )

    @property
    def spark_context(self) -> Any:
        """Its context, which a session of Spark Connect has not."""
        return self.spark_session.sparkContext


def _flat(nested: dict[str, Any], before: str = "") -> dict[str, Any]:
    """`{"spark": {"ui": {"enabled": …}}}` as `{"spark.ui.enabled": …}`."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found
