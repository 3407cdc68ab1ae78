-- name: column
-- The column that a table is split by.
select chunkcolumn from dataset where datasetid = :datasetid;

-- name: set_column
-- Record the column that a table is split by. On PostgreSQL, this change shows that somebody registers chunks.
update dataset set chunkcolumn = coalesce(cast(:column as text), chunkcolumn) where datasetid = :datasetid;

-- name: ranges
-- The chunks that a table was split into, and whether each was produced, or is to be.
select r.dataid, r.lower_bound, r.upper_bound, r.modulus,
       exists (
           select 1 from datastatus s where s.dataid = r.dataid and s.datasetid = r.datasetid and s.locktype = 'OUT')
from chunkrange r where r.datasetid = :datasetid;
