-- name: is_there
-- Whether there is such a table or view.
select 1 from sqlite_master where type in ('table', 'view') and lower(name) = lower(:name);

-- name: look_only
-- Whatever the query is, nothing is written.
pragma query_only = 1;
