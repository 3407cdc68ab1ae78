-- name: turn
-- One writer at a time: there is nobody to wait for.
select 1;

-- name: outputs
-- What the jobs of a chain have made of some items, as far as it is READY and old enough.
select s.dataid, s.jobid, s.datasetid, s.generation, f.rows, f.bytes, f.fingerprint, f.location
from (select value as dataid from json_each(:dataids)) as page
    cross join (select value ->> 'jobid' as jobid, value ->> 'datasetid' as datasetid from json_each(:pairs)) as pair
    cross join datastatus s on s.datasetid = pair.datasetid and s.jobid = pair.jobid and s.dataid = page.dataid
    cross join chunkfact f on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.locktype = 'OUT' and s.status = 'READY' and f.at < :before
  and not exists (select 1 from versioned_dataset v where v.datasetid = s.datasetid)
order by s.dataid, s.jobid, s.datasetid;

-- name: unsettled
-- Those of some items that something keeps from being folded: a row of the chain that isn't READY, a claim, an
-- output whose input was replaced, or the fact that tells what a replaced file holds.
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
-- Remove the READY outputs of items that are folded; a trigger removes their history.
delete from datastatus
where dataid in (select value from json_each(:dataids))
  and jobid in (select value from json_each(:jobids)) and locktype = 'OUT' and status = 'READY'
  and datasetid in (select value from json_each(:datasetids));

-- name: remove_reads
-- Remove what the Java program has left of its reading of them.
delete from datastatus
where dataid in (select value from json_each(:dataids))
  and jobid in (select value from json_each(:jobids)) and locktype = 'IN' and status = 'DONE';

-- name: remove_facts
-- Remove what was known of them.
delete from chunkfact
where dataid in (select value from json_each(:dataids)) and datasetid in (select value from json_each(:datasetids));

-- name: remove_steps
-- Remove what their runs have printed.
delete from pipelinestep
where dataid in (select value from json_each(:dataids)) and jobid in (select value from json_each(:jobids));

-- name: remove_parts
-- Remove where their rows are in files.
delete from csvpart
where dataid in (select value from json_each(:dataids)) and jobid in (select value from json_each(:jobids));

-- name: remove_items
-- Remove the items themselves.
delete from streamitem where jobid = :jobid and dataid in (select value from json_each(:dataids));

-- name: free
-- How many bytes of the file are in use, and how many are free.
select (c.page_count - f.freelist_count) * s.page_size, f.freelist_count * s.page_size
from pragma_page_count() c cross join pragma_freelist_count() f cross join pragma_page_size() s;

-- name: shrink
-- Write the file anew without what is free in it.
vacuum;

-- name: cut_log
-- Move what is in the write-ahead log to the file, and cut the log: a vacuum leaves the whole file in it.
pragma wal_checkpoint(truncate);
