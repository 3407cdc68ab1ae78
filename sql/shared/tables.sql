-- name: value
-- The rows of a chunk of a table that is split by value.
{column} = :lower

-- name: range
-- The same by range.
{column} >= :lower and {column} < :upper

-- name: remainder
-- The same by remainder, which is negative for a negative number.
{column} % :modulus in (:lower, :lower - :modulus)

-- name: rows
-- The rows of a chunk.
select * from {table} where {chunk};

-- name: count
-- How many rows the chunk has.
select count(*) from {table} where {chunk};

-- name: some
-- Whether the chunk has any rows.
select 1 from {table} where {chunk} limit 1;

-- name: delete
-- Delete the rows of a chunk before writing its new ones.
delete from {table} where {chunk};

-- name: insert
-- Write a row.
insert into {table} ({columns}) values ({values});

-- name: declared
-- The columns of a table of SQLite, and the types that they are declared with.
select name, type from pragma_table_info(:name, :schema);

-- name: is_ours
-- Whether the tables of OpenDataFlow itself are in this database.
select 1 from sqlite_master where name = 'dataflow_meta';

-- name: turn
-- One publish at a time.
begin immediate;
