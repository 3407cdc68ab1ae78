-- name: ranges
-- The chunks that a table has been split into.
select dataid, lower_bound, upper_bound, modulus from chunkrange where datasetid = :datasetid;

-- name: column
-- By which column a table is split.
select chunkcolumn from dataset where datasetid = :datasetid;

-- name: set_column
-- Remember by which column a table is split.
update dataset set chunkcolumn = :column
where datasetid = :datasetid and (chunkcolumn is null or chunkcolumn <> :column);

-- name: known
-- The chunks of a dataset that somebody made, or is to make.
select distinct dataid from datastatus where datasetid = :datasetid and locktype = 'OUT';
