-- name: mark
-- The transaction that last registered chunks of a table, or changed its registration.
select coalesce(string_agg(cast(xmin as text), ' '), '') from dataset where datasetid = :datasetid;

-- name: overtaken
-- Whether another transaction has done so since a mark.
select 1 from dataset where datasetid = :datasetid having string_agg(cast(xmin as text), ' ') is distinct from :mark;

-- name: add_ranges
-- Record which rows are in which chunk.
insert into chunkrange (datasetid, dataid, lower_bound, upper_bound, modulus)
select :datasetid, dataid, lower_bound, upper_bound, modulus
from json_to_recordset(cast(:rows as json)) as k(dataid text, lower_bound text, upper_bound text, modulus bigint)
on conflict (datasetid, dataid) do nothing;

-- name: note
-- Record the generations of chunks that were registered READY.
insert into chunkfact (datasetid, dataid, generation, jobid)
select datasetid, dataid, generation, jobid
from json_to_recordset(cast(:rows as json)) as k(datasetid text, dataid text, generation bigint, jobid text)
on conflict (datasetid, dataid, generation) do nothing;

-- name: sort_pending
-- Nothing to do: each chunk that may be claimed already has its place in the natural order.
select null where false;
