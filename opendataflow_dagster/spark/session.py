"""The Spark session of this process: starting it, noticing its end, explaining its errors."""

import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..config.settings import Settings
from ..errors import DataflowError, SessionError, WrongUse
from ..util.text import one_line
from .settings import (
    JAVA_OPTIONS,
    LOG_LEVEL,
    MASTER,
    REMOTE,
    WAREHOUSE,
    driver_options,
    given_conf,
    java_environment,
    listens,
    needed_java,
    public,
    spark_conf,
    warehouse,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECT_SECONDS = 10.0
"""Seconds that a server may take until it listens."""

DEPLOY_MODE = "spark.submit.deployMode"

_MASTERS = re.compile("yarn$|spark|k8s|local")
"""The beginnings of a valid master, as in spark-submit."""

_log = logging.getLogger("opendataflow_dagster")


class _SessionRequest:
    """The settings requested of this process's session, and those it already refused."""

    session: "SparkSession | None" = None
    asked: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}

    @classmethod
    def of(cls, session: "SparkSession", asked: Mapping[str, str]) -> None:
        cls.session, cls.asked, cls.refused = session, asked, {}


def spark_session(
    conf: Mapping[str, Any] | None = None,
    *,
    app: str = "odf",
    settings: Settings | None = None,
    short: bool = False,
) -> "SparkSession":
    """Return the session of this process: the running one, or a new one.

    A process can have only one classic session (one Java, one SparkContext), and starting it takes
    seconds. So it is reused; settings that can change while it runs are changed.

    Args:
        conf: Settings of Spark, which override all others; None leaves a key to Spark.
        app: The name of the application, if no setting gives one.
        settings: Settings from dataflow.properties and DATAFLOW_SPARK_…; they override our
            defaults.
        short: For runs of seconds: Java starts faster, but computes more slowly.
    """
    with session_lock:
        _require_pyspark()
        mask_logs()
        given = given_conf(settings, conf)
        session = _running_session()
        if session is not None:
            _adapt(session, given)
            return session
        wanted = spark_conf(settings, conf)
        wanted.setdefault("spark.app.name", app)
        if wanted.get(LOG_LEVEL, "ERROR").upper() in ("ERROR", "FATAL", "OFF"):
            _silence_what_is_raised()
        if REMOTE in wanted:
            session = _connect_session(dict(wanted))
        elif "PYSPARK_GATEWAY_PORT" in os.environ:
            session = _submitted_session(wanted, given)
        else:
            session = _launch_session(dict(wanted), short)
        _SessionRequest.of(session, wanted)
        return session


def refuse_impossible(settings: Settings | None) -> None:
    """Refuse, before anything is claimed, a session that can't start: without pyspark, or Java."""
    _require_pyspark()
    if "PYSPARK_GATEWAY_PORT" not in os.environ and REMOTE not in spark_conf(settings):
        needed_java()


def _require_pyspark() -> None:
    try:
        import pyspark.sql  # noqa: F401
    except ImportError as error:
        raise SessionError(
            f"Spark isn't installed: {error}. Run `pip install 'opendataflow-dagster[spark]'`."
        ) from None


def _silence_what_is_raised() -> None:
    """Keep pyspark from logging pages about exceptions that it raises as well."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    # When Java is gone (Ctrl-C ends both), py4j logs each call that failed, with its traceback.
    for name in ("py4j.clientserver", "py4j.java_gateway"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:  # otherwise somebody wants these messages
            logger.setLevel(logging.CRITICAL + 1)
    logging.getLogger().addFilter(_is_ours)


_SECRETS = re.compile(
    r"(\nspassword\ns|\nj)[^\n]+"  # in a command for Java: an option, a pickled function
    r'|(\bcommand: |key: "password"\s+value: )"(?:[^"\\]|\\.)*"'  # in a plan for Spark Connect
)


def mask_logs() -> None:
    """Keep passwords out of what py4j and the client of Spark Connect log at DEBUG.

    They log everything that goes to Java or a server: the password for a Java driver is among the
    options of a reader, that for PostgreSQL is in the pickled function which the tasks run.
    """
    from pyspark.logger import PySparkLogger

    for name in ("py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).addFilter(_mask)  # adding the same filter again does nothing
    PySparkLogger.getLogger("pyspark.sql.connect.logging").addFilter(_mask)


def _mask(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, str):
        record.msg = _SECRETS.sub(r"\1\2***", record.msg)
    return True


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a record isn't one of py4j's on the root logger, about errors that it also raises."""
    return record.msg not in (
        "Exception while sending command.",
        "KeyboardInterrupt while sending command.",
    )


