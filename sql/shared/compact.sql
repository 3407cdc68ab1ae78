-- name: unpack
-- Record that a packed chunk has a directory, if it is READY with this generation and nobody has claimed it.
update chunkfact set location = :location, bytes = :bytes
where datasetid = :datasetid and dataid = :dataid and generation = :generation
  and location in (:was, :location)
  and exists (
      select 1 from datastatus s
      where s.datasetid = :datasetid and s.dataid = :dataid and s.locktype = 'OUT' and s.status = 'READY'
        and s.generation = :generation)
  and not exists (
      select 1 from datastatus s
      where s.datasetid = :datasetid and s.dataid = :dataid
        and ((s.locktype = 'OUT' and s.status <> 'READY') or (s.locktype = 'IN' and s.status = 'RUNNING')));

-- name: resize
-- Record the size of a chunk after it was rewritten.
update chunkfact set bytes = :bytes
where datasetid = :datasetid and dataid = :dataid and generation = :generation;
