-- name: holder
-- The chunk that last replaced all others of its dataset, unless a person holds it.
select f.dataid, f.jobid, f.location from chunkfact f
where f.datasetid = :datasetid and f.replaces
  and exists (
      select 1 from datastatus s
      where s.datasetid = f.datasetid and s.dataid = f.dataid and s.locktype = 'OUT'
        and s.status in ('READY', 'PENDING', 'RUNNING', 'RESUBMIT', 'RERUN', 'FAILED', 'ERROR'))
order by f.generation desc limit 1;

-- name: last_ready
-- The READY chunk of a dataset that was published last.
select s.dataid, s.jobid, f.location
from datastatus s join chunkfact f
    on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.datasetid = :datasetid and s.locktype = 'OUT' and s.status = 'READY'
order by f.generation desc limit 1;

-- name: began
-- When a chunk was first recorded, as a growing number; and whether it is an item.
select (select min(e.seq) from dataevent e where e.dataid = :dataid and e.datasetid = :datasetid),
       (select count(*) from streamitem i where i.jobid = :jobid and i.dataid = :dataid);
