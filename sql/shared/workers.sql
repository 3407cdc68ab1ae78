-- name: end
-- A worker has ended.
delete from worker where owner = :owner;

-- name: end_run
-- All workers of a run have ended, since the run has.
delete from worker where runid = :runid;

-- name: runs
-- The runs that hold claims or are at work: an ended run leaves nothing here.
select runid from claim where owner is not null and runid is not null
union
select runid from worker
order by 1;

-- name: close
-- Release a claim, if its generation still matches.
delete from claim
where jobid = :jobid and dataid = :dataid and generation = :generation and owner is not null;
