"""The original's tables and statements on PostgreSQL, replayed as it sends them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

DDL = """
create schema dataflow;
set search_path to dataflow;
create table dataset (
    datasetid varchar, hostname varchar, database varchar, schemaname varchar, tablename varchar,
    username varchar, encryptedpass varchar
);
create index x_dataset on dataset (datasetid);
create table job (
    jobid varchar, itemtype varchar, datasetid varchar, itemvalue varchar, modified timestamp
);
create table datastatus (
    datasetid varchar, jobid varchar, dataid varchar, locktype varchar, status varchar,
    modified timestamp, primary key (datasetid, jobid, dataid)
);
"""

NEXT = """
select ready.dataid
from (select s.dataid
      from job i join datastatus s on s.datasetid = i.datasetid
      where i.jobid = %(job)s and i.itemtype = 'IN' and s.locktype = 'OUT' and s.status = 'READY'
      group by s.dataid
      having count(distinct i.datasetid) =
             (select count(distinct datasetid) from job where jobid = %(job)s and itemtype = 'IN')
     ) as ready
where not exists (
    select 1 from job i join datastatus s on s.datasetid = i.datasetid
    where i.jobid = %(job)s and i.itemtype = 'IN' and s.locktype = 'IN' and s.dataid = ready.dataid)
  and not exists (
    select 1 from job o join datastatus s on s.datasetid = o.datasetid
    where o.jobid = %(job)s and o.itemtype = 'OUT' and s.locktype = 'OUT'
      and s.dataid = ready.dataid and s.status <> 'RESUBMIT')
order by ready.dataid limit 1
"""


class Java:
    """Runs the original program repeatedly, over its own connection."""

    def __init__(self, url: str, name: str = "java") -> None:
        self.connection = psycopg.connect(
            url, autocommit=True, options="-c search_path=dataflow", application_name=name
        )

    def close(self) -> None:
        self.connection.close()

    def claim(self, job: str) -> str | None:
        """Take the next chunk under a lock of the whole table; None when there is none."""
        with self.claiming(job) as dataid:
            return dataid

    @contextmanager
    def claiming(self, job: str) -> Iterator[str | None]:
        """The claim's transaction, open while the body runs."""
        run = self.connection.execute
        with self.connection.transaction():
            run("lock datastatus in access exclusive mode")
            found = run(NEXT, {"job": job}).fetchone()
            if found:
                for datasetid, locktype in run(
                    "select distinct j.datasetid, j.itemtype from job j "
                    "join dataset d on d.datasetid = j.datasetid "
                    "where j.jobid = %s and j.itemtype in ('IN', 'OUT')",
                    (job,),
                ).fetchall():
                    changed = run(
                        "update datastatus set status = 'RUNNING', locktype = %s "
                        "where dataid = %s and datasetid = %s and jobid = %s",
                        (locktype, found[0], datasetid, job),
                    ).rowcount
                    if not changed:
                        run(
                            "insert into datastatus values (%s, %s, %s, %s, 'RUNNING', now())",
                            (datasetid, job, found[0], locktype),
                        )
            yield found[0] if found else None

    def end(self, job: str, dataid: str, status: str = "READY") -> None:
        """Settle a chunk, in two steps that a crash may come between."""
        self.end_outputs(job, dataid, status)
        self.end_inputs(job, dataid)

    def end_outputs(self, job: str, dataid: str, status: str) -> None:
        self.connection.execute(
            "update datastatus set status = %s "
            "where jobid = %s and dataid = %s and locktype = 'OUT'",
            (status, job, dataid),
        )

    def end_inputs(self, job: str, dataid: str) -> None:
        self.connection.execute(
            "delete from datastatus where jobid = %s and dataid = %s and locktype = 'IN'",
            (job, dataid),
        )

    def deleterun(self, job: str, dataid: str) -> None:
        """Forget a chunk: its rows in every dataset of the job, whoever wrote them."""
        self.connection.execute(
            "delete from datastatus where dataid = %s "
            "and datasetid in (select datasetid from job where jobid = %s)",
            (dataid, job),
        )


def is_deadlock(error: BaseException) -> bool:
    return bool(re.search("deadlock", str(error)))
