-- name: dials
-- The jobs with `every_minutes`, and until when they are paused.
select jobid, every_minutes, paused_until from jobpolicy where every_minutes is not null;

-- name: unfinished
-- Whether a run of a job, apart from items, is waiting or at work.
select 1 from pending p
where p.jobid = :jobid
  and not exists (select 1 from streamitem i where i.jobid = p.jobid and i.dataid = p.dataid)
union all
select 1 from claim c
where c.jobid = :jobid and c.owner is not null
  and not exists (select 1 from streamitem i where i.jobid = c.jobid and i.dataid = c.dataid)
limit 1;

-- name: newest
-- The last run of a job on a dataset whose dataid is its start time.
select dataid from datastatus
where datasetid = :datasetid and jobid = :jobid and locktype = 'OUT'
  and dataid like '____-__-__T______.___Z'
order by dataid desc limit 1;

-- name: next
-- The runs of a job that may be claimed, apart from items, the first ones first.
select p.dataid from pending p
where p.jobid = :jobid
  and not exists (select 1 from streamitem i where i.jobid = p.jobid and i.dataid = p.dataid)
order by p.rank, p.sortkey, p.dataid limit :most;

-- name: live
-- The generations of a job's live claims.
select generation from claim where jobid = :jobid and owner is not null;
