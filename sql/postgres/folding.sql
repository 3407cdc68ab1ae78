-- name: turn
-- Take turns with others that fold items.
select pg_advisory_xact_lock(hashtextextended('fold', 79643));

-- name: outputs
-- What the jobs of a chain produced from some items, as far as it is READY and old enough.
-- One look-up per item: a join would read every item of the jobs for each page.
select page.dataid, s.jobid, s.datasetid, s.generation, f.rows, f.bytes, f.fingerprint, f.location
from unnest(cast(:dataids as text[])) as page(dataid)
    cross join lateral (
        select d.jobid, d.datasetid, d.generation from datastatus d
        where d.dataid = page.dataid and d.locktype = 'OUT' and d.status = 'READY'
          and exists (
              select 1 from json_to_recordset(cast(:pairs as json)) as pair(jobid text, datasetid text)
              where pair.jobid = d.jobid and pair.datasetid = d.datasetid)
        offset 0) as s
    cross join lateral (
        select c.rows, c.bytes, c.fingerprint, c.location from chunkfact c
        where c.datasetid = s.datasetid and c.dataid = page.dataid and c.generation = s.generation
          and c.at < :before
        offset 0) as f
where not exists (select 1 from versioned_dataset v where v.datasetid = s.datasetid)
order by page.dataid, s.jobid, s.datasetid;

-- name: unsettled
-- Those of some items that can't be folded: because of a row of the chain that isn't READY, a claim, an
-- output whose input was replaced, or the fact that describes a replaced file.
select page.dataid from unnest(cast(:dataids as text[])) as page(dataid)
where exists (
        select 1 from datastatus s
        where s.dataid = page.dataid
          and (s.jobid = any(cast(:jobids as text[]))
               or s.datasetid = any(cast(:datasetids as text[])))
          and case when s.locktype = 'OUT' and s.status = 'READY' then not (s.jobid = any(cast(:jobids as text[]))
                        and s.datasetid = any(cast(:datasetids as text[])))
                   else not (coalesce(s.locktype, '') = 'IN' and coalesce(s.status, '') = 'DONE') end)
    or exists (select 1 from claim c where c.dataid = page.dataid and c.jobid = any(cast(:jobids as text[])))
    or exists (select 1 from stale_chunk k
        where k.dataid = page.dataid and k.jobid = any(cast(:jobids as text[])))
    or exists (
        select 1 from chunkfact f
        where f.dataid = page.dataid and f.datasetid = any(cast(:datasetids as text[]))
          and f.replaces
          and not exists (
              select 1 from chunkfact n
              where n.datasetid = f.datasetid and n.replaces and n.generation > f.generation));

-- name: remove_outputs
-- Delete the READY outputs of folded items; a trigger deletes their history.
delete from datastatus
where dataid = any(cast(:dataids as text[]))
  and jobid = any(cast(:jobids as text[])) and locktype = 'OUT' and status = 'READY'
  and datasetid = any(cast(:datasetids as text[]));

-- name: remove_reads
-- Delete the IN rows that the Java program left for them.
delete from datastatus
where dataid = any(cast(:dataids as text[]))
  and jobid = any(cast(:jobids as text[])) and locktype = 'IN' and status = 'DONE';

-- name: remove_facts
-- Delete the facts about them.
delete from chunkfact where dataid = any(cast(:dataids as text[])) and datasetid = any(cast(:datasetids as text[]));

-- name: remove_steps
-- Delete what their runs printed.
delete from pipelinestep where dataid = any(cast(:dataids as text[])) and jobid = any(cast(:jobids as text[]));

-- name: remove_parts
-- Delete the positions of their rows in files.
delete from csvpart where dataid = any(cast(:dataids as text[])) and jobid = any(cast(:jobids as text[]));

-- name: remove_items
-- Delete the items themselves.
delete from streamitem where jobid = :jobid and dataid = any(cast(:dataids as text[]));

-- name: tidy
-- Free the space of deleted rows for new ones, in any of the tables that items' rows leave.
vacuum (skip_locked, parallel 0) datastatus;

-- name: bloated
-- Tables that are too large for their few rows: rewriting them takes a moment. Their rows are counted, since
-- the estimate of a table that a vacuum has just emptied is outdated.
select s.name from (
  select 'datastatus' as name, count(*) as rows, coalesce(sum(pg_column_size(t)), 0) as bytes from (select * from datastatus limit 5001) t union all
  select 'dataevent', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from dataevent limit 5001) t union all
  select 'chunkfact', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from chunkfact limit 5001) t union all
  select 'claim', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from claim limit 5001) t union all
  select 'pending', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from pending limit 5001) t union all
  select 'pipelinestep', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from pipelinestep limit 5001) t union all
  select 'streamitem', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from streamitem limit 5001) t union all
  select 'streamkey', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from streamkey limit 5001) t union all
  select 'csvpart', count(*), coalesce(sum(pg_column_size(t)), 0) from (select * from csvpart limit 5001) t
) s join pg_class c on c.relname = s.name and c.relnamespace = cast(current_schema() as regnamespace)
where s.rows <= 5000 and pg_has_role(c.relowner, 'usage')
  and pg_relation_size(c.oid) + pg_indexes_size(c.oid) > greatest(2097152, 4 * s.bytes);
