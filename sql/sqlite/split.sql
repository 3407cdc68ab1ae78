-- name: add_ranges
-- Remember which rows are in which chunk.
insert into chunkrange (datasetid, dataid, lower_bound, upper_bound, modulus)
select :datasetid, value ->> 'dataid', value ->> 'lower_bound', value ->> 'upper_bound', value ->> 'modulus'
from json_each(:rows) where true
on conflict (datasetid, dataid) do nothing;
