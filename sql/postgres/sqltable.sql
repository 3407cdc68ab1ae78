-- name: is_there
-- Whether a table or view exists.
select 1 where to_regclass(:name) is not null;

-- name: copy
-- Load rows, as texts that the columns' types parse.
copy {table} ({columns}) from stdin;
