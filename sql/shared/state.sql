-- name: rows
-- The rows of one chunk of a dataset, of all producers and readers.
select datasetid, jobid, locktype, status, modified, generation
from datastatus where datasetid = :datasetid and dataid = :dataid
order by jobid;

-- name: events
-- The last change of each of those rows, until now or until a time in the past.
select e.datasetid, e.jobid, e.locktype, e.status_after, e.at, e.generation, e.who, e.why
from (select d.*, row_number() over (partition by d.jobid order by d.seq desc) as nth
      from dataevent d
      where d.dataid = :dataid and d.datasetid = :datasetid
        and (cast(:now as integer) = 1 or d.at <= :at)) as e
where e.nth = 1
order by e.jobid;

-- name: facts
-- The facts about every generation of the chunk.
select datasetid, generation, jobid, location, rows, bytes, fingerprint, validated, checks, at, inputs
from chunkfact
where datasetid = :datasetid and dataid = :dataid and (cast(:now as integer) = 1 or at <= :at)
order by generation;

-- name: claims
-- Who holds or will retry a chunk, and for how long a claim lasts by the job's policy.
select c.jobid, c.generation, c.owner, c.runid, c.started, c.heartbeat, c.lease_end, c.attempts, c.losses, c.retry_at,
       p.lease_seconds
from claim c left join jobpolicy p on p.jobid = c.jobid where c.dataid = :dataid;

-- name: dataset
-- Where the dataset is.
select * from dataset where datasetid = :datasetid;

-- name: producers
-- Which jobs write the dataset.
select distinct jobid from job
where itemtype = 'OUT' and datasetid = :datasetid and jobid is not null order by jobid;

-- name: making
-- Which jobs are working on the chunk, now or at a time in the past.
select s.jobid from datastatus s
where cast(:now as integer) = 1 and s.dataid = :dataid and s.locktype = 'OUT' and s.status = 'RUNNING'
union
select e.jobid
from (select d.*, row_number() over (partition by d.datasetid, d.jobid order by d.seq desc) as nth
      from dataevent d where cast(:now as integer) = 0 and d.dataid = :dataid and d.at <= :at) as e
where e.nth = 1 and e.locktype = 'OUT' and e.status_after = 'RUNNING';
