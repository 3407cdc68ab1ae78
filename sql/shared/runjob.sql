-- name: left
-- How many chunks of a job could be claimed.
select count(*) from pending where jobid = :jobid;

-- name: live_claim
-- Who holds one chunk of a job.
select generation, owner, attempts from claim
where jobid = :jobid and dataid = :dataid and owner is not null;
