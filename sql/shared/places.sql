-- name: chunks
-- The chunks of a dataset, of any producer: status, location, and which are items.
select s.dataid, s.generation, f.location, s.status, s.jobid, i.jobid is not null as is_item
from datastatus s
    left join streamitem i on i.jobid = s.jobid and i.dataid = s.dataid
    left join chunkfact f
        on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.datasetid = :datasetid and s.locktype = 'OUT';
