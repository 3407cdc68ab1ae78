-- name: column
-- By which column a table is split.
select chunkcolumn from dataset where datasetid = :datasetid;

-- name: set_column
-- Remember by which column a table is split. PostgreSQL tells by this change that somebody registers chunks.
update dataset set chunkcolumn = coalesce(cast(:column as text), chunkcolumn) where datasetid = :datasetid;

-- name: ranges
-- The chunks that a table has been split into, and whether anybody made each, or is to make it.
select r.dataid, r.lower_bound, r.upper_bound, r.modulus,
       exists (
           select 1 from datastatus s where s.dataid = r.dataid and s.datasetid = r.datasetid and s.locktype = 'OUT')
from chunkrange r where r.datasetid = :datasetid;
