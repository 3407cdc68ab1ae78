-- name: columns
-- The columns of a table, each with the built-in type below its domain.
with recursive base (num, type, mod) as (
    select attnum, atttypid, atttypmod from pg_attribute
    where attrelid = to_regclass(:name) and attnum > 0 and not attisdropped
    union all
    select num, typbasetype, case mod when -1 then typtypmod else mod end
    from base join pg_type on oid = type and typtype = 'd'
)
select attname, case when t.typnamespace = 'pg_catalog'::regnamespace then t.typname else '' end,
    case when t.typcategory = 'A' and e.typnamespace = 'pg_catalog'::regnamespace then e.typname else '' end,
    t.typcategory = 'A', format_type(t.oid, -1), mod,
    attnotnull and not atthasdef and attidentity = '', attgenerated <> '', format_type(t.oid, mod)
from base
join pg_type t on t.oid = type and t.typtype <> 'd'
left join pg_type e on e.oid = t.typelem
join pg_attribute on attrelid = to_regclass(:name) and attnum = num
order by num;

-- name: layout
-- How a table is stored: its kind, its blocks, its schema, and whether its chunks have an index.
select relkind::text, nspname,
    coalesce((
        select max(pg_relation_size(relid)) from pg_partition_tree(c.oid) where isleaf
    ), pg_relation_size(c.oid), 0) / current_setting('block_size')::bigint,
    exists (
        select from pg_index join pg_attribute on attrelid = indrelid and attnum = indkey[0]
        where indrelid = c.oid and attname = :column and indisvalid and indpred is null
    ),
    exists (
        select from pg_partition_tree(c.oid) tree join pg_class leaf on leaf.oid = tree.relid
        where leaf.relkind = 'f'
    )
from pg_class c join pg_namespace n on n.oid = relnamespace
where c.oid = to_regclass(:name);

-- name: expected_of_all
-- How many rows a table has, by the planner's estimate.
explain (format json) select from {table};

-- name: expected_of_chunk
-- The same for a chunk.
explain (format json) select from {table} where {chunk};

-- name: cuts
-- The bounds of equal parts of a range.
select distinct (lower + (upper - lower) * part / :parts)::{type}::text collate "C", part
from (select :lower::{type}{wide} as lower, :upper::{type}{wide} as upper) bounds, generate_series(1, :parts - 1) part
where lower < upper order by part;

-- name: part_of_all
-- Some blocks of a table.
select {columns} from {table} where {part};

-- name: part_of_chunk
-- A part of a chunk.
select {columns} from {table} where {chunk} and {part};

-- name: blocks
-- The rows in some blocks.
ctid >= '({first},0)'::tid and ctid < '({last},0)'::tid;

-- name: last_blocks
-- The same at the end of the table, including blocks added since.
ctid >= '({first},0)'::tid;

-- name: share
-- One of several shares of the rows that an index finds, wherever they are stored.
mod(hashtid(ctid)::bigint + 2147483648, {parts}) = {part};

-- name: between
-- A part of a range.
{column} >= :first and {column} < :last;

-- name: snapshot
-- The name under which other sessions can use this snapshot.
select pg_export_snapshot();

-- name: look_as
-- Use another session's snapshot.
set transaction snapshot '{snapshot}';

-- name: look_begin
-- Use one snapshot for the whole transaction.
set transaction isolation level repeatable read read only;

-- name: no_dimensions
-- An array, if it is a plain list; otherwise the error says what it is.
case when array_ndims({value}) > 1 then ('an array of ' || array_ndims({value}) || ' dimensions')::{type} else {value} end;

-- name: stage
-- Create a chunk's staging table: fast to fill, and only ours.
create unlogged table {stage} ({columns}) with (autovacuum_enabled = false);

-- name: stage_parts
-- Create the list of its complete parts: a repeated task must not write twice.
create unlogged table {parts} (part int primary key, rows bigint not null);

-- name: stage_note
-- What the staging table is for.
comment on table {stage} is :note;

-- name: part_done
-- Record that a part is complete.
insert into {parts} (part, rows) values ({part}, {rows});

-- name: part_rows
-- How many rows a complete part has.
select rows from {parts} where part = {part};

-- name: members
-- How many rows a staging table has, and how many of them belong to the chunk, by the table's types and collations.
select count(*), count(*) filter (where {chunk})
from (select {column} from {table} where false union all select {value} from {stage}) staged;

-- name: losses
-- How many values of some columns the table would change.
select {counts} from {stage};

-- name: loss
-- The same for one column.
count(*) filter (where {lost});

-- name: move
-- Move the rows of a chunk from its staging table into the table.
insert into {table} ({columns}) overriding system value select {values} from {stage};

-- name: the_value
-- The value of the chunk's column in all rows of a chunk by value.
:lower;

-- name: unstage
-- Remove a staging table.
drop table if exists {stage}, {parts};

-- name: hurry
-- Don't wait for locks.
set local lock_timeout = '1s';

-- name: leftovers
-- The staging tables of a table.
select relname from pg_class
where relnamespace = (select relnamespace from pg_class where oid = to_regclass(:name))
    and relkind = 'r' and relpersistence = 'u' and relname ~ '^odf_stage_[0-9]+_[0-9a-f]{{8}}_[0-9a-f]{{8}}$'
    and obj_description(oid, 'pg_class') = :note
order by relname;
