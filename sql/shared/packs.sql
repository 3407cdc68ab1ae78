-- name: chunks
-- Every row of a dataset, or of one chunk of it, and what is known of the generation that it names.
select s.dataid, s.jobid, s.locktype, s.status, s.generation, f.location, f.bytes, f.generation as told
from datastatus s
    left join chunkfact f
        on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.datasetid = :datasetid and (cast(:dataid as text) is null or s.dataid = :dataid);

-- name: move
-- Let a chunk be in a pack, if it is READY, of this generation, where it was, and in nobody's hands.
update chunkfact set location = :location
where datasetid = :datasetid and dataid = :dataid and generation = :generation
  and (location is null or location in (:was, :location))
  and exists (
      select 1 from datastatus s
      where s.datasetid = :datasetid and s.dataid = :dataid and s.locktype = 'OUT' and s.status = 'READY'
        and s.generation = :generation)
  and not exists (
      select 1 from datastatus s
      where s.datasetid = :datasetid and s.dataid = :dataid
        and ((s.locktype = 'OUT' and s.status <> 'READY') or (s.locktype = 'IN' and s.status = 'RUNNING')));

-- name: resize
-- Tell how many bytes a chunk has after it was written anew.
update chunkfact set bytes = :bytes
where datasetid = :datasetid and dataid = :dataid and generation = :generation;
