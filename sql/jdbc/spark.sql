-- name: value
-- The rows of a chunk of a table that is split by value.
{column} = ?

-- name: range
-- The same by range.
{column} >= ? and {column} < ?

-- name: remainder
-- The same by remainder, which is negative for a negative number.
mod({column}, ?) in (?, ?)

-- name: remainder_sqlserver
-- The same for SQL Server, which lacks that function.
{column} % ? in (?, ?)

-- name: stage
-- Create the staging table of a chunk, with some columns of the table.
create table {stage} as select {columns} from {table} where 1 = 0;

-- name: stage_sqlserver
-- The same for SQL Server.
select {columns} into {stage} from {table} where 1 = 0;

-- name: look
-- No rows, only the table's columns.
select {columns} from {table} where 1 = 0;

-- name: delete
-- Delete the rows of a chunk before writing its new ones.
delete from {table} where {chunk};

-- name: move
-- Move the rows of a chunk from its staging table into the table.
insert into {table} ({columns}) select {columns} from {stage};

-- name: count
-- How many rows a chunk has.
select count(*) from {table} where {chunk};

-- name: count_all
-- How many rows a table has.
select count(*) from {table};

-- name: unstage
-- Remove a staging table.
drop table {stage};
