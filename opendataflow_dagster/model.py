"""The words of the product: statuses, transitions, claims, facts, ids, and names of workers."""

import os
import re
import time
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import count
from typing import NamedTuple, Self

from .errors import WrongUse

Say = Callable[[str], object]

Tell = Callable[[int, int], object]
"""What is told how many chunks are done and how many have failed."""

RESULT = "DATAFLOW_RESULT"
"""The variable that names the file for what a script answers."""

DATASET_COLUMNS = {
    "hostname": "The host that has the data.",
    "database": "The database or the folder.",
    "schemaname": "The schema in the database.",
    "tablename": "The table or the file.",
    "username": "The user who reads and writes the data.",
    "encryptedpass": "The password, encrypted by `odf encrypt --dataset`.",
    "format": "The format of the data, such as csv or parquet.",
    "chunkcolumn": "The column that assigns a row to a chunk.",
    "domain": "The name of the domain: the datasets that share their dataids.",
    "writemode": "Whether a pipeline's run appends its rows to a file or table, or replaces them.",
    "options": "How to read CSV files from elsewhere: delimiter, quote, header, encoding, null, "
    "and schema (column and type) or strings (true, or a list of columns).",
}
"""The columns of the table `dataset` beside its key, in the table's order, and what each is.

`odf dataset add`, `odf dump` and `odf load`, the statements that read and write datasets, and the
history of registrations go by this list.
"""

LEASE_SECONDS = 120.0
"""Seconds that a claim lasts without a heartbeat, unless the job's policy says otherwise."""

MAX_LOSSES = 5
"""Lost claims in a row that put a chunk on HOLD, unless the job's policy says otherwise."""

FOLD_AFTER_SECONDS = 7 * 24 * 3600
"""Seconds until a finished item is folded, unless the job's policy says otherwise."""


class Dial(NamedTuple):
    """One thing that a job's policy can say."""

    meaning: str
    default: str
    """What holds when it isn't set, for a person."""
    least: int = 1
    unit: str = ""
    """`seconds` can also be given as 30m or 2h; a `time` is a moment, and has no least value."""
    words: tuple[str, ...] = ()
    """What it can be set to, if it is no number."""


DIALS = {
    "concurrency": Dial(
        "chunks of this job that run in parallel", "the number of workers", least=0
    ),
    "max_attempts": Dial("attempts before a chunk is FAILED", "1"),
    "retry_delay": Dial("seconds before a retry", "0", least=0, unit="seconds"),
    "lease_seconds": Dial(
        "seconds without a heartbeat until a worker counts as lost",
        f"{LEASE_SECONDS:.0f}",
        unit="seconds",
    ),
    "batch_size": Dial(
        "chunks that a worker claims at once in `odf run --all` or Dagster, at most 1000",
        "1, or @spark_job(batch=)",
    ),
    "time_limit": Dial("seconds after which a chunk is stopped", "none", unit="seconds"),
    "paused_until": Dial("no chunk is claimed before this time", "not paused", unit="time"),
    "every_minutes": Dial(
        "minutes between two launches of a schedule, or two new runs of a pipeline",
        "whenever chunks are ready; no new runs",
    ),
    "max_losses": Dial(
        "lost workers or changed inputs in a row after which a chunk is on HOLD", f"{MAX_LOSSES}"
    ),
    "fold_after": Dial(
        "seconds after which a READY item is folded: its rows leave the tables",
        f"{FOLD_AFTER_SECONDS} (7 days)",
        least=60,
        unit="seconds",
    ),
    "on_stale": Dial(
        "what a Dagster run does with a stale READY chunk",
        "auto: remake it for a person who selects it alone, and for automations",
        words=("auto", "skip", "remake"),
    ),
}
"""The dials of a job: the columns of the table `jobpolicy`, in the table's order.

`odf policy`, the statements that turn and list dials, and the history of registrations go by this
list. A new one goes to the end: SQLite's history compares texts that have the columns in order.
"""


