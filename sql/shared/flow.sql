-- name: origins
-- Who declares what, and which dials a flow sets.
select kind, name, origin, dials from origin order by kind, name, origin;

-- name: ready
-- How many chunks of a dataset are READY.
select count(distinct dataid) from datastatus where datasetid = :datasetid and locktype = 'OUT' and status = 'READY';

-- name: set_dataset
-- Set all columns of a dataset; the others become null.
update dataset set {each column of dataset: column = :column}
where datasetid = :datasetid;

-- name: forget
-- A flow no longer declares a dataset or a job.
delete from origin where kind = :kind and name = :name and origin = :origin;
