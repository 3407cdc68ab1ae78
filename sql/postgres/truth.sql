-- name: some
-- The OUT rows of a dataset for some chunks.
-- Here and below, `offset 0` keeps the subquery separate: a join would scan tables that aren't analyzed yet.
select s.dataid, s.jobid, s.status, s.generation
from json_array_elements_text(cast(:dataids as json)) as k(dataid)
    cross join lateral (
        select * from datastatus d
        where d.dataid = k.dataid and d.datasetid = :datasetid and d.locktype = 'OUT' offset 0) as s;

-- name: undone
-- The chunks, of those given, that aren't READY in one of some datasets, or wait for a job that writes one.
select k.dataid
from json_array_elements_text(cast(:dataids as json)) as k(dataid)
where exists (
        select 1 from datastatus d
        where d.dataid = k.dataid and d.locktype = 'OUT' and d.status is distinct from 'READY'
          and d.datasetid = any(array(select json_array_elements_text(cast(:datasetids as json)))))
   or exists (
        select 1 from pending p
        where p.dataid = k.dataid and p.jobid = any(array(
            select o.jobid from job o where o.itemtype = 'OUT'
              and o.datasetid = any(array(select json_array_elements_text(cast(:datasetids as json)))))));

-- name: known
-- The chunks, of those given, that any of some datasets has.
select k.dataid
from json_array_elements_text(cast(:dataids as json)) as k(dataid)
    cross join lateral (
        select 1 from datastatus d
        where d.dataid = k.dataid and d.locktype = 'OUT'
          and d.datasetid = any(array(select json_array_elements_text(cast(:datasetids as json))))
        limit 1) as s;

-- name: facts
-- The facts about some READY chunks of a dataset.
select k.dataid, f.jobid, f.location, f.rows, f.bytes, f.fingerprint, f.validated, f.checks, f.inputs,
       f.schema, f.metadata, f.code, cast(f.at as text) as at
from json_to_recordset(cast(:chunks as json)) as k(dataid text, generation bigint)
    cross join lateral (
        select * from chunkfact c
        where c.datasetid = :datasetid and c.dataid = k.dataid and c.generation = k.generation offset 0) as f;

-- name: holders
-- The runs that have claimed some chunks of some jobs.
select k.dataid, k.jobid, c.runid
from json_to_recordset(cast(:chunks as json)) as k(dataid text, jobid text)
    cross join lateral (
        select * from claim h where h.jobid = k.jobid and h.dataid = k.dataid offset 0) as c
where c.owner is not null and c.runid is not null;
