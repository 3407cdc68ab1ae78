-- name: column
-- By which column a table is split.
select chunkcolumn from dataset where datasetid = :datasetid;

-- name: set_column
-- Remember by which column a table is split. PostgreSQL tells by this change that somebody registers chunks.
update dataset set chunkcolumn = coalesce(cast(:column as text), chunkcolumn) where datasetid = :datasetid;
