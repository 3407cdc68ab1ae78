-- name: is_accepted
-- Whether an item is stored, for a server that lost its connection while accepting it.
select 1 from streamitem where jobid = :jobid and dataid = :dataid;

-- name: status
-- The status of a pipeline's chunk, and the result of its last run, or why it failed.
select s.jobid, s.dataid, s.status, s.generation, i.received, s.modified, f.rows, f.location,
       case when s.status not in ('READY', 'RUNNING', 'PENDING') then (
           select e.why from dataevent e
           where e.dataid = s.dataid and e.datasetid = s.datasetid and e.jobid = s.jobid
             and e.locktype = 'OUT' order by e.seq desc limit 1) end as reason,
       case when s.status not in ('READY', 'RUNNING', 'PENDING') then (
           select p.transformation from pipelinestep p
           where p.jobid = s.jobid and p.dataid = s.dataid and p.generation = s.generation
             and p.status = 'FAILED' order by p.step limit 1) end as transformation
from datastatus s
    left join streamitem i on i.jobid = s.jobid and i.dataid = s.dataid
    left join chunkfact f on f.datasetid = s.datasetid and f.dataid = s.dataid
        and f.generation = s.generation and f.jobid = s.jobid
where s.jobid = :jobid and s.dataid = :dataid and s.locktype = 'OUT'
order by s.datasetid limit 1;

-- name: failed
-- How many items of a job are FAILED now, found through the failures in history.
select count(*) from (select distinct dataid from dataevent where jobid = :jobid and status_after = 'FAILED') as once
where exists (
    select 1 from datastatus s
    where s.dataid = once.dataid and s.jobid = :jobid and s.locktype = 'OUT' and s.status = 'FAILED')
  and (select i.dataid from streamitem i where i.jobid = :jobid and i.dataid = once.dataid) is not null;

-- name: held
-- How many items of a job are on HOLD because they crashed too many workers, by their claims' counts.
select count(*) from claim c
where c.jobid = :jobid and c.owner is null and c.losses > 0
  and (select i.dataid from streamitem i where i.jobid = :jobid and i.dataid = c.dataid) is not null
  and (select min(s.status) from datastatus s
       where s.dataid = c.dataid and s.jobid = :jobid and s.locktype = 'OUT') = 'HOLD';

-- name: running
-- How many chunks of a job are being worked on.
select count(*) from claim where jobid = :jobid and owner is not null;

-- name: jobs
-- The jobs that take items or have taken some; takes a step per job.
with recursive seen(jobid) as (
    select min(jobid) from streamitem
    union all
    select (select min(i.jobid) from streamitem i where i.jobid > seen.jobid) from seen where seen.jobid is not null
)
select jobid from seen where jobid is not null union select jobid from streamtoken order by jobid;
