-- name: place
-- How far the judging of a queued job has come, which input it walks, and the next dataset if it walks what it makes.
select f.datasetid, f.producer, f.dataid,
       (select min(datasetid) from job where jobid = f.jobid and itemtype = 'IN' and datasetid <> 'today'),
       (select min(datasetid) from job where jobid = f.jobid and itemtype = 'OUT' and datasetid > f.datasetid)
from fill f where f.jobid = :jobid;

-- name: waiting
-- The next chunks that are pending: each is judged again.
select '', dataid, 1 from pending where jobid = :jobid and dataid > :after order by dataid limit :most;

-- name: inputs
-- The next rows of an input, and whether each may be claimed and isn't pending.
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
-- The next rows of what a job makes, and whether each may be claimed and isn't pending.
select s.jobid, s.dataid, s.locktype is 'OUT' and s.status in ('PENDING', 'RESUBMIT', 'RERUN') and s.dataid <> ''
    and not exists (select 1 from pending p where p.jobid = :jobid and p.dataid = s.dataid)
from datastatus s
where s.datasetid = :datasetid and s.jobid = :jobid and s.dataid > :after
order by s.dataid limit :most;

-- name: move
-- Remember how far it has come.
update fill set datasetid = :datasetid, producer = :producer, dataid = :after where jobid = :jobid;

-- name: end
-- All is judged.
delete from fill where jobid = :jobid;

-- name: awaited
-- Nobody is waited for: one writer at a time.
select null where false;
