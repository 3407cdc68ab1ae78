-- Our sessions sort only where no index has the order. `nulls last`, which the index of the log's order hasn't, keeps them
-- from reading that index backwards, through the changes of all others, to the few of a chunk or of an execution.

-- name: latest
-- The newest change of some outputs: which execution made it, who and why.
select k.dataid, k.jobid, e.execution, e.who, e.why
from json_to_recordset(cast(:chunks as json)) as k(dataid text, jobid text)
    cross join lateral (
        select d.execution, d.who, d.why from dataevent d
        where d.dataid = k.dataid and d.datasetid = :datasetid and d.jobid = k.jobid and d.locktype = 'OUT'
        order by d.xid desc nulls last, d.seq desc limit 1) as e;

-- name: changes
-- An execution's last changes of the outputs of a job, the newest first.
select datasetid, dataid, status_before, status_after, generation, cast(extract(epoch from at) as double precision), who, why
from dataevent where execution = :execution and jobid = :jobid and locktype = 'OUT'
order by xid desc nulls last, seq desc limit :most;

-- name: earlier
-- Outputs of a job that aren't READY because of changes from before executions were recorded.
select s.datasetid, s.dataid, null, s.status, s.generation, cast(extract(epoch from e.at) as double precision), e.who, e.why
from datastatus s cross join lateral (
    select d.execution, d.at, d.who, d.why from dataevent d
    where d.dataid = s.dataid and d.datasetid = s.datasetid and d.jobid = s.jobid and d.locktype = 'OUT'
    order by d.xid desc nulls last, d.seq desc limit 1) as e
where s.jobid = :jobid and s.locktype = 'OUT' and s.status not in ('READY', 'PENDING') and e.execution is null;

-- name: recent
-- The newest executions: each with its job and the end of its last change.
select execution, jobid, cast(extract(epoch from max(at)) as double precision) as ended from dataevent
where execution is not null and at >= now() - :days * interval '1 day'
  and status_after in (select json_array_elements_text(cast(:words as json)))
group by execution, jobid order by ended desc limit :most;
