-- name: take_turns
-- Nothing to do: a transaction is the only writer.
select :datasetid;

-- name: number
-- A new generation.
update generation set last = last + 1 returning last;

-- name: claim
-- Claim one chunk, unless somebody has claimed it.
insert into claim (jobid, dataid, generation, owner, started, heartbeat, lease_end)
values (:jobid, :dataid, :generation, :owner, strftime('%Y-%m-%d %H:%M:%f', 'now'),
        strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', :lease || ' seconds'))
on conflict (jobid, dataid) do update
    set generation = excluded.generation, owner = excluded.owner, runid = null,
        started = excluded.started, heartbeat = excluded.heartbeat, lease_end = excluded.lease_end,
        attempts = attempts + 1, retry_at = null
    where owner is null
returning generation, attempts;

-- name: lock
-- Lock inputs and outputs of a chunk, whatever their statuses, except a RUNNING output.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified, generation)
select i.datasetid, :jobid, :dataid, i.itemtype, 'RUNNING', strftime('%Y-%m-%d %H:%M:%f', 'now'),
       case when i.itemtype = 'OUT' then :generation else (
           select max(s.generation) from datastatus s
           where s.dataid = :dataid and s.datasetid = i.datasetid and s.locktype = 'OUT'
             and s.status = 'READY')
       end
from (select distinct itemtype, datasetid from job
      where jobid = :jobid and itemtype in ('IN', 'OUT') and datasetid <> 'today') as i
where true
on conflict (datasetid, jobid, dataid) do update
    set locktype = excluded.locktype, status = 'RUNNING', modified = excluded.modified,
        generation = excluded.generation
    where datastatus.locktype is not 'OUT' or datastatus.status is not 'RUNNING';
