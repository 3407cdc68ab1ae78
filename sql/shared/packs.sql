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
