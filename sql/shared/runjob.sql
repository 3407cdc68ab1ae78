-- name: left
-- How many chunks of a job could be claimed; if it reads `today`, only today's.
select count(*) from pending where jobid = :jobid and (cast(:today as text) is null or dataid = :today);

-- name: awaited
-- What a job's other chunks wait for: other workers' claims, retries, and readers of what is to be produced again.
select
    (select count(*) from claim c where c.jobid = :jobid and c.owner is not null),
    (select count(*) from claim c where c.jobid = :jobid and c.owner is null and c.retry_at is not null),
    (select count(distinct c.dataid)
     from claim c
         join job i on i.jobid = c.jobid and i.itemtype = 'IN'
         join job o on o.datasetid = i.datasetid and o.itemtype = 'OUT'
         join datastatus s on s.datasetid = o.datasetid and s.jobid = o.jobid and s.dataid = c.dataid
     where c.owner is not null and c.jobid <> :jobid and o.jobid = :jobid
       and s.locktype = 'OUT' and s.status in ('PENDING', 'RESUBMIT', 'RERUN'));

-- name: live_claim
-- Who holds one chunk of a job.
select generation, owner, attempts from claim
where jobid = :jobid and dataid = :dataid and owner is not null;
