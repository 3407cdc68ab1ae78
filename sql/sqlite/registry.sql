-- name: lock_datasets
-- Nothing to do: a transaction is the only writer.
select 1;

-- name: lock_jobs
-- Nothing to do: a transaction is the only writer.
select 1;

-- name: add_items
-- Write the rows of a registration.
insert into job (jobid, itemtype, datasetid, itemvalue, modified)
select :jobid, value ->> 'itemtype', value ->> 'datasetid', value ->> 'itemvalue',
       strftime('%Y-%m-%d %H:%M:%f', 'now')
from json_each(:items);

-- name: policy
-- The dials of a job; `paused_until` as a person reads it.
select {each dial: dial},
       case when paused_until >= '9999-01-01' then 'forever'
            else coalesce(strftime('%Y-%m-%dT%H:%M:%SZ', paused_until), paused_until) end as pause
from jobpolicy where jobid = :jobid;
