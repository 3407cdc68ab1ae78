-- name: is_there
-- Whether there is such a table or view.
select 1 where to_regclass(:name) is not null;

-- name: copy
-- Rows, as texts that the columns' types read.
copy {table} ({columns}) from stdin;