# --- a session that is already running ---


def _running_session() -> "SparkSession | None":
    from pyspark.sql import SparkSession

    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        from pyspark.sql.connect.session import SparkSession as Remote

        found: Any = Remote.getActiveSession() or Remote._get_default_session()
        return found if found is not None and not found.is_stopped else None
    # Not getActiveSession(): that belongs to this thread, and the session may be another thread's.
    session = SparkSession._instantiatedSession
    if session is not None and has_ended(session):
        let_go(session)
        return None
    return session


def _adapt(session: "SparkSession", given: Mapping[str, str]) -> None:
    """Set what can be set while a session runs, and report once what can't."""
    if session is not _SessionRequest.session:  # somebody else started it
        _SessionRequest.of(session, {})
    new = {key: value for key, value in given.items() if _SessionRequest.asked.get(key) != value}
    if not new or new == _SessionRequest.refused:
        return
    fixed, refused = [], {}
    for key, value in new.items():
        now = _current_value(session, key)
        if now == value:
            continue
        if key not in (MASTER, REMOTE) and _try_set(session, key, value):
            _SessionRequest.asked = {**_SessionRequest.asked, key: value}
        else:
            refused[key] = value
            fixed.append(f"{key} stays {public(now) if now else 'unset'}, not {public(value)}")
    _SessionRequest.refused = refused
    if fixed:
        _log.warning(
            "A Spark session is already running in this process, so %s. End it first with "
            "`session.stop()`, or start another process.",
            "; ".join(fixed),
        )


def _current_value(session: "SparkSession", key: str) -> str | None:
    if key == REMOTE or (key == MASTER and is_remote(session)):
        return _SessionRequest.asked.get(key)
    found = session.conf.get(key, None)
    if found is None and not is_remote(session):
        found = session.sparkContext.getConf().get(key)
    return found


def _try_set(session: "SparkSession", key: str, value: str) -> bool:
    try:
        if not session.conf.isModifiable(key):
            return False
        session.conf.set(key, value)
    except Exception:
        return False
    return True


# --- a new one ---


def _connect_session(wanted: dict[str, str]) -> "SparkSession":
    from pyspark.sql import SparkSession

    address = wanted.pop(REMOTE)
    if not address.startswith("sc://"):
        raise WrongUse(
            f"{REMOTE} is {public(address)!r}, which isn't a Spark Connect server: it must be "
            "sc://HOST:PORT. For a session in this process set spark.master instead."
        )
    _wait_for(address, REMOTE)
    app = wanted.pop("spark.app.name")
    before = os.environ.get("SPARK_CONNECT_MODE_ENABLED")
    try:
        builder = SparkSession.builder.remote(address)
        session: Any = builder.appName(app).getOrCreate()
        session.version  # noqa: B018 - the first call: until now nothing went over the wire
    except Exception as error:
        if before is None:  # otherwise this process could never start a classic session
            os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
        raise SessionError(
            f"No Spark Connect server answers at {public(address)}: {_cause(error)}. Start it, "
            f"or correct {REMOTE}, then run `odf doctor`."
        ) from error
    server = [key for key, value in wanted.items() if not _try_set(session, key, value)]
    if server:
        _log.warning(
            "The Spark Connect server at %s ignores %s from clients: set it where the server is "
            "started.",
            public(address),
            ", ".join(sorted(server)),
        )
    return session


def _wait_for(address: str, key: str) -> None:
    """Refuse within seconds a server that Spark would try to reach for minutes."""
    if not listens(address, patience=CONNECT_SECONDS):
        raise SessionError(
            f"Nothing listens at {public(address)}, which {key} names. Start that server, or "
            f"correct {key}, then run `odf doctor`."
        )


