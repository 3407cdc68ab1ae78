-- name: links
-- Which job reads and writes which dataset.
select distinct jobid, itemtype, datasetid from job
where itemtype in ('IN', 'OUT') and jobid is not null and datasetid is not null;

-- name: page
-- The next items of a job that arrived long enough ago, in their order.
select received, dataid from streamitem
where jobid = :jobid and received < :before and (received, dataid) > (:received, :dataid)
order by received, dataid limit :size;

-- name: known
-- The folded items of a job.
select items, first, last, digest from streamfold where jobid = :jobid;

-- name: note
-- Record the folded items of a job.
insert into streamfold (jobid, items, first, last, digest)
values (:jobid, :items, :first, :last, :digest)
on conflict (jobid) do update
    set items = excluded.items, first = excluded.first, last = excluded.last, digest = excluded.digest,
        folded = current_timestamp;

-- name: within
-- The folded items of a job, if a number is among theirs and the job has no such chunk.
select f.items, f.first, f.last, f.folded from streamfold f
where f.jobid = :jobid and :number between f.first and f.last
  and not exists (select 1 from datastatus s where s.dataid = :dataid and s.jobid = f.jobid)
  and not exists (select 1 from streamitem i where i.jobid = f.jobid and i.dataid = :dataid);

-- name: of_jobs
-- The folded items, by job.
select jobid, items, first, last, folded from streamfold
where cast(:which as text) is null or jobid = :which
   or exists (select 1 from job o where o.jobid = streamfold.jobid and o.itemtype = 'OUT' and o.datasetid = :which)
order by jobid;

-- name: of_dataset
-- The ranges of numbers of folded items that wrote a dataset.
select min(f.first), max(f.last) from streamfold f
where f.jobid in (select jobid from job where itemtype = 'OUT' and datasetid = :datasetid);

-- name: marks
-- How many items of each job were folded, and what the job writes.
select distinct f.jobid, f.items, j.datasetid
from streamfold f join job j on j.jobid = f.jobid and j.itemtype = 'OUT' order by f.jobid, j.datasetid;

-- name: forget_keys
-- Delete the keys of posts that arrived long enough ago and have no items left.
delete from streamkey
where received < :forgotten
  and not exists (
      select 1 from streamitem i
      where i.jobid = streamkey.jobid and i.idempotency = streamkey.idempotency and i.idempotency is not null);
