-- name: queued
-- The jobs, or the one, whose part of the queue is still to be judged.
select jobid from fill where cast(:jobid as text) is null or jobid = :jobid order by jobid;

-- name: outlook
-- Whether a job's part of the queue is still to be judged, and whether it has anything to claim.
select exists (select 1 from fill where jobid = :jobid), exists (select 1 from pending where jobid = :jobid);