def _launch_session(wanted: dict[str, str], short: bool) -> "SparkSession":
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if not _MASTERS.match(wanted[MASTER]):  # Spark's own error has 20 lines, and may name Java
        raise SessionError(
            f"Spark didn't start on {wanted[MASTER]}: that isn't a master, such as local, "
            f"local[8], spark://HOST:PORT, yarn or k8s://https://HOST:PORT. Correct {MASTER}, then "
            "run `odf doctor`."
        )
    if wanted.get(DEPLOY_MODE, "client").lower() != "client":
        raise SessionError(
            f"{DEPLOY_MODE} is {wanted[DEPLOY_MODE]}, but odf is the driver and runs here. Leave "
            "it out, or set it to client; the executors run on the cluster either way."
        )
    _wait_for(wanted[MASTER], MASTER)
    # Left over from an earlier Spark Connect session: pyspark would try to connect again.
    os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
    wanted[JAVA_OPTIONS] = driver_options(wanted, short)
    if not wanted[JAVA_OPTIONS]:
        del wanted[JAVA_OPTIONS]
    if wanted.get("spark.sql.catalogImplementation") != "hive":
        wanted.setdefault(WAREHOUSE, warehouse())
    try:
        with java_environment(wanted), _own_interrupt():
            builder: Any = SparkSession.builder
            # A Java that starts reads its settings from the file of `java_environment`. One that
            # runs since an earlier session has read its own: the builder has to bring them.
            if SparkContext._gateway is not None:
                builder = builder.config(map=wanted)
            return builder.getOrCreate()
    except DataflowError:
        raise
    except OSError as error:  # of this process or machine: not the master's fault
        raise SessionError(f"Spark didn't start: {_system_cause(error)}") from error
    except Exception as error:
        raise SessionError(
            f"Spark didn't start on {wanted[MASTER]}: {_cause(error)}. Correct {MASTER} or what "
            "it names, then run `odf doctor`."
        ) from error


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Keep this process's reaction to interrupts: pyspark replaces it with its own.

    Without a gap in which a signal would break the connection with Java halfway.
    """
    before, put = signal.getsignal(signal.SIGINT), signal.signal
    if before in (None, signal.default_int_handler):
        yield
        return

    def kept(number: int, handler: Any) -> Any:
        return before if number == signal.SIGINT else put(number, handler)

    signal.signal = kept
    try:
        yield
    finally:
        signal.signal = put


def _cause(error: BaseException) -> str:
    """Return the cause in a line, from what may be pages of Java."""
    text = str(getattr(error, "java_exception", None) or error).strip() or type(error).__name__
    found = next((line for line in text.splitlines() if line.strip()), "")
    return " ".join(re.sub(r"^[\w.$]+(?:Exception|Error): ", "", found).split()).rstrip(".")[:300]


def _system_cause(error: OSError) -> str:
    """Return what the operating system refused, and what to do about it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return (
            "the working folder of this process no longer exists. Change to a folder that "
            "exists, then start again."
        )
    what = error.strerror or str(error) or type(error).__name__
    where = f": {error.filename}" if error.filename else ""
    return f"{what}{where}. Correct that, then run `odf doctor`."


def _submitted_session(wanted: Mapping[str, str], given: Mapping[str, str]) -> "SparkSession":
    """Return the session of a script under spark-submit, whose options override our defaults."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # like without spark-submit
    SparkContext._ensure_initialized()
    submitted = dict(SparkConf(_jvm=SparkContext._jvm).getAll())
    ours = {key: value for key, value in wanted.items() if key in given or key not in submitted}
    builder: Any = SparkSession.builder
    return builder.config(map=ours).getOrCreate()


# --- the end of a session ---


# Reentrant: whoever starts a session may find a dead one, and ends that first.
session_lock = threading.RLock()
"""Held while the session of this process is started or ended."""

SPARK_ENDED = "Spark ended while it was working"


MORE_MEMORY = (
    "Give it more: spark.driver.memory in dataflow.properties (on a cluster spark.executor.memory, "
    "too), such as 4g; or collect fewer rows at once"
)

_OUT_OF_MEMORY = 52
"""The exit code with which Spark ends Java when memory runs out."""


def how_ended(session: Any) -> str:
    """Return in a line what ended the Java of a session, and what helps."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    java = None if is_remote(session) else getattr(gateway, "proc", None)
    code = None
    if java is not None:
        with suppress(Exception):  # it ends a moment after it stops answering
            code = java.wait(5)
    if code == _OUT_OF_MEMORY:
        return f"{SPARK_ENDED}: Java ran out of memory. {MORE_MEMORY}"
    if code == -signal.SIGKILL:
        return (
            f"{SPARK_ENDED}: Java was killed, as the system does when memory is short. Give the "
            "machine more memory, or Java less: spark.driver.memory in dataflow.properties"
        )
    why = (
        f"Java ended with exit code {code}"
        if code
        else ("Java was killed or ran out of memory, or its server is away")
    )
    return (
        f"{SPARK_ENDED}: {why}. If it lacked memory, raise spark.driver.memory in "
        "dataflow.properties"
    )


