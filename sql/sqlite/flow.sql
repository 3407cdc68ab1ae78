-- name: dials
-- The dials of every job that sets any.
select jobid, {each dial: dial},
       case when paused_until >= '9999-01-01' then 'forever'
            else coalesce(strftime('%Y-%m-%dT%H:%M:%SZ', paused_until), paused_until) end as pause
from jobpolicy where jobid is not null order by jobid;

-- name: add_datasets
-- Register datasets.
insert into dataset (datasetid, {each column of dataset: column})
select value ->> 'datasetid', {each column of dataset: value ->> 'column'}
from json_each(:rows);

-- name: add_items
-- Write what jobs read, write and set in one statement, so that claimable chunks are computed once.
insert into job (jobid, itemtype, datasetid, itemvalue, modified)
select value ->> 'jobid', value ->> 'itemtype', value ->> 'datasetid', value ->> 'itemvalue',
       strftime('%Y-%m-%d %H:%M:%f', 'now')
from json_each(:items);

-- name: remove_items
-- Delete what jobs read, write and set.
delete from job where jobid in (select value from json_each(:jobids));

-- name: note_origins
-- Record who declares datasets and jobs.
insert into origin (kind, name, origin, who, revision, dials)
select value ->> 'kind', value ->> 'name', :origin, :who, :revision, value ->> 'dials'
from json_each(:rows)
where true
on conflict (kind, name, origin) do update set
    who = excluded.who, at = excluded.at, revision = excluded.revision, dials = excluded.dials;

-- name: disown
-- Delete all origins of datasets and jobs but one.
delete from origin as o where o.origin <> :origin and exists (
    select 1 from json_each(:rows) where value ->> 'kind' = o.kind and value ->> 'name' = o.name);

-- name: add_policies
-- Add rows of dials for jobs.
insert into jobpolicy (jobid) select value from json_each(:jobids) where true
on conflict (jobid) do nothing;

-- name: claimable
-- How many chunks a job with these inputs and outputs could claim, given the current statuses.
select count(*) from (
    select s.dataid from datastatus s
    where s.datasetid in (select value from json_each(:inputs))
      and s.locktype = 'OUT' and s.status = 'READY' and s.jobid <> :jobid and s.dataid <> ''
      and (cast(:only as text) is null or s.dataid = :only)
    group by s.dataid having count(distinct s.datasetid) = :needed) as c
where not exists (
    select 1 from datastatus o
    where o.dataid = c.dataid and o.datasetid in (select value from json_each(:outputs))
      and o.locktype = 'OUT' and coalesce(o.status, '') not in ('PENDING', 'RESUBMIT', 'RERUN'))
  and not exists (
    select 1 from datastatus i
    where i.dataid = c.dataid and i.datasetid in (select value from json_each(:inputs))
      and i.jobid = :jobid and i.locktype = 'IN' and coalesce(i.status, '') not in ('FAILED', 'ERROR', 'RESUBMIT', 'RERUN'));

-- name: made
-- How many chunks of these datasets a job has of each status.
select status, count(distinct dataid) from datastatus
where datasetid in (select value from json_each(:outputs))
  and jobid = :jobid and locktype = 'OUT'
group by status order by status;
