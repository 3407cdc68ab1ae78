-- name: dials
-- The dials of every job that sets any.
select jobid, {each dial: dial},
       case when paused_until >= '9999-01-01 00:00:00+00' then 'forever'
            else to_char(paused_until at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') end as pause
from jobpolicy where jobid is not null order by jobid;

-- name: add_datasets
-- Register datasets.
insert into dataset (datasetid, {each column of dataset: column})
select datasetid, {each column of dataset: column}
from json_to_recordset(cast(:rows as json)) as d(datasetid text, {each column of dataset: column text});

-- name: add_items
-- Write what jobs read, write and set in one statement, so that claimable chunks are computed once.
insert into job (jobid, itemtype, datasetid, itemvalue, modified)
select jobid, itemtype, datasetid, itemvalue, now()
from json_to_recordset(cast(:items as json)) as i(jobid text, itemtype text, datasetid text, itemvalue text);

-- name: remove_items
-- Delete what jobs read, write and set.
delete from job where jobid in (select value from json_array_elements_text(cast(:jobids as json)));

-- name: note_origins
-- Record who declares datasets and jobs.
insert into origin (kind, name, origin, who, revision, dials)
select kind, name, :origin, :who, :revision, dials
from json_to_recordset(cast(:rows as json)) as o(kind text, name text, dials text)
on conflict (kind, name, origin) do update set
    who = excluded.who, at = excluded.at, revision = excluded.revision, dials = excluded.dials;

-- name: disown
-- Delete all origins of datasets and jobs but one.
delete from origin as o where o.origin <> :origin and exists (
    select 1 from json_to_recordset(cast(:rows as json)) as k(kind text, name text) where k.kind = o.kind and k.name = o.name);

-- name: add_policies
-- Add rows of dials for jobs.
insert into jobpolicy (jobid) select value from json_array_elements_text(cast(:jobids as json))
on conflict (jobid) do nothing;

-- name: claimable
-- How many chunks a job with these inputs and outputs could claim, given the current statuses.
select count(*) from (
    select s.dataid from datastatus s
    where s.datasetid in (select value from json_array_elements_text(cast(:inputs as json)))
      and s.locktype = 'OUT' and s.status = 'READY' and s.jobid <> :jobid and s.dataid <> ''
      and (cast(:only as text) is null or s.dataid = :only)
    group by s.dataid having count(distinct s.datasetid) = :needed) as c
where not exists (
    select 1 from datastatus o
    where o.dataid = c.dataid and o.datasetid in (select value from json_array_elements_text(cast(:outputs as json)))
      and o.locktype = 'OUT' and coalesce(o.status, '') not in ('PENDING', 'RESUBMIT', 'RERUN'))
  and not exists (
    select 1 from datastatus i
    where i.dataid = c.dataid and i.datasetid in (select value from json_array_elements_text(cast(:inputs as json)))
      and i.jobid = :jobid and i.locktype = 'IN' and coalesce(i.status, '') not in ('FAILED', 'ERROR', 'RESUBMIT', 'RERUN'));

-- name: made
-- How many chunks of these datasets a job has of each status.
select status, count(distinct dataid) from datastatus
where datasetid in (select value from json_array_elements_text(cast(:outputs as json)))
  and jobid = :jobid and locktype = 'OUT'
group by status order by status;