class Status(StrEnum):
    """The status of a chunk of a dataset, in its OUT row."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    READY = "READY"
    FAILED = "FAILED"
    RESUBMIT = "RESUBMIT"
    HOLD = "HOLD"


PENDING, RUNNING, READY, FAILED, RESUBMIT, HOLD = Status

ABSENT = ""
"""No row at all: nothing is known of the chunk."""

STRENGTH = (PENDING, RESUBMIT, FAILED, HOLD, READY, RUNNING)
"""Of a chunk that several jobs have rows for, the last of these statuses counts."""

URGENCY = (READY, ABSENT, PENDING, RESUBMIT, RUNNING, HOLD, FAILED)
"""Which status a square shows that stands for several chunks: the last of these that is there."""

WORDS: dict[str, Status] = {status.value: status for status in Status} | {
    "ERROR": FAILED,
    "RERUN": RESUBMIT,
}
"""Every word that is understood, and the status that it is read as: two are of older versions."""

TRANSITIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "claim": {RUNNING: (ABSENT, PENDING, RESUBMIT)},
    "force": {RUNNING: (ABSENT, PENDING, READY, FAILED, RESUBMIT, HOLD)},
    "finish": {READY: (RUNNING,)},
    "fail": {FAILED: (RUNNING,), RESUBMIT: (RUNNING,)},
    "give back": {RESUBMIT: (RUNNING,)},
    "interrupt": {RESUBMIT: (RUNNING,), HOLD: (RUNNING,)},
    "terminate": {HOLD: (RUNNING,)},
    "lose": {RESUBMIT: (RUNNING,), HOLD: (RUNNING,)},
    "retry": {RESUBMIT: (FAILED,)},
    "recover": {RESUBMIT: (RUNNING,)},
    "offer": {PENDING: (ABSENT,)},
    "split": {PENDING: (ABSENT,), READY: (ABSENT,)},
    "ready": {READY: (ABSENT, PENDING, RESUBMIT, FAILED)},
    "resubmit": {RESUBMIT: (READY, FAILED, HOLD)},
    "hold": {HOLD: (ABSENT, PENDING, RESUBMIT, READY, FAILED)},
    "release": {status: (HOLD,) for status in (PENDING, RESUBMIT, READY, FAILED)},
}
"""Every legal transition of an OUT row: act → status after → statuses before.

A test does each act to a row of each status, and finds these transitions and no others.
`docs/statuses.md` draws them.
"""


def read_status(word: str | None) -> str:
    """The status that a word in the tables stands for: an unknown one, or none, holds the chunk."""
    return ABSENT if word == ABSENT else WORDS.get(word or "", HOLD)


class Effect(StrEnum):
    """What one row of datastatus means for a job that would claim the chunk."""

    FREE = "free"
    """Nothing, or a row that the claim may write over."""
    AGAIN = "again"
    """The job's own output is to be made again: first in the queue."""
    CONSUMED = "consumed"
    """The job has consumed this input: it runs again only if an output is to be made again."""
    AVAILABLE = "available"
    """An input is there."""
    MISSING = "missing"
    """A row of an input that isn't there."""
    READ = "read"
    """Another job reads what this one would write: LOCKED while that job has an output RUNNING.

    The view `claim_row` tells which of the two it is.
    """
    LOCKED = "LOCKED"
    HELD = "HELD"
    ALREADY_DONE = "ALREADY_DONE"
    DATA_NOT_READY = "DATA_NOT_READY"


BLOCKING = (Effect.LOCKED, Effect.HELD, Effect.ALREADY_DONE, Effect.DATA_NOT_READY)
"""The effects that forbid a claim, and the codes of its refusal: the most telling one first."""


