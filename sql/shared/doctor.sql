-- name: probe
-- Write a row in a transaction that is rolled back.
insert into datastatus (datasetid, jobid, dataid, locktype, status)
values ('odf doctor', 'odf doctor', 'odf doctor', 'OUT', 'PENDING');

-- name: jobs
-- Every job that may have something to claim.
select distinct jobid from job where itemtype = 'OUT' and jobid is not null order by jobid;

-- name: size
-- How many rows have to be compared.
select count(*) from datastatus;

-- name: ahead
-- Work that began or was renewed after :soon, and leases and retries that are due after :far; and how many
-- seconds the job's policy allows.
select 'lease', c.jobid, c.dataid, c.generation, c.owner, c.lease_end, p.lease_seconds
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is not null and (c.started > :soon or c.heartbeat > :soon or c.lease_end > :far)
union all
select 'retry', c.jobid, c.dataid, c.generation, null, c.retry_at, p.retry_delay
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is null and c.retry_at > :far
union all
select 'worker', w.jobid, '', 0, w.owner, w.lease_end, p.lease_seconds
from worker w left join jobpolicy p on p.jobid = w.jobid
where w.heartbeat > :soon or w.lease_end > :far
order by 1, 2, 3;

-- name: packs
-- How many READY chunks of each dataset are in a pack, written by an earlier version.
select f.datasetid, count(*)
from chunkfact f
where f.location like '%/_packs/pack-%.parquet#dataid=%'
  and exists (
      select 1 from datastatus s
      where s.datasetid = f.datasetid and s.dataid = f.dataid and s.generation = f.generation
        and s.locktype = 'OUT' and s.status = 'READY')
group by f.datasetid
order by f.datasetid;
