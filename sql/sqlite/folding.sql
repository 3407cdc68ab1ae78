-- name: turn
-- Nothing to do: a transaction is the only writer.
select 1;

-- name: outputs
-- What the jobs of a chain produced from some items, as far as it is READY and old enough.
select s.dataid, s.jobid, s.datasetid, s.generation, f.rows, f.bytes, f.fingerprint, f.location
from (select value as dataid from json_each(:dataids)) as page
    cross join (select value ->> 'jobid' as jobid, value ->> 'datasetid' as datasetid from json_each(:pairs)) as pair
    cross join datastatus s on s.datasetid = pair.datasetid and s.jobid = pair.jobid and s.dataid = page.dataid
    cross join chunkfact f on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.locktype = 'OUT' and s.status = 'READY' and f.at < :before
  and not exists (select 1 from versioned_dataset v where v.datasetid = s.datasetid)
order by s.dataid, s.jobid, s.datasetid;

-- name: unsettled
-- Those of some items that can't be folded: because of a row of the chain that isn't READY, a claim, an
-- output whose input was replaced, or the fact that describes a replaced file.
select page.dataid from (select value as dataid from json_each(:dataids)) as page
where exists (
        select 1 from datastatus s
        where s.dataid = page.dataid
          and (s.jobid in (select value from json_each(:jobids))
               or s.datasetid in (select value from json_each(:datasetids)))
          and case when s.locktype = 'OUT' and s.status = 'READY' then not (s.jobid in (select value from json_each(:jobids))
                        and s.datasetid in (select value from json_each(:datasetids)))
                   else not (coalesce(s.locktype, '') = 'IN' and coalesce(s.status, '') = 'DONE') end)
    or exists (select 1 from claim c where c.dataid = page.dataid and c.jobid in (select value from json_each(:jobids)))
    or exists (select 1 from stale_chunk k
        where k.dataid = page.dataid and k.jobid in (select value from json_each(:jobids)))
    or exists (
        select 1 from chunkfact f
        where f.dataid = page.dataid and f.datasetid in (select value from json_each(:datasetids))
          and f.replaces
          and not exists (
              select 1 from chunkfact n
              where n.datasetid = f.datasetid and n.replaces and n.generation > f.generation));

-- name: remove_outputs
-- Delete the READY outputs of folded items; a trigger deletes their history.
delete from datastatus
where dataid in (select value from json_each(:dataids))
  and jobid in (select value from json_each(:jobids)) and locktype = 'OUT' and status = 'READY'
  and datasetid in (select value from json_each(:datasetids));

-- name: remove_reads
-- Delete the IN rows that the Java program left for them.
delete from datastatus
where dataid in (select value from json_each(:dataids))
  and jobid in (select value from json_each(:jobids)) and locktype = 'IN' and status = 'DONE';

-- name: remove_facts
-- Delete the facts about them.
delete from chunkfact
where dataid in (select value from json_each(:dataids)) and datasetid in (select value from json_each(:datasetids));

-- name: remove_steps
-- Delete what their runs printed.
delete from pipelinestep
where dataid in (select value from json_each(:dataids)) and jobid in (select value from json_each(:jobids));

-- name: remove_parts
-- Delete the positions of their rows in files.
delete from csvpart
where dataid in (select value from json_each(:dataids)) and jobid in (select value from json_each(:jobids));

-- name: remove_items
-- Delete the items themselves.
delete from streamitem where jobid = :jobid and dataid in (select value from json_each(:dataids));

-- name: free
-- How many bytes of the file are in use, and how many are free.
select (c.page_count - f.freelist_count) * s.page_size, f.freelist_count * s.page_size
from pragma_page_count() c cross join pragma_freelist_count() f cross join pragma_page_size() s;

-- name: shrink
-- Rewrite the file without its free space.
vacuum;

-- name: cut_log
-- Move the write-ahead log into the file, and truncate the log: a vacuum leaves the whole file in it.
pragma wal_checkpoint(truncate);
