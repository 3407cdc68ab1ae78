-- Three roles for the tables of OpenDataFlow. A DBA runs this with psql after `odf init`, and again after each
-- upgrade of the tables. The schema must be there, or the DBA may create it. Names can be chosen:
--
--   psql -v ON_ERROR_STOP=1 -v schema=dataflow -v worker=dataflow_worker -f roles.sql DATABASE
--   grant dataflow_worker to etl;   -- etl: the `user` of dataflow.properties
--
-- owner   owns the tables: runs `odf init` and `odf token`.
-- worker  runs jobs, serves, registers, resubmits: changes rows, but not history, tokens and versions.
-- reader  reads everything except tokens: odf status, history, why, sql.

\if :{?schema}
\else
    \set schema dataflow
\endif
\if :{?owner}
\else
    \set owner dataflow_owner
\endif
\if :{?worker}
\else
    \set worker dataflow_worker
\endif
\if :{?reader}
\else
    \set reader dataflow_reader
\endif

begin;

select format('create role %I', name) from unnest(array[:'owner', :'worker', :'reader']) as wanted (name)
where not exists (select from pg_roles where rolname = name) \gexec

select format('create schema %I', :'schema') where not exists (select from pg_namespace where nspname = :'schema') \gexec

grant usage, create on schema :"schema" to :"owner";
grant usage on schema :"schema" to :"worker", :"reader";

-- The owner gets only what the owner of dataflow_meta has in the schema: other programs keep their tables.
create temp table ours on commit drop as
select c.relkind as kind, c.relname as name, format('%I.%I', n.nspname, c.relname) as path, c.relowner as owner
from pg_namespace n join pg_class c on c.relnamespace = n.oid
where n.nspname = :'schema' and c.relkind in ('r', 'v', 'S')
  and not exists (select from pg_depend d where d.objid = c.oid and d.deptype in ('a', 'i') and c.relkind = 'S')
union all
select 'f', p.proname, p.oid::regprocedure::text, p.proowner
from pg_namespace n join pg_proc p on p.pronamespace = n.oid
where n.nspname = :'schema';

delete from ours where owner is distinct from (select owner from ours where kind = 'r' and name = 'dataflow_meta');

select format('alter %s %s owner to %I', case kind when 'r' then 'table' when 'v' then 'view' when 'S' then 'sequence'
                                         else 'function' end, path, :'owner')
from ours order by path \gexec

select format('grant select on %s to %I, %I', path, :'worker', :'reader')
from ours where kind in ('r', 'v') and name <> 'streamtoken' \gexec

select format('grant select on %s to %I', path, :'worker') from ours where kind = 'r' and name = 'streamtoken' \gexec

select format('grant insert, update, delete on %s to %I', path, :'worker')
from ours where kind = 'r' and name not in ('dataevent', 'registration', 'dataflow_meta', 'streamtoken', 'fill') \gexec

select format('grant usage on %s to %I', 'sequence ' || path, :'worker') from ours where kind = 'S' \gexec

select format('grant execute on function %s to %I', path, :'worker') from ours where kind = 'f' and name in ('judge', 'fill_next') \gexec

-- Vacuuming keeps claims fast, and the tables of folded items small. Before PostgreSQL 17 only the owner may: autovacuum does it then.
select format('grant maintain on %s to %I', path, :'worker')
from ours where kind = 'r' and name in ('pending', 'datastatus', 'dataevent', 'chunkfact', 'claim', 'pipelinestep', 'streamitem',
                                   'streamkey', 'csvpart')
  and current_setting('server_version_num')::int >= 170000 \gexec

commit;
