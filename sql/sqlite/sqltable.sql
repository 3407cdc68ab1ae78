-- name: is_there
-- Whether a table or view exists.
select 1 from sqlite_master where type in ('table', 'view') and lower(name) = lower(:name);

-- name: look_only
-- Make the connection read-only.
pragma query_only = 1;
