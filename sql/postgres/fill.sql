-- name: next
-- Judge the next chunks of a queued job; returns how many rows were read.
select fill_next(:jobid, :most);

-- name: awaited
-- The owners of open transactions that the filling of a job waits for.
select distinct a.pid, a.usename, a.application_name, cast(extract(epoch from now() - a.xact_start) as integer)
from fill f join pg_locks l on l.virtualtransaction = any(f.writers) join pg_stat_activity a on a.pid = l.pid
where f.jobid = :jobid order by a.pid;
