"""The settings that a Spark session starts with, and where each of them comes from."""

import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from ..config.settings import Settings, parse_properties
from ..errors import WrongUse

MASTER, REMOTE = "spark.master", "spark.remote"
LOG_LEVEL = "spark.log.level"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
WAREHOUSE = "spark.sql.warehouse.dir"

CONNECT_DEFAULTS = {
    # A chunk is a directory `dataid=007`: Spark would infer a number, and read it as 7.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}
"""Defaults that a session of Spark Connect gets, too: they change results, not only comfort."""

DEFAULTS = {
    **CONNECT_DEFAULTS,
    # Only errors on standard error: a cron line mails what a job prints there.
    LOG_LEVEL: "ERROR",
    # No UI: it costs start time, and two jobs on one machine would compete for its port.
    "spark.ui.enabled": "false",
    # Our own lines tell the progress; Spark's bar would be drawn over them.
    "spark.ui.showConsoleProgress": "false",
    # Spark keeps what it knows of finished jobs even without a UI. With the defaults (1,000 jobs,
    # 100,000 tasks) the driver's memory would grow with each chunk of a long run.
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "100",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.ui.retainedExecutions": "20",
    # No `_SUCCESS` beside the data: our note tells that a chunk is whole.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Chunks run in threads of one session. FIFO would let the job that came first have all cores.
    "spark.scheduler.mode": "FAIR",
}

# On a machine of its own, Spark would listen on the address of the host name: open to the network,
# and unreachable when a laptop changes networks.
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

FASTER_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A quarter less time until the first result, half as much again for bulk work."""


def spark_conf(
    settings: Settings | None = None,
    conf: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Everything a session is made with; of two that name a key, the later of these wins.

    Our defaults; MASTER or SPARK_REMOTE; spark-defaults.conf; dataflow.properties;
    DATAFLOW_SPARK_…; and the argument, where a value of None leaves the key to Spark.
    """
    given = given_conf(settings, conf, environ)
    if REMOTE in given:
        defaults = dict(CONNECT_DEFAULTS)
    else:
        master = given.setdefault(MASTER, "local[*]")
        defaults = dict(DEFAULTS)
        if is_local(master):
            # Spark's 200 are meant for a cluster: on one machine most would be tasks without rows.
            defaults["spark.sql.shuffle.partitions"] = str(max(2, _cores(master)))
        if is_local(master) or re.match(r"spark://(localhost|127\.[\d.]+|\[::1\])(:|$)", master):
            defaults |= LOOPBACK
    unset = {key for key, value in (conf or {}).items() if value is None and key != MASTER}
    return {key: value for key, value in {**defaults, **given}.items() if key not in unset}


def given_conf(
    settings: Settings | None,
    conf: Mapping[str, Any] | None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """What somebody has set, without our defaults: a master, or the address of a server."""
    values = settings.values if settings else {}
    layers = [
        ("the environment", _environment(environ)),
        ("spark-defaults.conf", _spark_defaults(environ)),
        (
            settings.path if settings and settings.path else "dataflow.properties",
            {key: value.strip() for key, value in values.items() if key.startswith("spark.")},
        ),
        ("the environment", _from_variables(values)),
        ("the argument `conf`", _checked(conf or {})),
    ]
    given: dict[str, str] = {}
    for origin, layer in layers:
        where = {key for key in (MASTER, REMOTE) if layer.get(key)}
        if len(where) == 2:
            raise WrongUse(
                f"Both {MASTER} and {REMOTE} are set in {origin}: a session runs on a master or "
                "speaks to a server of Spark Connect. Take one of them away."
            )
        if where:
            given = {key: value for key, value in given.items() if key not in (MASTER, REMOTE)}
        given |= {
            key: value for key, value in layer.items() if value or key not in (MASTER, REMOTE)
        }
    return given


def is_local(master: str) -> bool:
    """Whether everything runs on this machine, in the driver or started by it."""
    return re.match(r"local($|\[|-cluster\[)", master) is not None


def _cores(master: str) -> int:
    found = re.match(r"local\[(\d+)", master)
    if found:
        return int(found[1])
    return 1 if master == "local" else os.cpu_count() or 1


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Spark's own variables; of the two, its client looks for the server first."""
    if remote := environ.get("SPARK_REMOTE"):
        return {REMOTE: remote}
    return {MASTER: environ["MASTER"]} if environ.get("MASTER") else {}


def conf_folder(environ: Mapping[str, str]) -> str | None:
    """Where this machine's Spark is configured, if it is."""
    home = environ.get("SPARK_HOME")
    return environ.get("SPARK_CONF_DIR") or (os.path.join(home, "conf") if home else None)


def _spark_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    folder = conf_folder(environ)
    if folder is None:
        return {}
    try:
        with open(os.path.join(folder, "spark-defaults.conf"), encoding="utf-8") as file:
            found = parse_properties(file.read())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise WrongUse(
            f"{error.filename} can't be read: {error.strerror}. Correct its permissions, or "
            "point SPARK_CONF_DIR to another folder."
        ) from None
    return {key: value.strip() for key, value in found.items() if key.startswith("spark.")}


def _checked(conf: Mapping[str, Any]) -> dict[str, str]:
    for key in conf:
        if not key.startswith("spark."):
            raise WrongUse(
                f"Spark has no setting {key!r}: their names start with `spark.`, those of Hadoop "
                f"with `spark.hadoop.`. Write spark.{key} or spark.hadoop.{key}."
            )
    return {key: _text(value) for key, value in conf.items() if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _from_variables(values: Mapping[str, str]) -> dict[str, str]:
    """What DATAFLOW_SPARK_… sets, under the keys as Spark spells them.

    Variables have neither capitals nor dots: the spelling comes from our own keys, from COMMON_KEYS
    and from the properties file. A key that none of them has is taken for one in lower case.
    """
    flat = {key: value.strip() for key, value in values.items() if key.startswith("spark_")}
    in_file = [key for key in values if key.startswith("spark.")]
    spelled = {_flat(key): key for key in (*DEFAULTS, *LOOPBACK, *COMMON_KEYS, *in_file)}
    return {spelled.get(key, key.replace("_", ".")): value for key, value in flat.items()}


COMMON_KEYS = (
    MASTER,
    REMOTE,
    JAVA_OPTIONS,
    WAREHOUSE,
    "spark.driver.memory",
    "spark.driver.memoryOverhead",
    "spark.driver.maxResultSize",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.cores",
    "spark.executor.instances",
    "spark.local.dir",
    "spark.jars",
    "spark.jars.packages",
    "spark.sql.session.timeZone",
    "spark.sql.shuffle.partitions",
)


def _flat(key: str) -> str:
    return key.replace(".", "_").replace("-", "_").lower()


# --- the servers that a master or a remote names ---


DEFAULT_PORTS = {"sc": 15002, "spark": 7077}
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def public(address: str) -> str:
    """An address without its parameters, among which a token may be."""
    return re.split(r"(?<![/:])/|;", address)[0]


def listens(
    address: str, environ: Mapping[str, str] = os.environ, *, patience: float = 0.0
) -> bool:
    """Whether one of the servers of an address takes connections; True of an address without.

    A server that is just starting is waited for.
    """
    found = re.match(r"(sc|spark)://(.+)", public(address))
    if found is None or (found[1] == "sc" and any(environ.get(variable) for variable in PROXIES)):
        return True  # what a proxy reaches can't be known from here
    ends = time.monotonic() + patience
    while True:
        for part in found[2].split(","):
            host, _, port = part.rpartition(":") if re.search(r":\d+$", part) else (part, "", "")
            if _answers(host.strip("[]"), int(port or DEFAULT_PORTS[found[1]])):
                return True
        if time.monotonic() >= ends:
            return False
        time.sleep(0.5)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True
