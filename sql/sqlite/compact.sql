-- name: chunks
-- Every row of some chunks of a dataset, and the facts about its generation.
select s.dataid, s.jobid, s.locktype, s.status, s.generation, f.location
from json_each(:dataids) k
    cross join datastatus s on s.dataid = k.value and s.datasetid = :datasetid
    left join chunkfact f
        on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation;
