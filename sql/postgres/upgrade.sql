-- name: turn
-- Wait for another init to finish; later statements see its changes.
select pg_advisory_xact_lock(hashtextextended('odf init', 79643));

-- name: tables
-- The tables in our schema, which may not exist.
select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = :schema and c.relkind in ('r', 'p');

-- name: indexes
-- The indexes in our schema.
select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = :schema and c.relkind = 'i';

-- name: sign
-- Tell the triggers who writes, and why.
select set_config('dataflow.act', 'init', true), set_config('dataflow.who', 'odf init', true),
       set_config('dataflow.why', 'found on init', true);

-- name: rebuild
-- Queue every job: its claimable chunks are computed again.
insert into fill (jobid)
select distinct jobid from job where itemtype in ('IN', 'OUT') and jobid is not null order by jobid
on conflict (jobid) do update set writers = null, datasetid = '', producer = '', dataid = '';

-- name: rebase
-- After a restore into another server, put the restored log before everything that this one writes: its
-- transactions have the other server's numbers. The count in `log` tells readers with a cursor.
with restored as (
    select max(seq) as last from dataevent
    where xid >= pg_snapshot_xmax(pg_current_snapshot()) and xid is distinct from pg_current_xact_id_if_assigned()
),
renumbered as (
    update dataevent e set xid = '0' from restored r where e.seq <= r.last and e.xid <> '0'
)
insert into dataflow_meta as m (name, value) select 'log', '1' from restored where last is not null
on conflict (name) do update set value = cast(cast(m.value as bigint) + 1 as text);
