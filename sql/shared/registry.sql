-- name: datasets
-- Every dataset.
select datasetid, {each column of dataset: column} from dataset order by datasetid;

-- name: add_dataset
-- Register a dataset.
insert into dataset (datasetid, {each column of dataset: column})
values (:datasetid, {each column of dataset: nullif(cast(:column as text), '')});

-- name: change_dataset
-- Change the columns of a dataset for which a value is given; an empty one clears.
update dataset set {each column of dataset: column = case when cast(:column as text) is null then column
    else nullif(cast(:column as text), '') end}
where datasetid = :datasetid;

-- name: items
-- What a job reads, writes and sets.
select itemtype, datasetid, itemvalue from job where jobid = :jobid;

-- name: jobs
-- The rows of a job, or of all jobs.
select jobid, itemtype, datasetid, itemvalue, modified from job
where cast(:jobid as text) is null or jobid = :jobid
order by jobid, itemtype, datasetid;

-- name: change_item
-- Give a job's variable another value.
update job set itemvalue = :value, modified = current_timestamp
where jobid = :jobid and itemtype = :variable and (itemvalue is null or itemvalue <> :value);

-- name: remove_job
-- Delete what a job reads, writes and sets.
delete from job where jobid = :jobid;

-- name: remove_variables
-- Delete what a job sets.
delete from job where jobid = :jobid and itemtype not in ('IN', 'OUT');

-- name: remove_policy
-- Delete a job's dials.
delete from jobpolicy where jobid = :jobid;

-- name: remove_dataset
-- Delete a dataset's registration.
delete from dataset where datasetid = :datasetid;

-- name: users
-- The jobs that read or write a dataset.
select distinct jobid from job where datasetid = :datasetid and jobid is not null order by jobid;

-- name: readers
-- The jobs that read what a job writes, and how many chunks of each may be claimed.
select i.jobid, (select count(*) from pending p where p.jobid = i.jobid)
from (select distinct r.jobid from job r join job w on w.datasetid = r.datasetid
      where r.itemtype = 'IN' and w.itemtype = 'OUT' and w.jobid = :jobid and r.jobid <> :jobid) i
order by i.jobid;

-- name: chunks
-- How many chunks a job has produced, or a dataset has, of each status.
select datasetid, status, count(*) from datastatus
where locktype = 'OUT'
  and (jobid = cast(:jobid as text) or (cast(:jobid as text) is null and datasetid = :datasetid))
group by datasetid, status order by datasetid, status;

-- name: live_claims
-- How many chunks of a job are claimed, and one of their owners.
select count(*), min(owner) from claim where jobid = :jobid and owner is not null;

-- name: add_policy
-- Add a row of dials.
insert into jobpolicy (jobid) values (:jobid) on conflict (jobid) do nothing;

-- name: set_{dial}
-- Set one dial of a job: a statement for each dial.
update jobpolicy set {dial} = :value, modified = current_timestamp where jobid = :jobid;

-- name: note_origin
-- Record who declares a dataset or a job.
insert into origin (kind, name, origin, who, revision) values (:kind, :name, :origin, :who, :revision)
on conflict (kind, name, origin) do update set
    who = excluded.who, at = excluded.at, revision = excluded.revision;

-- name: forget_origins
-- Delete the record of who declares a dataset or a job.
delete from origin where kind = :kind and name = :name;
