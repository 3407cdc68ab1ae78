-- name: server
-- The library's version.
select 3, sqlite_version();

-- name: triggers
-- Our triggers: in SQLite, an existing trigger fires.
select name, 1 from sqlite_master where type = 'trigger';
