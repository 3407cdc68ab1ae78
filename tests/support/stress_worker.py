"""The crowd of the stress tests: workers, people who send chunks back, and the original program.

Usage: python -m tests.support.stress_worker ROLE URL FOLDER NAME SECONDS SEED TOTAL JOB…

Each writes what it did to a file of its own, which the tests count: nothing there is the store's.
While a chunk is made, a file in `running/` says so: to find it there already is a double claim.
Every chunk is a file in `data/`, too: one that changes while it is read is a torn read.
"""

import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

from opendataflow_dagster.errors import InputsChanged, Refused, StaleClaim
from opendataflow_dagster.model import new_owner
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.claims import force
from opendataflow_dagster.store.store import Store
from tests.support.original_program import Java
from tests.support.store_fixtures import connect


class Diary:
    """A file of lines, each on disk before its writer continues."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.file = os.open(folder / f"{name}.diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *words: object) -> None:
        os.write(self.file, ("\t".join(map(str, words)) + "\n").encode())

    def data(self, datasetids: Iterable[str], dataid: str) -> list[str]:
        """Return the current content of the chunks of some datasets."""
        files = [self.folder / "data" / f"{each}~{dataid}" for each in datasetids]
        return [file.read_text() if file.exists() else "raw" for file in files]

    @contextmanager
    def making(self, jobid: str, dataid: str) -> Iterator[None]:
        """Produce a chunk, as the only one who does."""
        written = OUTPUTS.get(jobid, [f"in{jobid.removeprefix('make')}1"])
        files = [self.folder / "data" / f"{each}~{dataid}" for each in written]
        for file in files:
            file.write_text("half written")
        mark = self.folder / "running" / f"{jobid}~{dataid}"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            self.note("double", jobid, dataid)
        self.note("made", jobid, dataid)
        yield
        for file in files:
            file.write_text(os.urandom(8).hex())
        mark.unlink(missing_ok=True)


OUTPUTS = {"join": ["out1", "out2"], "one": ["out"], "two": ["out"], "three": ["out"]}


def over(folder: Path) -> bool:
    return (folder / "over").exists()


def worker(store: Store, diary: Diary, jobs: list[str], dice: random.Random, end: float) -> None:
    """Claim and finish whatever there is, in batches of any size, until the test is over."""
    owner = new_owner()
    raced = 0
    insist = store.db.trouble

    def count(error: Exception) -> str:
        nonlocal raced
        trouble = insist(error)
        raced += trouble == "race"
        return trouble

    store.db.trouble = count  # type: ignore[method-assign]
    while time.time() < end and not over(diary.folder):
        dice.shuffle(jobs)
        idle = True
        for jobid in jobs:
            claims = store.claim(jobid, owner=owner, k=dice.choice([1, 1, 1, 3, 10]))
            reads = store.plan(jobid).reads
            read = {claim: diary.data(reads, claim.dataid) for claim in claims}
            for claim in claims:
                with diary.making(jobid, claim.dataid):
                    pass
            if claims:
                idle = False
                torn = {
                    claim.dataid: then
                    for claim, then in read.items()
                    if "half written" in then or then != diary.data(reads, claim.dataid)
                }
                try:
                    store.finish(claims)
                except InputsChanged as error:
                    for dataid in error.dataids:
                        diary.note("changed", jobid, dataid)
                        torn.pop(dataid, None)
                except StaleClaim:
                    diary.note("stale", jobid)
                    torn = {}
                for dataid, then in torn.items():
                    diary.note("torn", jobid, dataid, then)
        if idle:
            time.sleep(0.02)
    diary.note("raced", raced)


def java(url: str, diary: Diary, jobs: list[str], dice: random.Random, end: float) -> None:
    """The original program, as often as cron would start it if it were in a hurry."""
    program = Java(url)
    while time.time() < end and not over(diary.folder):
        jobid = dice.choice(jobs)
        dataid = program.claim(jobid)
        if dataid:
            with diary.making(jobid, dataid):
                pass
            program.end(jobid, dataid)
        time.sleep(dice.random() * 0.05)


def forcer(
    store: Store, diary: Diary, jobs: list[str], dice: random.Random, total: int, end: float
) -> None:
    """Resubmits a chunk and produces it at once, even while it is read."""
    until = time.time() + (end - time.time()) / 3
    while time.time() < until and not over(diary.folder):
        jobid = dice.choice([each for each in jobs if each != "join"])
        dataid = dice.randrange(total)
        with suppress(Refused):
            claim = force(store, jobid, str(dataid), owner=new_owner())
            with diary.making(jobid, claim.dataid):
                time.sleep(dice.random() * 0.01)
            store.finish(claim)
            diary.note("forced", jobid, dataid)
        time.sleep(0.02)


def person(
    store: Store,
    diary: Diary,
    jobs: list[str],
    dice: random.Random,
    total: int,
    end: float,
    status: str = "and status = 'READY'",
) -> None:
    """Resubmits chunks: finished ones, or chunks in any state."""
    connection = connect(store)
    mark = "?" if store.db.dialect == "sqlite" else "%s"
    until = time.time() + (end - time.time()) / 3
    while time.time() < until and not over(diary.folder):
        jobid, dataid = dice.choice(jobs), str(dice.randrange(total))
        statement = (
            f"update datastatus set status = 'RESUBMIT' where jobid = {mark} and dataid = {mark} "
            f"{status} and locktype = 'OUT'"
        )
        if dice.random() < 0.5:
            statement += (
                " and datasetid like '%1'"
                if store.db.dialect == "sqlite"
                else " and datasetid like '%%1'"
            )
        changed = connection.execute(statement, (jobid, dataid)).rowcount
        if changed:
            diary.note("sent back", jobid, dataid)
        time.sleep(0.002)
    connection.close()


def main(
    role: str, url: str, folder: str, name: str, seconds: str, seed: str, total: str, *jobs: str
) -> None:
    diary, dice, end = Diary(Path(folder), name), random.Random(seed), time.time() + float(seconds)
    store = open_store(url)
    try:
        if role == "worker":
            worker(store, diary, list(jobs), dice, end)
        elif role == "forcer":
            forcer(store, diary, list(jobs), dice, int(total), end)
        elif role == "java":
            java(url, diary, list(jobs), dice, end)
        elif role == "person":
            person(store, diary, list(jobs), dice, int(total), end)
        else:
            person(store, diary, list(jobs), dice, int(total), end, status="")
    except Exception as error:
        diary.note("error", type(error).__name__, repr(str(error)))
        raise
    diary.note("went home")


def read(folder: Path) -> SimpleNamespace:
    """Summarize the diaries: chunks produced and resubmitted, duplicates, errors, lost races."""
    from collections import Counter

    told = SimpleNamespace(
        made=Counter(),
        back=Counter(),
        doubles=[],
        errors=[],
        raced=0,
        stale=0,
        home=0,
        people=0,
        changed=Counter(),
        forced=0,
        torn=[],
    )
    for path in folder.glob("*.diary"):
        told.people += 1
        for line in path.read_text().splitlines():
            word, *rest = line.split("\t")
            if word == "made":
                told.made[tuple(rest)] += 1
            elif word == "sent back":
                told.back[tuple(rest)] += 1
            elif word == "changed":
                told.changed[tuple(rest)] += 1
            elif word == "forced":
                told.forced += 1
            elif word == "torn":
                told.torn.append(tuple(rest))
            elif word == "double":
                told.doubles.append(tuple(rest))
            elif word == "error":
                told.errors.append((path.stem, *rest))
            elif word == "stale":
                told.stale += 1
            elif word == "raced":
                told.raced += int(rest[0])
            elif word == "went home":
                told.home += 1
    return told


if __name__ == "__main__":
    main(*sys.argv[1:])
