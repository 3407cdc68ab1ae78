-- name: batch_size
-- How many chunks of a job a worker claims at once; NULL or no row leaves that to the code.
select batch_size from jobpolicy where jobid = :jobid and batch_size is not null;

-- name: held_back
-- What forbids a job to begin with chunks that are claimed: a pause, or more claims than its concurrency.
select p.paused_until > current_timestamp,
       case when p.concurrency is null then 0
            else (select count(*) from claim where jobid = :jobid and owner is not null) - p.concurrency end
from jobpolicy p where p.jobid = :jobid;
