-- name: made
-- The statuses of a job's outputs for one chunk, of any producer.
select distinct s.status from job o join datastatus s on s.datasetid = o.datasetid and s.dataid = :dataid
where o.jobid = :jobid and o.itemtype = 'OUT' and s.locktype = 'OUT';

-- name: newest
-- The last change of one chunk in the datasets of a job.
select max(e.seq) from dataevent e
where e.dataid = :dataid and e.datasetid in (select j.datasetid from job j where j.jobid = :jobid);
