"""Everything that workers, people and time can do to the tables, in any order, with a model."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from opendataflow_dagster.errors import InputsChanged, StaleClaim
from opendataflow_dagster.model import Claim, natural_key
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import MAX_LOSSES, Store
from tests.support.store_fixtures import (
    _rank,
    check,
    close,
    everything,
    expire,
    policy,
    put,
    register,
    sql,
    take,
)

JOBS = {
    "first": (["a"], ["b"]),
    "rival": (["a"], ["b"]),
    "second": (["a", "b"], ["c", "d"]),
    "third": (["c"], ["e"]),
    "seed": ([], ["a"]),
}
LATE = {"late": (["b", "e"], ["f"])}
DATAIDS = ["2", "10", "x"]
AGAIN = ("RESUBMIT", "RERUN")

Key = tuple[str, str, str]


class Row(NamedTuple):
    locktype: str
    status: str
    generation: int | None = None


class Held(NamedTuple):
    """A row of `claim`: live if it has an owner."""

    generation: int
    owner: str | None
    attempts: int = 1
    losses: int = 0
    retry: bool = False


class Machine(RuleBasedStateMachine):
    """The store, and what it must look like."""

    fresh: ClassVar[Any]
    done: ClassVar[Any]

    @initialize()
    def begin(self) -> None:
        self.store = type(self).fresh()
        self.rows: dict[Key, Row] = {}
        self.claims: dict[tuple[str, str], Held] = {}
        self.jobs = dict(JOBS)
        self.dials: dict[str, dict[str, Any]] = {}
        self.taken: list[Claim] = []
        self.published: dict[tuple[str, str], set[int]] = {}
        self.last = 0
        self.workers = 0
        for jobid, (ins, outs) in JOBS.items():
            register(self.store, jobid, ins, outs)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            type(self).done(self.store)

    # What the model knows

    def rank(self, jobid: str, dataid: str) -> int | None:
        ins, outs = self.jobs[jobid]
        rows = [(*key, *row[:2]) for key, row in self.rows.items() if key[2] == dataid]
        return _rank(jobid, set(ins), set(outs), rows)

    def dial(self, jobid: str, name: str) -> Any:
        return self.dials.get(jobid, {}).get(name)

    def free_inputs(self, jobid: str, dataid: str) -> None:
        self.rows = {
            key: row
            for key, row in self.rows.items()
            if not (key[1] == jobid and key[2] == dataid and row.locktype == "IN")
        }

    def settle(self, claim: Claim, before: str, after: str) -> int:
        """Move the outputs of one generation; return how many."""
        count = 0
        for key, row in self.rows.items():
            if key[1:] == (claim.jobid, claim.dataid) and row == ("OUT", before, claim.generation):
                self.rows[key] = Row("OUT", after, None if after == "RESUBMIT" else row.generation)
                count += 1
        return count

    def send_back(self, jobid: str, dataid: str, again: bool) -> None:
        """A person's change voids the claim; the job's other outputs go with it."""
        self.claims.pop((jobid, dataid), None)
        outs = self.jobs[jobid][1]
        for key, row in self.rows.items():
            mine = key[1:] == (jobid, dataid) and row.locktype == "OUT" and key[0] in outs
            made = again and row.status in ("READY", "FAILED", "ERROR", "RUNNING")
            if mine and (made or (row.status == "RUNNING" and row.generation is not None)):
                self.rows[key] = Row("OUT", "RESUBMIT")
        self.free_inputs(jobid, dataid)

    def changed(self, claim: Claim) -> bool:
        """Whether an input of a live claim was published since, or is being produced now."""
        for (datasetid, jobid, dataid), row in self.rows.items():
            if (jobid, dataid, row.locktype) == (claim.jobid, claim.dataid, "IN"):
                since = row.generation or claim.generation
                if any(each > since for each in self.published.get((datasetid, dataid), ())) or any(
                    (key[0], key[2], other[:2]) == (datasetid, dataid, ("OUT", "RUNNING"))
                    for key, other in self.rows.items()
                ):
                    return True
        return False

    def lost(self, claim: Claim) -> tuple[str, int]:
        """Return what its outputs become when a claim is lost, and how many there are."""
        key = (claim.jobid, claim.dataid)
        held = self.claims[key]
        most = self.dial(key[0], "max_losses") or MAX_LOSSES
        word = "HOLD" if held.losses + 1 >= most else "RESUBMIT"
        self.claims[key] = held._replace(owner=None, losses=held.losses + 1)
        self.free_inputs(*key)
        return word, self.settle(claim, "RUNNING", word)

    def by_hand(self, key: Key, status: str) -> Row:
        """Return what a row becomes with a status from a person: a new READY gets a generation."""
        before = self.rows.get(key, Row("OUT", "PENDING"))
        if status == before.status or status in (*AGAIN, "PENDING"):
            return Row("OUT", status, before.generation if status == before.status else None)
        known = self.published.setdefault((key[0], key[2]), set())
        released = before.status == "HOLD" and before.generation in known
        if status != "READY" or released:
            return Row("OUT", status, before.generation)
        [(number,)] = sql(
            self.store,
            "select generation from datastatus where datasetid = :d and jobid = :j and dataid = :i",
            **dict(zip("dji", key, strict=True)),
        )
        assert number > self.last
        self.last = number
        known.add(number)
        return Row("OUT", status, number)

    def is_live(self, claim: Claim) -> bool:
        held = self.claims.get((claim.jobid, claim.dataid))
        return held is not None and held[:2] == (claim.generation, claim.owner)

    # What workers do

    @rule(jobid=st.sampled_from([*JOBS, *LATE]), k=st.sampled_from([1, 1, 2, 5]), data=st.data())
    def claim(self, jobid: str, k: int, data: st.DataObject) -> None:
        if jobid not in self.jobs:
            return
        self.claim_next(jobid, k, data.draw(st.sampled_from([None, None, *DATAIDS])))

    @rule(
        jobid=st.sampled_from([*JOBS]),
        k=st.sampled_from([1, 2]),
        there=st.sets(st.sampled_from(DATAIDS)),
    )
    def claim_while_filling(self, jobid: str, k: int, there: set[str]) -> None:
        """A job was registered again: the queue may have wrong chunks, and lack others."""
        sql(
            self.store,
            "insert into fill (jobid) values (:j) on conflict (jobid) do update "
            "set datasetid = '', producer = '', dataid = ''",
            j=jobid,
        )
        sql(self.store, "delete from pending where jobid = :j", j=jobid)
        for dataid in there:
            sql(self.store, "insert into pending values (:j, :d, 1, '')", j=jobid, d=dataid)
        self.claim_next(jobid, k, None)

    def claim_next(self, jobid: str, k: int, only: str | None) -> None:
        ranks = {each: self.rank(jobid, each) for each in DATAIDS if only in (None, each)}
        order = sorted(
            (each for each, rank in ranks.items() if rank is not None),
            key=lambda each: (ranks[each], natural_key(each)),
        )
        concurrency = self.dial(jobid, "concurrency")
        if concurrency is not None:
            live = sum(
                key[0] == jobid and held.owner is not None for key, held in self.claims.items()
            )
            k = max(0, min(k, concurrency - live))
        self.workers += 1
        is_queued = jobid in self.store.unfilled()
        claims = take(self.store, jobid, f"w{self.workers}", k=k or 1, only=only)
        claimed = [claim.dataid for claim in claims]
        if is_queued and only is None:  # what is claimable is found, in any order
            assert len(claimed) <= k
            assert set(claimed) <= set(order)
            assert bool(claimed) == bool(order[:k])
        else:
            assert claimed == order[:k]
        before = self.last
        for claim in claims:
            assert claim.generation > before
            self.last = max(self.last, claim.generation)
            was = self.claims.get((jobid, claim.dataid), Held(0, None, 0))
            assert claim.attempts == was.attempts + 1
            self.claims[jobid, claim.dataid] = Held(
                claim.generation, claim.owner, was.attempts + 1, was.losses
            )
            ins, outs = self.jobs[jobid]
            for datasetid in ins:
                source = [
                    row.generation or 0
                    for key, row in self.rows.items()
                    if (key[0], key[2]) == (datasetid, claim.dataid) and row[:2] == ("OUT", "READY")
                ]
                assert source, "claimed with an input that isn't READY"
                self.rows[datasetid, jobid, claim.dataid] = Row(
                    "IN", "RUNNING", max(source) or None
                )
            for datasetid in outs:
                self.rows[datasetid, jobid, claim.dataid] = Row("OUT", "RUNNING", claim.generation)
        self.taken += claims

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        claim = self.draw(data, keep)
        if not self.is_live(claim):
            self.refused(lambda: self.store.finish(claim))
            return
        if self.changed(claim):
            _, settled = self.lost(claim)
            with pytest.raises(InputsChanged if settled else StaleClaim):
                self.store.finish(claim)
            return
        del self.claims[claim.jobid, claim.dataid]
        self.free_inputs(claim.jobid, claim.dataid)
        if self.settle(claim, "RUNNING", "READY"):
            self.store.finish(claim)
            for key, row in self.rows.items():
                if key[1:] == (claim.jobid, claim.dataid) and row.generation == claim.generation:
                    self.published.setdefault((key[0], key[2]), set()).add(claim.generation)
        else:
            with pytest.raises(StaleClaim):
                self.store.finish(claim)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), keep=st.booleans())
    def fail(self, data: st.DataObject, keep: bool) -> None:
        claim = self.draw(data, keep)
        if not self.is_live(claim):
            self.refused(lambda: self.store.fail(claim, "no"))
            return
        key = (claim.jobid, claim.dataid)
        if self.changed(claim):
            word, settled = self.lost(claim)
            if settled:
                assert self.store.fail(claim, "no") == (word, None)
            else:
                with pytest.raises(StaleClaim):
                    self.store.fail(claim, "no")
            return
        held = self.claims.pop(key)
        delay = self.dial(claim.jobid, "retry_delay") or 0
        again = held.attempts < (self.dial(claim.jobid, "max_attempts") or 1)
        word = "RESUBMIT" if again and not delay else "FAILED"
        if again:
            self.claims[key] = held._replace(owner=None, retry=delay > 0)
        self.free_inputs(*key)
        if self.settle(claim, "RUNNING", word):
            assert self.store.fail(claim, "no") == (word, delay if again else None)
        else:
            with pytest.raises(StaleClaim):
                self.store.fail(claim, "no")

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        claim = self.draw(data, keep=True)
        assert self.store.heartbeat([claim]) == ([] if self.is_live(claim) else [claim])

    def draw(self, data: st.DataObject, keep: bool) -> Claim:
        """Settle a claim; one that is kept may be settled again, by a zombie."""
        claim = data.draw(st.sampled_from(self.taken))
        if not keep:
            self.taken.remove(claim)
        return claim

    def refused(self, act: Callable[[], Any]) -> None:
        before = everything(self.store)
        with pytest.raises(StaleClaim):
            act()
        assert everything(self.store) == before

    # What time does

    @precondition(lambda self: any(held.owner for held in self.claims.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A lease runs out, and somebody recovers."""
        key = data.draw(st.sampled_from(sorted(k for k, held in self.claims.items() if held.owner)))
        held = self.claims[key]
        claim = Claim(*key, held.generation, held.owner or "", 1, 1.0, None)
        expire(self.store, claim)
        word, settled = self.lost(claim)
        recovered = [(*each[:3],) for each in self.store.recover(key[0])]
        assert recovered == ([(*key, word)] if settled else [])

    @precondition(lambda self: any(held.retry for held in self.claims.values()))
    @rule()
    def retries_come_due(self) -> None:
        sql(
            self.store,
            "update claim set retry_at = '2001-01-01 00:00:00' where retry_at is not null",
        )
        expected = set()
        for key, held in self.claims.items():
            if held.retry:
                self.claims[key] = held._replace(retry=False)
                claim = Claim(*key, held.generation, "", 1, 1.0, None)
                if self.settle(claim, "FAILED", "RESUBMIT"):
                    expected.add((*key, "RESUBMIT"))
        assert {(*each[:3],) for each in self.store.recover()} == expected

    # What people do

    @rule(
        dataid=st.sampled_from(DATAIDS),
        status=st.sampled_from(["READY", "READY", "READY", "RESUBMIT", "FAILED", "HOLD"]),
    )
    def bring_input(self, dataid: str, status: str) -> None:
        put(self.store, "a", dataid, status)
        self.rows["a", "loader", dataid] = self.by_hand(("a", "loader", dataid), status)

    @precondition(lambda self: any(row.locktype == "OUT" for row in self.rows.values()))
    @rule(
        data=st.data(),
        word=st.sampled_from(
            ["RESUBMIT", "RESUBMIT", "RERUN", "HOLD", "READY", "PENDING", "FAILED", "DELETE"]
        ),
    )
    def change_by_hand(self, data: st.DataObject, word: str) -> None:
        key = data.draw(
            st.sampled_from(sorted(k for k, row in self.rows.items() if row.locktype == "OUT"))
        )
        where = "where datasetid = :d and jobid = :j and dataid = :i"
        named = dict(zip("dji", key, strict=True))
        before = self.rows[key]
        if word == "DELETE":
            sql(self.store, f"delete from datastatus {where}", **named)
            del self.rows[key]
        else:
            sql(self.store, f"update datastatus set status = :s {where}", s=word, **named)
            self.rows[key] = self.by_hand(key, word)
        if key[1] in self.jobs and word != before.status:
            if word in AGAIN and before.status not in AGAIN:
                self.send_back(*key[1:], again=True)
            elif word == "PENDING" or (word == "DELETE" and before.status == "RUNNING"):
                self.send_back(*key[1:], again=False)
            elif word == "READY" and (held := self.claims.get(key[1:])) and held.owner is None:
                del self.claims[key[1:]]  # its failed attempts are forgotten

    @rule(dataid=st.sampled_from(DATAIDS))
    def plant(self, dataid: str) -> None:
        """A chunk that the job without inputs has to produce."""
        if ("a", "seed", dataid) not in self.rows:
            put(self.store, "a", dataid, "PENDING", jobid="seed")
            self.rows["a", "seed", dataid] = Row("OUT", "PENDING")

    @rule(
        jobid=st.sampled_from([*JOBS]),
        concurrency=st.sampled_from([None, 0, 1, 2]),
        max_attempts=st.sampled_from([None, 1, 2, 3]),
        max_losses=st.sampled_from([None, 1, 2]),
        retry_delay=st.sampled_from([None, 0, 3600]),
    )
    def turn_dials(self, jobid: str, **dials: int | None) -> None:
        policy(self.store, jobid, **dials)
        self.dials[jobid] = dials

    @precondition(lambda self: "late" not in self.jobs)
    @rule()
    def add_a_job(self) -> None:
        for jobid, (ins, outs) in LATE.items():
            register(self.store, jobid, ins, outs)
        self.jobs |= LATE

    @rule()
    def init_again(self) -> None:
        self.store.init()

    @rule()
    def fill_the_queue(self) -> None:
        assert self.store.fill() == []

    # What holds

    @invariant()
    def tables_are_as_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = sql(
            self.store,
            "select datasetid, jobid, dataid, locktype, status, generation from datastatus",
        )
        assert {row[:3]: Row(*row[3:]) for row in rows} == self.rows
        claims = sql(
            self.store,
            "select jobid, dataid, generation, owner, attempts, losses, "
            "case when retry_at is null then 0 else 1 end from claim",
        )
        assert {row[:2]: Held(*row[2:6], bool(row[6])) for row in claims} == self.claims
        check(self.store)

    @invariant()
    def one_owner_for_each_output(self) -> None:
        if not hasattr(self, "store"):
            return
        making = [
            (key[0], key[2])
            for key, row in self.rows.items()
            if row[:2] == ("OUT", "RUNNING")
            and self.is_live(
                Claim(
                    key[1],
                    key[2],
                    row.generation or 0,
                    self.claims.get(key[1:], Held(0, None)).owner or "",
                    1,
                    1.0,
                    None,
                )
            )
        ]
        assert len(making) == len(set(making))


def run(url: str, examples: int, steps: int) -> None:
    """Run the machine on one database, which is emptied between the examples."""
    store = open_store(url)
    store.init()

    def fresh() -> Store:
        for table in (
            "job",
            "jobpolicy",
            "datastatus",
            "claim",
            "chunkfact",
            "fill",
            "pending",
            "dataevent",
        ):
            sql(store, f"delete from {table}")
        store._idle.clear()
        return store

    machine = type(
        "OneDatabase", (Machine,), {"fresh": staticmethod(fresh), "done": staticmethod(id)}
    )
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)
    close(store)


def test_the_store_does_what_the_model_does(url: str) -> None:
    run(url, examples=40, steps=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_store_does_what_the_model_does_for_long(url: str) -> None:
    run(url, examples=1000, steps=80)
