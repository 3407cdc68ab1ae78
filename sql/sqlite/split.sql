-- name: mark
-- A number that grows with each chunk that a table is split into.
select cast(coalesce(max(rowid), 0) as text) from chunkrange where :datasetid is not null;

-- name: overtaken
-- Whether this table was split into more chunks since a mark.
select 1 from chunkrange where rowid > cast(:mark as integer) and datasetid = :datasetid limit 1;

-- name: add_ranges
-- Record which rows are in which chunk.
insert into chunkrange (datasetid, dataid, lower_bound, upper_bound, modulus)
select :datasetid, value ->> 'dataid', value ->> 'lower_bound', value ->> 'upper_bound', value ->> 'modulus'
from json_each(:rows) where true
on conflict (datasetid, dataid) do nothing;

-- name: note
-- Record the generations of chunks that were registered READY.
insert into chunkfact (datasetid, dataid, generation, jobid)
select value ->> 'datasetid', value ->> 'dataid', value ->> 'generation', value ->> 'jobid'
from json_each(:rows) where true
on conflict (datasetid, dataid, generation) do nothing;

-- name: sort_pending
-- Give the chunks that jobs may claim now their place in the natural order; otherwise the first claimer would do it.
update pending set sortkey = naturalkey(dataid)
where jobid in (select jobid from job where datasetid = :datasetid) and rank in (0, 1) and sortkey is null;
