-- name: end
-- A worker is done.
delete from worker where owner = :owner;

-- name: end_run
-- The workers of a run that is over are gone.
delete from worker where runid = :runid;

-- name: runs
-- The runs that hold claims, or that are at work: a run that is over leaves nothing here.
select runid from claim where owner is not null and runid is not null
union
select runid from worker
order by 1;

-- name: close
-- Give up a claim, if it is still this generation's.
delete from claim
where jobid = :jobid and dataid = :dataid and generation = :generation and owner is not null;
