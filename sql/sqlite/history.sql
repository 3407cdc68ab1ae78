-- name: listing
-- The newest rows of history that match, newest first.
select seq, at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why,
       (select f.code from chunkfact f
        where locktype = 'OUT' and status_after = 'READY'
          and f.datasetid = e.datasetid and f.dataid = e.dataid and f.generation = e.generation) as code, execution
from dataevent e
where (cast(:jobid as text) is null or jobid = :jobid)
  and (cast(:dataid as text) is null or dataid = :dataid)
  and (cast(:datasetid as text) is null or datasetid = :datasetid)
  and (:since is null or at >= :since)
  and (cast(:words as text) is null or status_after in (select value from json_each(:words)))
order by seq desc
limit :limit;

-- name: whole
-- All rows of history that match, the newest last.
select seq, at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why,
       (select f.code from chunkfact f
        where locktype = 'OUT' and status_after = 'READY'
          and f.datasetid = e.datasetid and f.dataid = e.dataid and f.generation = e.generation) as code, execution
from dataevent e
where (cast(:jobid as text) is null or jobid = :jobid)
  and (cast(:dataid as text) is null or dataid = :dataid)
  and (cast(:datasetid as text) is null or datasetid = :datasetid)
  and (:since is null or at >= :since)
  and (cast(:words as text) is null or status_after in (select value from json_each(:words)))
order by seq;

-- name: after
-- The next rows of the log: one writer at a time makes `seq` the order of commits.
select seq, at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why, null, execution
from dataevent where seq > :seq order by seq limit :limit;

-- name: end
-- The last row of the log.
select coalesce(max(seq), 0) from dataevent;

-- name: runs
-- The newest outputs of jobs.
select datasetid, jobid, dataid, locktype, status, modified, s.generation, attempts, owner
from datastatus s left join claim c using (jobid, dataid)
where s.locktype = 'OUT' and (cast(:jobid as text) is null or s.jobid = :jobid)
  and (cast(:words as text) is null or s.status in (select value from json_each(:words)))
  and (:since is null or s.modified >= :since)
order by s.modified desc, s.generation desc, s.dataid desc
limit coalesce(:limit, -1);
