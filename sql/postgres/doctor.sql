-- name: server
-- The server's version.
select cast(current_setting('server_version_num') as integer) / 10000, current_setting('server_version');

-- name: triggers
-- Our triggers, and whether they fire.
select t.tgname, t.tgenabled in ('O', 'A')
from pg_trigger t join pg_class c on c.oid = t.tgrelid
where not t.tgisinternal and c.relnamespace = cast(current_schema() as regnamespace);

-- name: may_vacuum
-- Whether we may vacuum `pending`: its owner may, and from PostgreSQL 17 on, roles granted `maintain`.
select pg_has_role(c.relowner, 'usage')
    or case when cast(current_setting('server_version_num') as integer) >= 170000
            then has_table_privilege(c.oid, 'maintain') else false end
from pg_class c
where c.relname = 'pending' and c.relnamespace = cast(current_schema() as regnamespace);

-- name: holding_back
-- Transactions that have written for more than a minute: the log waits for them.
select pid, coalesce(usename, '?'), coalesce(application_name, ''), cast(extract(epoch from now() - xact_start) as integer)
from pg_stat_activity
where backend_xid is not null and xact_start < now() - interval '1 minute' and pid <> pg_backend_pid()
order by xact_start;

-- name: prepared
-- Prepared transactions that nobody has finished.
select gid, cast(extract(epoch from now() - prepared) as integer) from pg_prepared_xacts
where prepared < now() - interval '1 minute';

-- name: left_behind
-- Settings that another client of a pooler left in this session; a pooler sets the excluded ones for each client.
select name from pg_settings
where source = 'session' and lower(name) not in (
    'application_name', 'client_encoding', 'datestyle', 'intervalstyle', 'standard_conforming_strings', 'timezone')
order by name;
