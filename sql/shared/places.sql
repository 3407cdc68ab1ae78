-- name: chunks
-- The chunks of a dataset, whoever made them: how they stand, and where they were produced.
select s.dataid, s.generation, f.location, s.status
from datastatus s
    left join chunkfact f
        on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.datasetid = :datasetid and s.locktype = 'OUT';
