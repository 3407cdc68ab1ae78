-- name: rows
-- The rows of one chunk of a dataset, whoever made or reads it.
select datasetid, jobid, locktype, status, cast(modified as timestamptz) as modified, generation
from datastatus where datasetid = :datasetid and dataid = :dataid
order by jobid;
