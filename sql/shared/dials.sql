-- name: {dial}
-- The value of one dial of a job: a statement for each dial.
select {dial} from jobpolicy where jobid = :jobid and {dial} is not null;

-- name: held_back
-- What keeps a job from starting claimed chunks: a pause, or more claims than its concurrency.
select p.paused_until > current_timestamp,
       case when p.concurrency is null then 0
            else (select count(*) from claim where jobid = :jobid and owner is not null) - p.concurrency end
from jobpolicy p where p.jobid = :jobid;

-- name: stopped
-- Whether a dial forbids all claims of a job until somebody changes it.
select coalesce(paused_until > current_timestamp, false), concurrency from jobpolicy where jobid = :jobid;
