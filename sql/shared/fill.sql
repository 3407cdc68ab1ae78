-- name: queued
-- The jobs (or the given one) whose part of the queue has to be computed.
select jobid from fill where cast(:jobid as text) is null or jobid = :jobid order by jobid;

-- name: outlook
-- Whether a job's part of the queue has to be computed, and whether it has anything to claim.
select exists (select 1 from fill where jobid = :jobid), exists (select 1 from pending where jobid = :jobid);
