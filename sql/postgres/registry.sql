-- name: lock_datasets
-- Take turns with the other writers of this table, which has no unique key; readers don't wait.
lock table dataset in share row exclusive mode;

-- name: lock_jobs
-- Take turns with the other writers of this table, which has no unique key; readers don't wait.
lock table job in share row exclusive mode;

-- name: add_items
-- Write the rows of a registration in one statement, so that claimable chunks are computed once.
insert into job (jobid, itemtype, datasetid, itemvalue, modified)
select :jobid, itemtype, datasetid, itemvalue, now()
from json_to_recordset(cast(:items as json)) as i(itemtype text, datasetid text, itemvalue text);

-- name: policy
-- The dials of a job; `paused_until` as a person reads it.
select {each dial: dial},
       case when paused_until >= '9999-01-01 00:00:00+00' then 'forever'
            else to_char(paused_until at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') end as pause
from jobpolicy where jobid = :jobid;
