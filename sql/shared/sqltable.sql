-- name: all
-- Every row of a table.
select * from {table};

-- name: columns
-- No rows, only the names of the columns.
select * from {table} where 1 = 0;

-- name: empty
-- Remove all rows, to write others.
delete from {table};

-- name: create
-- Create a table.
create table {table} ({columns});

-- name: save
-- Begin the writes of one chunk.
savepoint odf_part;

-- name: undo
-- Undo the writes of one chunk, which failed; the other chunks' stay.
rollback to savepoint odf_part;

-- name: keep
-- Keep the writes of one chunk.
release savepoint odf_part;
