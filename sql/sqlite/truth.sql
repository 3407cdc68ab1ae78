-- name: some
-- The OUT rows of a dataset for some chunks.
select s.dataid, s.jobid, s.status, s.generation
from json_each(:dataids) k cross join datastatus s on s.dataid = k.value
where s.datasetid = :datasetid and s.locktype = 'OUT';

-- name: undone
-- The chunks, of those given, that aren't READY in one of some datasets, or wait for a job that writes one.
select k.value from json_each(:dataids) k
where exists (
        select 1 from datastatus d
        where d.dataid = k.value and d.locktype = 'OUT' and d.status is not 'READY'
          and d.datasetid in (select value from json_each(:datasetids)))
   or exists (
        select 1 from pending p
        where p.dataid = k.value and p.jobid in (
            select o.jobid from job o where o.itemtype = 'OUT'
              and o.datasetid in (select value from json_each(:datasetids))));

-- name: known
-- The chunks, of those given, that any of some datasets has.
select k.value from json_each(:dataids) k
where exists (
    select 1 from datastatus d
    where d.dataid = k.value and d.locktype = 'OUT'
      and d.datasetid in (select value from json_each(:datasetids)));

-- name: facts
-- The facts about some READY chunks of a dataset.
select f.dataid, f.jobid, f.location, f.rows, f.bytes, f.fingerprint, f.validated, f.checks, f.inputs, f.schema,
       f.metadata, f.code, f.at
from json_each(:chunks) k cross join chunkfact f on f.datasetid = :datasetid and f.dataid = k.value ->> 'dataid'
                    and f.generation = k.value ->> 'generation';

-- name: holders
-- The runs that have claimed some chunks of some jobs.
select c.dataid, c.jobid, c.runid
from json_each(:chunks) k cross join claim c on c.jobid = k.value ->> 'jobid' and c.dataid = k.value ->> 'dataid'
where c.owner is not null and c.runid is not null;
