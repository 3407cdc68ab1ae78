-- name: rows
-- The rows that decide about one chunk of a job: its own, and those of its datasets by any job.
select s.datasetid, s.jobid, s.locktype, s.status, cast(s.modified as timestamptz) as modified, s.generation
from datastatus s
where s.dataid = :dataid and s.datasetid in (select j.datasetid from job j where j.jobid = :jobid)
order by s.datasetid, s.jobid;

-- name: next
-- The chunk that a job would claim first.
select dataid from pending where jobid = :jobid order by rank, sortkey, dataid collate "C" limit 1;
