-- name: take_turns
-- Take turns with the other producers of a dataset.
select pg_advisory_xact_lock(hashtextextended(:datasetid, 79643));

-- name: number
-- A new generation.
select nextval('generation');

-- name: claim
-- Claim one chunk, unless somebody has claimed it.
insert into claim as c (jobid, dataid, generation, owner, started, heartbeat, lease_end)
values (:jobid, :dataid, cast(:generation as bigint), :owner, now(), now(), now() + :lease * interval '1 second')
on conflict (jobid, dataid) do update
    set generation = excluded.generation, owner = excluded.owner, runid = null,
        started = excluded.started, heartbeat = excluded.heartbeat, lease_end = excluded.lease_end,
        attempts = c.attempts + 1, retry_at = null
    where c.owner is null
returning generation, attempts;

-- name: lock
-- Lock inputs and outputs of a chunk, whatever their statuses, except a RUNNING output.
insert into datastatus as d (datasetid, jobid, dataid, locktype, status, modified, generation)
select i.datasetid, cast(:jobid as text), cast(:dataid as text), i.itemtype, 'RUNNING', now(),
       case when i.itemtype = 'OUT' then cast(:generation as bigint) else (
           select max(s.generation) from datastatus s
           where s.dataid = cast(:dataid as text) and s.datasetid = i.datasetid and s.locktype = 'OUT'
             and s.status = 'READY')
       end
from (select distinct itemtype, datasetid from job
      where jobid = cast(:jobid as text) and itemtype in ('IN', 'OUT') and datasetid <> 'today') as i
order by i.datasetid
on conflict (datasetid, jobid, dataid) do update
    set locktype = excluded.locktype, status = 'RUNNING', modified = excluded.modified,
        generation = excluded.generation
    where d.locktype is distinct from 'OUT' or d.status is distinct from 'RUNNING';