def is_remote(session: "SparkSession") -> bool:
    """Whether a session belongs to Spark Connect, without a context and a Java of its own."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_spark_frame(obj: Any) -> bool:
    """Whether an object is a Spark frame; doesn't import Spark to find out."""
    module = sys.modules.get("pyspark.sql")
    return module is not None and isinstance(obj, module.DataFrame)


def has_ended(session: Any) -> bool:
    """Whether a session has ended; for a Spark Connect server, as far as known here."""
    if is_remote(session):
        return bool(session.is_stopped)
    try:
        # Java may still run though its context has stopped: a lost master stops it.
        return session._sc._jsc is None or bool(session._sc._jsc.sc().isStopped())
    except Exception:  # Java isn't there
        return True


def ended_meanwhile(session: Any) -> str:
    """Return how the session ended, and clean it up; an empty string if it hasn't ended."""
    if not (has_ended(session) or (is_remote(session) and _is_gone(session))):
        return ""
    how = how_ended(session)
    let_go(session)
    return how


def let_go(session: Any) -> None:
    """End a session, even if its Java has ended, so that this process can start another."""
    with session_lock, warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        if is_remote(session):
            session.stop()
            return
        from pyspark import SparkContext

        if SparkContext._active_spark_context not in (None, session._sc):
            return  # another one has taken its place
        try:
            session.stop()
        finally:
            # Once more: if Java is gone, the first call may have stopped halfway.
            session._sc.stop()
            _forget()


def _forget() -> None:
    """Clear what pyspark keeps of a session, and of a Java process that has ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

    # `getOrCreate` would return the dead session, and a dead gateway would be called forever.
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    SQLContext._instantiatedContext = None
    gateway: Any = SparkContext._gateway
    if gateway is None:
        return
    try:
        gateway.jvm.System.nanoTime()
    except Exception:
        SparkContext._gateway = SparkContext._jvm = None
        with suppress(Exception):
            gateway.shutdown()
        if java := getattr(gateway, "proc", None):
            with suppress(Exception):
                java.stdin.close()
                java.wait(5)


def _is_gone(session: Any) -> bool:
    """Whether a Spark Connect server has ended, or has forgotten this session."""
    try:
        client = session.client
        if not listens(f"sc://{client._builder.endpoint}"):
            return True
        session.conf.get("spark.app.name", None)
    except Exception:
        return True
    return False


# --- Spark's errors in one line: its messages are pages with the reason somewhere ---


_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_RAGGED = re.compile(r"\[MALFORMED_CSV_RECORD\] Malformed CSV record: (.*?)(?: SQLSTATE|\n|$)")
_READ = re.compile(r"error while reading file (?:file:/*(?=/))?(.+?)\. +SQLSTATE")
_NOISE = ("Job aborted due to stage failure", "An error occurred while calling", "== SQL", "at ")


def in_a_line(error: BaseException) -> str | None:
    """Return the reason of an error that Spark raised; None for any other error."""
    package = type(error).__module__.partition(".")[0]
    if package not in ("pyspark", "py4j", "grpc"):
        return None
    text = str(error).strip()
    if "java.lang.OutOfMemoryError" in text:
        return f"Java ran out of memory. {MORE_MEMORY}"
    if _TRACE in text:  # from a user's function, in a worker: its own error comes last
        lines = text.rpartition(_TRACE)[2].splitlines()
        raised = next((at for at, line in enumerate(lines) if _RAISED.match(line)), None)
        if raised is not None:
            return one_line("\n".join(takewhile(_is_message, lines[raised:])))
    if (row := _RAGGED.search(text)) and (file := _READ.search(text)):
        return (
            f"{file[1]} has a row with more or fewer values than its header has columns: "
            f"{row[1]}. Correct the file."
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by:")]
    messages = [line for line in lines if not line.startswith(_NOISE)]
    return (causes or messages or [type(error).__name__])[-1 if causes else 0]


def _is_message(line: str) -> bool:
    """Whether a line belongs to the message; Java's own lines follow after an empty one."""
    return bool(line.strip()) and not line.startswith("\tat ")
