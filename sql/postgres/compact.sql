-- name: chunks
-- Every row of some chunks of a dataset, and the facts about its generation.
-- `offset 0` keeps the subquery separate: a join would scan tables that aren't analyzed yet.
select s.dataid, s.jobid, s.locktype, s.status, s.generation, f.location
from json_array_elements_text(cast(:dataids as json)) as k(dataid)
    cross join lateral (
        select * from datastatus d where d.dataid = k.dataid and d.datasetid = :datasetid offset 0) as s
    left join lateral (
        select * from chunkfact c
        where c.datasetid = s.datasetid and c.dataid = s.dataid and c.generation = s.generation offset 0) as f on true;
