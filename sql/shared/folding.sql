-- name: links
-- Which job reads and writes which dataset.
select distinct jobid, itemtype, datasetid from job
where itemtype in ('IN', 'OUT') and jobid is not null and datasetid is not null;

-- name: page
-- The next items of a job that came long enough ago, in their order.
select received, dataid from streamitem
where jobid = :jobid and received < :before and (received, dataid) > (:received, :dataid)
order by received, dataid limit :size;

-- name: known
-- What was folded of a job.
select items, first, last, digest from streamfold where jobid = :jobid;

-- name: note
-- Keep what was folded of a job.
insert into streamfold (jobid, items, first, last, digest)
values (:jobid, :items, :first, :last, :digest)
on conflict (jobid) do update
    set items = excluded.items, first = excluded.first, last = excluded.last, digest = excluded.digest,
        folded = current_timestamp;

-- name: within
-- What was folded of a job, if a number lies within it and nothing is known of such a chunk of the job.
select f.items, f.first, f.last, f.folded from streamfold f
where f.jobid = :jobid and :number between f.first and f.last
  and not exists (select 1 from datastatus s where s.dataid = :dataid and s.jobid = f.jobid)
  and not exists (select 1 from streamitem i where i.jobid = f.jobid and i.dataid = :dataid);

-- name: of_jobs
-- What was folded, by job.
select jobid, items, first, last, folded from streamfold
where cast(:which as text) is null or jobid = :which
   or exists (select 1 from job o where o.jobid = streamfold.jobid and o.itemtype = 'OUT' and o.datasetid = :which)
order by jobid;

-- name: of_dataset
-- Between which numbers items were folded that wrote a dataset.
select min(f.first), max(f.last) from streamfold f
where f.jobid in (select jobid from job where itemtype = 'OUT' and datasetid = :datasetid);

-- name: marks
-- How many items were folded of each job, and what it writes.
select distinct f.jobid, f.items, j.datasetid
from streamfold f join job j on j.jobid = f.jobid and j.itemtype = 'OUT' order by f.jobid, j.datasetid;

-- name: forget_keys
-- Forget the keys of posts that came long enough ago and none of whose items is here any more.
delete from streamkey
where received < :forgotten
  and not exists (
      select 1 from streamitem i
      where i.jobid = streamkey.jobid and i.idempotency = streamkey.idempotency and i.idempotency is not null);
