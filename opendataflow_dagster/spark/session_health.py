"""Whether a session of Spark still lives, and letting go of one that doesn't."""

import signal
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .master import listens

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

starting = threading.RLock()
"""Held by whoever makes the session of this process, or lets go of it."""

ENDED = "Spark has ended in mid-work"


MEMORY = (
    "Give it more: spark.driver.memory in dataflow.properties (on a cluster spark.executor.memory, "
    "too), such as 4g; or collect fewer rows at once"
)

_OUT_OF_MEMORY = 52
"""The exit code by which Spark ends Java then."""


def how_ended(session: Any) -> str:
    """In a line, what ended the Java of a session, and what helps."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    java = None if is_remote(session) else getattr(gateway, "proc", None)
    code = None
    if java is not None:
        with suppress(Exception):  # it ends a moment after it stops to answer
            code = java.wait(5)
    if code == _OUT_OF_MEMORY:
        return f"{ENDED}: Java ran out of memory. {MEMORY}"
    if code == -signal.SIGKILL:
        return (
            f"{ENDED}: Java was killed, as the system does when memory is short. Give the machine "
            "more, or Java less: spark.driver.memory in dataflow.properties"
        )
    why = (
        f"Java ended with exit code {code}"
        if code
        else ("Java was killed or out of memory, or its server is away")
    )
    return f"{ENDED}: {why}. If it lacked memory, raise spark.driver.memory in dataflow.properties"


def is_remote(session: "SparkSession") -> bool:
    """Whether a session is one of Spark Connect, without a context and a Java of its own."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def has_ended(session: Any) -> bool:
    """Whether a session is over; of a server of Spark Connect, only what is known here."""
    if is_remote(session):
        return bool(session.is_stopped)
    try:
        # Java may live on, and its context have stopped: a master that went takes it along.
        return session._sc._jsc is None or bool(session._sc._jsc.sc().isStopped())
    except Exception:  # Java isn't there
        return True


def ended_meanwhile(session: Any) -> str:
    """How the session has ended, if that made a call fail; then it is let go of."""
    if not (has_ended(session) or (is_remote(session) and _is_gone(session))):
        return ""
    told = how_ended(session)
    let_go(session)
    return told


def let_go(session: Any) -> None:
    """End a session, also one whose Java is gone, so that this process can start another."""
    with starting, warnings.catch_warnings(), suppress(Exception):
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
            session._sc.stop()  # once more: where Java is gone, the first may have stopped halfway
            _forget()


def _forget() -> None:
    """Clear what pyspark keeps of a session, and of a Java that is gone."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext

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
    """Whether a server of Spark Connect has ended, or has forgotten this session."""
    try:
        client = session.client
        if not listens(f"sc://{client._builder.endpoint}"):
            return True
        session.conf.get("spark.app.name", None)
    except Exception:
        return True
    return False
