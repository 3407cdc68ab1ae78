-- name: {dial}
-- What one dial of a job says: a statement for each.
select {dial} from jobpolicy where jobid = :jobid and {dial} is not null;

-- name: held_back
-- What forbids a job to begin with chunks that are claimed: a pause, or more claims than its concurrency.
select p.paused_until > current_timestamp,
       case when p.concurrency is null then 0
            else (select count(*) from claim where jobid = :jobid and owner is not null) - p.concurrency end
from jobpolicy p where p.jobid = :jobid;

-- name: stopped
-- Whether a dial forbids any claim of a job, until somebody turns it.
select coalesce(paused_until > current_timestamp, false), concurrency from jobpolicy where jobid = :jobid;