def effect(itemtype: str, own: bool, locktype: str | None, word: str | None) -> Effect:
    """What a row means for a job to which its dataset is an input (IN) or an output (OUT).

    `own` tells whether it is the job's own row. The rule stands here, in the function `effect` of
    sql/postgres/triggers.sql and in the view `claim_row` of sql/sqlite/triggers.sql; a test
    compares the three for every word. A job may claim a chunk if no row blocks it, every input is
    available, and an input or a row of its own says that the chunk exists.
    """
    status = read_status(word or None)
    if itemtype == locktype == "OUT":
        if status == RUNNING:
            return Effect.LOCKED
        if status == READY:
            return Effect.ALREADY_DONE
        if status == RESUBMIT:
            return Effect.AGAIN if own else Effect.FREE
        return Effect.FREE if status == PENDING else Effect.HELD
    if not own:
        if itemtype == "IN" and locktype == "OUT":
            if status == RUNNING:
                return Effect.DATA_NOT_READY
            return Effect.AVAILABLE if status == READY else Effect.MISSING
        is_reader = itemtype == "OUT" and locktype == "IN" and word == RUNNING
        return Effect.READ if is_reader else Effect.FREE  # of two readers, neither minds
    if itemtype == locktype == "IN":
        if status == RUNNING:
            return Effect.LOCKED
        if word == "DONE":
            return Effect.CONSUMED
        return Effect.FREE if status in (FAILED, RESUBMIT) else Effect.HELD
    # A lock of another type, from when the job was another one, has the key of the claim's row.
    free = status == RESUBMIT or (itemtype == "OUT" and status == PENDING)
    return Effect.FREE if free else Effect.LOCKED


class Claim(NamedTuple):
    """The exclusive right of one execution to produce one chunk."""

    jobid: str
    dataid: str
    generation: int
    owner: str
    attempts: int
    lease: float
    time_limit: float | None
    forced: bool = False
    """Whether it was claimed whatever the inputs say: they may change, too."""


class Fact(NamedTuple):
    """What is known of one produced chunk of a dataset."""

    datasetid: str
    dataid: str
    location: str | None = None
    rows: int | None = None
    bytes: int | None = None
    fingerprint: str | None = None
    validated: bool | None = None
    checks: str | None = None
    schema: str | None = None
    replaces: bool | None = None
    """Whether the chunk is in the place of all others of its dataset."""
    metadata: str | None = None
    """What its job tells of it otherwise, as an object of JSON."""
    code: str | None = None
    """Which code made it."""


class Plan(NamedTuple):
    """What a job reads and writes, and what its claims must take care of."""

    jobid: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    rivals: tuple[str, ...]
    limited: bool
    batch_size: int | None = None

    @classmethod
    def of_rows(cls, jobid: str, rows: Sequence[tuple]) -> Self:
        """A plan from the rows of a job: (itemtype, datasetid, value), those of now with dials.

        Rows of now also say how many jobs write the dataset, the concurrency, and the batch size.
        """
        inputs = tuple(sorted({row[1] for row in rows if row[0] == "IN" and row[1]}))
        outputs = tuple(sorted({row[1] for row in rows if row[0] == "OUT" and row[1]}))
        environment = tuple(
            (row[0], row[2] or "") for row in rows if row[0] and row[0] not in ("IN", "OUT")
        )
        if not rows or len(rows[0]) == 3:
            return cls(jobid, inputs, outputs, environment, (), False)
        shared = {row[1] for row in rows if row[0] == "OUT" and row[1] and row[3] > 1}
        limited = any(row[4] is not None for row in rows)
        rivals = tuple(sorted(shared))
        return cls(jobid, inputs, outputs, environment, rivals, limited, rows[0][5])

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs that have rows: `today` is a date, not data."""
        return tuple(datasetid for datasetid in self.inputs if datasetid != "today")

    @property
    def today(self) -> bool:
        return "today" in self.inputs

    @property
    def flaw(self) -> str:
        """Why this job can't be run at all, or nothing."""
        if not (self.inputs or self.outputs):
            return f"Job {self.jobid!r} isn't registered"
        if not self.outputs:
            return f"Job {self.jobid!r} writes no dataset, so nothing could tell what it has done"
        both = sorted(set(self.inputs) & set(self.outputs))
        if both:
            return (
                f"Job {self.jobid!r} reads and writes {both[0]!r}: it would run on its own result"
            )
        return ""


