-- name: all
-- The OUT rows of a dataset.
select dataid, jobid, status, generation from datastatus where datasetid = :datasetid and locktype = 'OUT';
