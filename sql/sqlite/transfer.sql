-- name: add_dataset
-- Add datasets from a file.
insert into dataset (datasetid, hostname, database, schemaname, tablename, username, encryptedpass, format,
                     chunkcolumn, domain, writemode, options)
select value ->> 'datasetid', value ->> 'hostname', value ->> 'database', value ->> 'schemaname',
       value ->> 'tablename', value ->> 'username', value ->> 'encryptedpass', value ->> 'format',
       value ->> 'chunkcolumn', value ->> 'domain', value ->> 'writemode', value ->> 'options'
from json_each(:rows);

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
