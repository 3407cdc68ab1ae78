-- name: server
-- The library's version.
select 3, sqlite_version();

-- name: triggers
-- Our triggers: in SQLite one that is there fires.
select name, 1 from sqlite_master where type = 'trigger';
