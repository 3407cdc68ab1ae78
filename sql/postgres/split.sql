-- name: add_ranges
-- Remember which rows are in which chunk.
insert into chunkrange (datasetid, dataid, lower_bound, upper_bound, modulus)
select :datasetid, dataid, lower_bound, upper_bound, modulus
from json_to_recordset(cast(:rows as json)) as k(dataid text, lower_bound text, upper_bound text, modulus bigint)
on conflict (datasetid, dataid) do nothing;
