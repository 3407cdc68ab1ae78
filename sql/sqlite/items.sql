-- name: turn
-- Nothing to do: a transaction is the only writer.
select 1;

-- name: durable
-- Nothing to do: each transaction is on disk when it ends.
select 1;

-- name: links
-- What some jobs write.
select distinct jobid, datasetid from job
where itemtype = 'OUT' and datasetid is not null and jobid in (select value from json_each(:jobids))
order by jobid, datasetid;

-- name: keys
-- The recorded answers to keys.
select k.jobid, k.idempotency, k.digest, k.dataids
from json_each(:keys) as asked
    cross join streamkey k on k.jobid = asked.value ->> 'jobid' and k.idempotency = asked.value ->> 'idempotency';

-- name: remember
-- Record the answers to keys.
insert into streamkey (jobid, idempotency, digest, dataids)
select value ->> 'jobid', value ->> 'idempotency', value ->> 'digest', value ->> 'dataids'
from json_each(:keys) where true
on conflict (jobid, idempotency) do nothing;

-- name: add
-- Store new items.
insert into streamitem (jobid, dataid, payload, idempotency)
select value ->> 'jobid', value ->> 'dataid', value ->> 'payload', value ->> 'idempotency'
from json_each(:items) where true
on conflict (jobid, dataid) do nothing;

-- name: payloads
-- The items among some chunks of a job; a deleted payload is null.
select i.dataid, i.payload
from json_each(:dataids) as asked cross join streamitem i on i.jobid = :jobid and i.dataid = asked.value;

-- name: taken
-- Whether any of some datasets has a chunk already.
select 1 from datastatus where dataid = :dataid and datasetid in (select value from json_each(:datasetids)) limit 1;

-- name: waiting
-- How many items of a job wait to be claimed, and how many seconds the oldest has waited.
select count(*), (julianday('now') - julianday(min(i.received))) * 86400.0
from pending p cross join streamitem i on i.jobid = p.jobid and i.dataid = p.dataid where p.jobid = :jobid;
