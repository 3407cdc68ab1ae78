-- name: rows
-- The rows of one chunk of a dataset, of all producers and readers.
select datasetid, jobid, locktype, status, cast(modified as timestamptz) as modified, generation
from datastatus where datasetid = :datasetid and dataid = :dataid
order by jobid;
