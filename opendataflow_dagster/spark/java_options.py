"""What Spark's Java is started with: options, a file of settings, and an environment."""

import atexit
import codecs
import locale
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .java import needed_java
from .settings import FASTER_START, LEVEL, MASTER, OPTIONS, conf_folder, is_local


def driver_options(wanted: Mapping[str, str], short: bool) -> str:
    """Java's options of the driver: ours, then the person's, which win."""
    options = [FASTER_START] if short and is_local(wanted[MASTER]) else []
    theirs = wanted.get(OPTIONS, "")
    folder = conf_folder(os.environ)
    configured = folder and os.path.exists(os.path.join(folder, "log4j2.properties"))
    if not configured and "-Dlog4j" not in theirs:
        level = wanted.get(LEVEL, "WARN").lower()
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "log4j2.properties")
        options += [f'"-Dlog4j2.configurationFile=file:{file}"', f"-Dodf.spark.level={level}"]
        if level not in ("error", "fatal", "off"):
            options.append(f"-Dodf.spark.twice={level}")
    return " ".join([*options, theirs]).strip()


def warehouse() -> str:
    """Where tables without a place of their own go: not below the folder somebody works in."""
    folder = os.path.join(tempfile.gettempdir(), f"odf-warehouse-{os.urandom(8).hex()}")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def surroundings(wanted: Mapping[str, str]) -> Iterator[None]:
    """The environment that Spark's Java starts in; ours is again what it was afterwards.

    The settings go by a file that is gone in the end: on a command line, everybody could read them.
    """
    changed: dict[str, str | None] = {"SPARK_REMOTE": None}
    changed["JAVA_HOME"] = needed_java(vector="jdk.incubator.vector" in wanted.get(OPTIONS, ""))
    python = wanted.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    changed["PYSPARK_PYTHON"] = python or sys.executable
    if wanted.get("spark.driver.bindAddress") == "127.0.0.1":
        changed["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    if codecs.lookup(locale.getencoding()).name != "utf-8":  # Java couldn't name all files
        changed["LC_ALL"] = "C.UTF-8"
    handle, path = tempfile.mkstemp(prefix="odf-spark-", suffix=".conf")
    before = {key: os.environ.get(key) for key in (*changed, "PYSPARK_SUBMIT_ARGS")}
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{_escaped(key)}={_escaped(value)}\n" for key, value in wanted.items())
        theirs = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
        changed["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {shlex.quote(path)} {theirs}"
        _put(changed)
        yield
    finally:
        _put(before)
        os.unlink(path)


def _put(values: Mapping[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def _escaped(text: str) -> str:
    """A key or a value as Java's properties have it."""
    plain = re.sub(r"([\\=:#! ])", r"\\\1", text)
    return plain.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
