-- name: then
-- What was registered at a given time: for a job, a dataset, or both.
select tablename, jobid, datasetid, itemtype, content from registration
where tablename = :tablename and (cast(:jobid as text) is null or jobid = :jobid)
  and (cast(:datasetid as text) is null or datasetid = :datasetid) and (found = 1 or at <= :at)
group by tablename, jobid, datasetid, itemtype, content
having sum(n) > 0
order by min(seq);

-- name: changes
-- Every change of a job's registration, or of a dataset's.
select seq, at, tablename, jobid, datasetid, itemtype, n, content, found, who, why from registration
where (jobid = cast(:jobid as text) or cast(:jobid as text) is null)
  and (datasetid = cast(:datasetid as text) or cast(:datasetid as text) is null)
order by seq;

-- name: found
-- Since when history knows registrations that are older than itself.
select min(at) from registration where found = 1 and at > :at;