class Failure(NamedTuple):
    """How a failed claim was settled."""

    status: str
    retry_in: float | None


class Stop(NamedTuple):
    """Why work was interrupted; with `hold`, a person wants it not to start again by itself."""

    why: str
    hold: bool = False


LOST = "LOST"
"""How a chunk ended whose claim was lost: nothing of it was settled."""

GIVEN_BACK = "GIVEN BACK"
"""How a chunk ended with which nothing was begun: others may claim it."""


class ChunkOutcome(NamedTuple):
    """How one chunk ended: the script's exit code, and what the chunk is now."""

    code: int
    status: str
    retry_in: float | None = None
    reason: str = ""
    interrupted: bool = False
    """Whether the work was ended from outside: that is no failure."""


class Outcome(NamedTuple):
    """How a whole run ended: its exit code, and how many chunks ended how."""

    code: int
    done: int = 0
    failed: int = 0

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.code or self.done or self.failed)

    def and_then(self, later: "Outcome") -> "Outcome":
        """How both ended: the code of a signal, else of a failure, else the larger one."""
        codes = {self.code, later.code} - {0}
        stopped = max((exit_code for exit_code in codes if exit_code >= 128), default=0)
        code = stopped or (1 if 1 in codes else max(codes, default=0))
        return Outcome(code, self.done + later.done, self.failed + later.failed)


class Recovered(NamedTuple):
    """A chunk that was settled for a run that didn't come back."""

    jobid: str
    dataid: str
    status: str
    reason: str


class Lost(NamedTuple):
    """A claim whose worker is lost: how often the chunk was lost so far, and the limit."""

    jobid: str
    dataid: str
    generation: int
    owner: str
    losses: int
    most: int

    def verdict(self, why: str = "", may_hold: bool = True) -> tuple[Status, str]:
        """What the chunk becomes, and the reason for its history."""
        told = f"{self.owner} didn't come back: claim {self.losses} of {self.most} lost"
        if why:
            told = f"{why}: {self.owner} lost claim {self.losses} of {self.most}"
        return (HOLD if may_hold and self.losses >= self.most else RESUBMIT), told


# What may be the id of a dataset, a job or a chunk; their natural order; and names misspelled.


MAX_ID_BYTES = 500
"""Bytes of an id: a job's, a chunk's and its natural key must fit one index row of PostgreSQL."""

_DIGITS = re.compile("[0-9]+")
_HIJACKS = (  # compiled where it is used: most runs don't pay for it
    r"(PATH|IFS|ENV|BASH_ENV|SHELLOPTS|BASHOPTS|PS4|CDPATH|GLOBIGNORE|PROMPT_COMMAND|HOME|SHELL|USER"
    r"|LOGNAME|TMPDIR|PASSKEY.*|LD_.*|DYLD_.*|PYTHON.*|PERL.*|RUBY.*|NODE_.*|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS"
    r"|GCONV_PATH|LOCPATH|NLSPATH|MALLOC_.*|GLIBC_.*|BASH_FUNC_.*|DATAFLOW_.*|dataflow_.*|dataid|jobid)"
)


def natural_key(dataid: str) -> str:
    """A sort key by which 2 comes before 10: each run of digits is led by its length."""
    return _DIGITS.sub(_led_by_length, dataid)


