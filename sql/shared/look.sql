-- name: counts
-- How many chunks each job has produced, by output and status.
select jobid, datasetid, status, count(*) as chunks
from datastatus
where locktype = 'OUT' and (cast(:which as text) is null or jobid = :which or datasetid = :which)
group by jobid, datasetid, status;

-- name: stale
-- How many chunks of each output are stale: READY, but produced from data that was replaced since.
select jobid, datasetid, count(*) as chunks from stale_chunk
where cast(:which as text) is null or jobid = :which or datasetid = :which
group by jobid, datasetid;

-- name: outputs
-- The outputs of jobs, written or not.
select distinct jobid, datasetid from job
where itemtype = 'OUT' and jobid is not null and datasetid is not null
  and (cast(:which as text) is null or jobid = :which or datasetid = :which);

-- name: claimable
-- How many chunks each job may claim now; if it reads `today`, only today's.
select p.jobid, count(*) as chunks from pending p
where (cast(:which as text) is null or p.jobid = :which
       or exists (select 1 from job o where o.jobid = p.jobid and o.itemtype = 'OUT' and o.datasetid = :which))
  and (p.dataid = :today or not exists (
      select 1 from job t where t.jobid = p.jobid and t.itemtype = 'IN' and t.datasetid = 'today'))
group by p.jobid;

-- name: claims
-- Who runs what, since when, and until when nobody else may claim it.
select c.jobid, c.dataid, c.generation, c.owner, c.runid, c.started, c.heartbeat, c.lease_end, c.attempts
from claim c
where c.owner is not null
  and (cast(:which as text) is null or c.jobid = :which
       or exists (select 1 from job o where o.jobid = c.jobid and o.itemtype = 'OUT' and o.datasetid = :which))
order by c.started, c.jobid, c.dataid;

-- name: policies
-- The dials that keep a job from claiming.
select jobid, concurrency, paused_until from jobpolicy;

-- name: squares
-- The outputs of jobs, a row for each chunk, in no particular order.
select jobid, datasetid, dataid, status from datastatus
where locktype = 'OUT' and (cast(:which as text) is null or jobid = :which or datasetid = :which)
union all
select p.jobid, o.datasetid, p.dataid, '' from pending p
    join (select distinct jobid, datasetid from job where itemtype = 'OUT') o on o.jobid = p.jobid
where (cast(:which as text) is null or p.jobid = :which or o.datasetid = :which)
  and (p.dataid = :today or not exists (
      select 1 from job t where t.jobid = p.jobid and t.itemtype = 'IN' and t.datasetid = 'today'))
  and not exists (select 1 from datastatus s
                  where s.dataid = p.dataid and s.datasetid = o.datasetid and s.jobid = p.jobid);

-- name: known
-- Whether a name is a job's or a dataset's at all.
select 1 from job where jobid = :which or datasetid = :which
union all select 1 from dataset where datasetid = :which
union all select 1 from datastatus where jobid = :which or datasetid = :which
limit 1;

-- name: flows
-- The pairs of datasets that a job connects.
select distinct i.datasetid, o.datasetid from job i join job o on o.jobid = i.jobid
where i.itemtype = 'IN' and o.itemtype = 'OUT' and i.datasetid is not null and o.datasetid is not null;
