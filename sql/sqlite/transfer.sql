-- name: add_dataset
-- Add datasets from a file.
insert into dataset (datasetid, {each column of dataset: column})
select value ->> 'datasetid', {each column of dataset: value ->> 'column'} from json_each(:rows);

-- name: add_job
-- Add what jobs read, write and set from a file.
insert into job (jobid, itemtype, datasetid, itemvalue, modified)
select value ->> 'jobid', value ->> 'itemtype', value ->> 'datasetid', value ->> 'itemvalue', value ->> 'modified'
from json_each(:rows);

-- name: add_datastatus
-- Add chunks' statuses from a file.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified)
select value ->> 'datasetid', value ->> 'jobid', value ->> 'dataid', value ->> 'locktype', value ->> 'status',
       value ->> 'modified'
from json_each(:rows);