def check_id(kind: str, value: str) -> str:
    """Return the id if it can be stored unchanged; `kind` is a word for messages."""
    if not value:
        raise WrongUse(f"The {kind} is empty. Give it a name.")
    if "\0" in value:
        raise WrongUse(f"The {kind} {_shown(value)} has a NUL character, which can't be stored.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise WrongUse(
            f"The {kind} {_shown(value)} isn't valid Unicode. Encode it as UTF-8."
        ) from None
    if size > MAX_ID_BYTES:
        raise WrongUse(f"The {kind} {_shown(value)} has {size} bytes. Use {MAX_ID_BYTES} at most.")
    if kind != "dataid" and any(
        ord(letter) < 32 or ord(letter) == 127 or letter == "=" for letter in value
    ):
        raise WrongUse(
            f"The {kind} {_shown(value)} has a control character or '=', so it can't be part of an "
            "environment variable's name. Give it another name."
        )
    return value


def check_variable(name: str) -> str:
    """The name of a job's environment item, if it can't hijack the process that it is given to."""
    if hijacks(name):
        raise WrongUse(
            f"A job's environment can't set {name}: it would change what the process itself runs. "
            "Choose another name and read it in the script."
        )
    return check_id("environment item", name)


def check_text(kind: str, value: str | None) -> None:
    """Refuse a text that no database can store unchanged, or no process can receive."""
    if value is None:
        return
    if "\0" in value:
        raise WrongUse(f"The {kind} has a NUL character, which can't be stored. Remove it.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WrongUse(f"The {kind} isn't valid Unicode. Encode it as UTF-8.") from None


def hijacks(name: str) -> bool:
    return re.fullmatch(_HIJACKS, name) is not None


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 40 else value[:37] + "...")


def _led_by_length(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    return f"{len(number):03d}{number}"


# What workers are called, and which execution a worker's changes belong to.


DAGSTER_RUN = "dagster:"
"""What the name of an execution begins with that is a run of Dagster."""

WORK_VARIABLE = "DATAFLOW_WORK"
"""Set in programs that `odf work` starts: what they claim is in its hands."""

WORK_EVENTS_VARIABLE = "DATAFLOW_WORK_EVENTS"
"""The file in which a program that runs all chunks of a job tells `odf work` of each."""

WORK_OWNER = " of odf work"
"""What the names of workers end in who work for `odf work`."""

RUN_SIGNATURE = "dagster run "
"""How a run of Dagster signs what it does to chunks before it claims them; its number follows."""

ITEM_WORKER = " of items"
"""What the name of a worker ends with that works on items as they come."""

ITEMS_SECONDS = 600
"""Seconds for which the items of a job count as one execution."""

_WORKER = re.compile(
    r"(?P<process>.+@.+:\d+:[0-9a-f]{8})\.\d+(?: of odf work)?(?: of (?:run (?P<run>.+)|items))?"
)

_processes: dict[int, str] = {}
"""What this process, and those that it was forked from, are called."""

_naming = allocate_lock()  # `threading` takes a cold start milliseconds

_workers = count(1)


def new_owner() -> str:
    """A name for one worker that no other has had: its process, a random part, and a number."""
    suffix = WORK_OWNER if WORK_VARIABLE in os.environ else ""
    return f"{_process(os.getpid())}.{next(_workers)}{suffix}"  # a fork is another process


def _process(pid: int) -> str:
    with _naming:
        if pid not in _processes:
            user = os.environ.get("USER") or os.getuid()
            _processes[pid] = f"{user}@{os.uname().nodename}:{pid}:{os.urandom(4).hex()}"
        return _processes[pid]


def execution_of(who: str, act: str = "") -> str:
    """Which execution a worker's changes belong to: its process, a Dagster run, or some items.

    Empty if it is no worker, or settles items: then the triggers tell, by what is RUNNING, or by
    the transaction.
    """
    found = _WORKER.fullmatch(who)
    if found is None:
        # A run of Dagster also sends chunks back that it is asked to make again, as no worker.
        run = who.removeprefix(RUN_SIGNATURE)
        return DAGSTER_RUN + run if run != who else ""
    if found["run"]:
        return DAGSTER_RUN + found["run"]
    if who.endswith(ITEM_WORKER):
        return f"items:{int(time.time()) // ITEMS_SECONDS}" if act == "claim" else ""
    return found["process"]
