-- name: unqueue
-- Take a chunk out of the queue first, as every claimer does: the second one waits here.
delete from pending where jobid = :jobid and dataid = :dataid;

-- name: holders
-- Who is producing a chunk of one of a job's outputs, and since when.
select c.owner, cast(c.started as varchar), c.owner from claim c
where c.jobid = :jobid and c.dataid = :dataid and c.owner is not null
union all
select c.owner, cast(coalesce(c.started, s.modified) as varchar), 'job ' || s.jobid
from job o
    join datastatus s on s.datasetid = o.datasetid and s.dataid = :dataid
    left join claim c on c.jobid = s.jobid and c.dataid = s.dataid and c.owner is not null
where o.jobid = :jobid and o.itemtype = 'OUT' and s.locktype = 'OUT' and s.status = 'RUNNING';

-- name: dial
-- How long a job's claims last, and how long its scripts may take.
select coalesce(max(lease_seconds), :lease), max(time_limit) from jobpolicy where jobid = :jobid;
