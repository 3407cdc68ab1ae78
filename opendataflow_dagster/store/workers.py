"""What workers are called, and which execution a worker's changes belong to."""

import os
import re
import time
from _thread import allocate_lock
from itertools import count

DAGSTER_RUN = "dagster:"
"""What the name of an execution begins with that is a run of Dagster."""

WORK_VARIABLE = "DATAFLOW_WORK"
"""Set in programs that `odf work` starts: what they claim is in its hands."""

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
