-- name: datasets
-- Every dataset.
select datasetid, hostname, database, schemaname, tablename, username, encryptedpass, format, chunkcolumn,
       domain, writemode, options
from dataset order by datasetid;

-- name: add_dataset
-- Register a dataset.
insert into dataset (datasetid, hostname, database, schemaname, tablename, username, encryptedpass, format,
                     chunkcolumn, domain, writemode, options)
values (:datasetid, nullif(cast(:hostname as text), ''), nullif(cast(:database as text), ''),
        nullif(cast(:schemaname as text), ''), nullif(cast(:tablename as text), ''),
        nullif(cast(:username as text), ''), nullif(cast(:encryptedpass as text), ''),
        nullif(cast(:format as text), ''), nullif(cast(:chunkcolumn as text), ''),
        nullif(cast(:domain as text), ''), nullif(cast(:writemode as text), ''),
        nullif(cast(:options as text), ''));

-- name: change_dataset
-- Change what is told of a dataset: a value that is given, and only that; an empty one clears.
update dataset set
    hostname = case when cast(:hostname as text) is null then hostname
                    else nullif(cast(:hostname as text), '') end,
    database = case when cast(:database as text) is null then database
                    else nullif(cast(:database as text), '') end,
    schemaname = case when cast(:schemaname as text) is null then schemaname
                      else nullif(cast(:schemaname as text), '') end,
    tablename = case when cast(:tablename as text) is null then tablename
                     else nullif(cast(:tablename as text), '') end,
    username = case when cast(:username as text) is null then username
                    else nullif(cast(:username as text), '') end,
    encryptedpass = case when cast(:encryptedpass as text) is null then encryptedpass
                         else nullif(cast(:encryptedpass as text), '') end,
    format = case when cast(:format as text) is null then format else nullif(cast(:format as text), '') end,
    chunkcolumn = case when cast(:chunkcolumn as text) is null then chunkcolumn
                       else nullif(cast(:chunkcolumn as text), '') end,
    domain = case when cast(:domain as text) is null then domain else nullif(cast(:domain as text), '') end,
    writemode = case when cast(:writemode as text) is null then writemode
                     else nullif(cast(:writemode as text), '') end,
    options = case when cast(:options as text) is null then options
                   else nullif(cast(:options as text), '') end
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
-- Forget what a job reads, writes and sets.
delete from job where jobid = :jobid;

-- name: remove_variables
-- Forget what a job sets.
delete from job where jobid = :jobid and itemtype not in ('IN', 'OUT');

-- name: remove_policy
-- Forget a job's dials.
delete from jobpolicy where jobid = :jobid;

-- name: remove_dataset
-- Forget where a dataset is.
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
-- How many chunks a job has made, or a dataset has, of each status.
select datasetid, status, count(*) from datastatus
where locktype = 'OUT'
  and (jobid = cast(:jobid as text) or (cast(:jobid as text) is null and datasetid = :datasetid))
group by datasetid, status order by datasetid, status;

-- name: live_claims
-- How many chunks of a job are held, and by whom for one.
select count(*), min(owner) from claim where jobid = :jobid and owner is not null;

-- name: add_policy
-- A row whose dials can be turned.
insert into jobpolicy (jobid) values (:jobid) on conflict (jobid) do nothing;

-- name: set_concurrency
-- How many chunks of a job may run at once.
update jobpolicy set concurrency = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_max_attempts
-- How often a chunk is tried.
update jobpolicy set max_attempts = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_max_losses
-- How often a chunk's worker may be lost.
update jobpolicy set max_losses = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_retry_delay
-- How long another attempt waits.
update jobpolicy set retry_delay = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_lease_seconds
-- How long a silent worker keeps its claim.
update jobpolicy set lease_seconds = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_batch_size
-- How many chunks a worker claims at once.
update jobpolicy set batch_size = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_time_limit
-- How long a script may run.
update jobpolicy set time_limit = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_paused_until
-- Until when nothing of a job is claimed.
update jobpolicy set paused_until = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_every_minutes
-- How often a job is launched.
update jobpolicy set every_minutes = :value, modified = current_timestamp where jobid = :jobid;

-- name: set_fold_after
-- When a finished item of a job is folded.
update jobpolicy set fold_after = :value, modified = current_timestamp where jobid = :jobid;
