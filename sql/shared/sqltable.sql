-- name: all
-- Every row of a table.
select * from {table};

-- name: columns
-- None of its rows, for the names of its columns.
select * from {table} where 1 = 0;

-- name: empty
-- Remove all rows, to write others.
delete from {table};

-- name: create
-- A table that isn't there yet.
create table {table} ({columns});

-- name: save
-- From here on, what one chunk writes.
savepoint odf_part;

-- name: undo
-- It can't be written: the others can.
rollback to savepoint odf_part;

-- name: keep
-- It is written.
release savepoint odf_part;
