-- name: stale
-- The stale chunks of a job or of all: those produced from data that was replaced since.
select distinct jobid, dataid from stale_chunk where cast(:jobid as text) is null or jobid = :jobid limit :most;

-- name: edges
-- Which job reads and writes which dataset.
select distinct jobid, itemtype, datasetid from job
where itemtype in ('IN', 'OUT') and jobid is not null and datasetid is not null;

-- name: is_registered
-- Whether a dataset is registered.
select 1 from dataset where datasetid = :datasetid limit 1;

-- name: is_dataset
-- Whether a dataset is registered, is read or written by a job, or has chunks.
select 1 from dataset where datasetid = :datasetid
union all select 1 from job where datasetid = :datasetid
union all select 1 from datastatus where datasetid = :datasetid
limit 1;

-- name: is_known
-- Whether anything is known of a job: a registration or a run.
select 1 from job where jobid = :jobid union all select 1 from datastatus where jobid = :jobid limit 1;

-- name: job_names
-- The names of the registered jobs.
select distinct jobid from job where jobid is not null;

-- name: dataset_names
-- The names of the datasets that are registered, or that jobs read or write.
select datasetid from dataset where datasetid is not null
union select datasetid from job where datasetid is not null;

-- name: delete_run
-- Delete a job's own rows of one chunk, unless it is being produced.
delete from datastatus
where jobid = :jobid and dataid = :dataid
  and not exists (
      select 1 from datastatus r
      where r.jobid = :jobid and r.dataid = :dataid and r.locktype = 'OUT' and r.status = 'RUNNING');

-- name: forget_claim
-- Delete the attempts of a chunk that nobody has claimed.
delete from claim where jobid = :jobid and dataid = :dataid and owner is null;
