-- name: turn
-- Take turns with others that start a run on this dataset.
select pg_advisory_xact_lock(hashtextextended(:datasetid, 79643));

-- name: durable
-- Commit this transaction to disk, even if others needn't be.
select set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') = 'off';

-- name: links
-- What some jobs write.
select distinct jobid, datasetid from job
where itemtype = 'OUT' and datasetid is not null
  and jobid = any(array(select json_array_elements_text(cast(:jobids as json))))
order by jobid, datasetid;

-- name: keys
-- The recorded answers to keys.
select k.jobid, k.idempotency, k.digest, k.dataids
from json_to_recordset(cast(:keys as json)) as asked(jobid text, idempotency text)
    join streamkey k using (jobid, idempotency);

-- name: remember
-- Record the answers to keys; wait for a key that another transaction is recording.
insert into streamkey (jobid, idempotency, digest, dataids)
select jobid, idempotency, digest, dataids
from json_to_recordset(cast(:keys as json)) as k(jobid text, idempotency text, digest text, dataids text)
on conflict (jobid, idempotency) do nothing;

-- name: add
-- Store new items.
insert into streamitem (jobid, dataid, payload, idempotency)
select jobid, dataid, payload, idempotency
from json_to_recordset(cast(:items as json)) as i(jobid text, dataid text, payload text, idempotency text)
on conflict (jobid, dataid) do nothing;

-- name: payloads
-- The items among some chunks of a job; a deleted payload is null.
select i.dataid, i.payload
from json_array_elements_text(cast(:dataids as json)) as asked(dataid)
    join streamitem i on i.jobid = :jobid and i.dataid = asked.dataid;

-- name: taken
-- Whether any of some datasets has a chunk already.
select 1 from datastatus
where dataid = :dataid and datasetid = any(array(select json_array_elements_text(cast(:datasetids as json))))
limit 1;

-- name: waiting
-- How many items of a job wait to be claimed, and how many seconds the oldest has waited.
select count(*), extract(epoch from clock_timestamp() - min(i.received))
from pending p join streamitem i on i.jobid = p.jobid and i.dataid = p.dataid where p.jobid = :jobid;
