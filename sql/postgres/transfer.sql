-- name: add_dataset
-- Add datasets from a file.
insert into dataset (datasetid, {each column of dataset: column})
select datasetid, {each column of dataset: column}
from json_to_recordset(cast(:rows as json)) as r(datasetid text, {each column of dataset: column text});

-- name: add_job
-- Add what jobs read, write and set from a file.
insert into job (jobid, itemtype, datasetid, itemvalue, modified)
select jobid, itemtype, datasetid, itemvalue, modified
from json_to_recordset(cast(:rows as json)) as r(
    jobid text, itemtype text, datasetid text, itemvalue text, modified timestamp);

-- name: add_datastatus
-- Add chunks' statuses from a file.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified)
select datasetid, jobid, dataid, locktype, status, modified
from json_to_recordset(cast(:rows as json)) as r(
    datasetid text, jobid text, dataid text, locktype text, status text, modified timestamp);
