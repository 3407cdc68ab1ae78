-- name: place
-- How far the judging of a queued job has come: the input that it walks, or the next dataset among its outputs.
select f.datasetid, f.producer, f.dataid,
       (select min(datasetid) from job where jobid = f.jobid and itemtype = 'IN' and datasetid <> 'today'),
       (select min(datasetid) from job where jobid = f.jobid and itemtype = 'OUT' and datasetid > f.datasetid)
from fill f where f.jobid = :jobid;

-- name: waiting
-- The next pending chunks: each is judged again.
select '', dataid, 1 from pending where jobid = :jobid and dataid > :after order by dataid limit :most;

-- name: inputs
-- The next rows of an input, and whether each may be claimed but isn't pending.
select s.jobid, s.dataid, s.locktype is 'OUT' and s.status is 'READY' and s.dataid <> '' and s.jobid <> :jobid
    and not exists (select 1 from pending p where p.jobid = :jobid and p.dataid = s.dataid)
    and not exists (
        select 1 from job o join datastatus made
            on made.datasetid = o.datasetid and made.jobid = :jobid and made.dataid = s.dataid
        where o.jobid = :jobid and o.itemtype = 'OUT' and made.locktype = 'OUT' and made.status = 'READY')
from datastatus s
where s.datasetid = :datasetid and (s.jobid, s.dataid) > (:producer, :after)
order by s.jobid, s.dataid limit :most;

-- name: outputs
-- The next rows of a job's outputs, and whether each may be claimed but isn't pending.
select s.jobid, s.dataid, s.locktype is 'OUT' and s.status in ('PENDING', 'RESUBMIT', 'RERUN') and s.dataid <> ''
    and not exists (select 1 from pending p where p.jobid = :jobid and p.dataid = s.dataid)
from datastatus s
where s.datasetid = :datasetid and s.jobid = :jobid and s.dataid > :after
order by s.dataid limit :most;

-- name: move
-- Record how far the judging has come.
update fill set datasetid = :datasetid, producer = :producer, dataid = :after where jobid = :jobid;

-- name: end
-- Record that all chunks are judged.
delete from fill where jobid = :jobid;

-- name: awaited
-- Nobody: a transaction is the only writer.
select null where false;
