-- name: probe
-- Write a row that the transaction takes back.
insert into datastatus (datasetid, jobid, dataid, locktype, status)
values ('odf doctor', 'odf doctor', 'odf doctor', 'OUT', 'PENDING');

-- name: jobs
-- Every job that may have something to claim.
select distinct jobid from job where itemtype = 'OUT' and jobid is not null order by jobid;

-- name: size
-- How many rows there are to compare.
select count(*) from datastatus;

-- name: ahead
-- Work that began or was renewed after :soon, and leases and retries that are due after :far; and how many seconds the
-- job's policy gives them.
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
