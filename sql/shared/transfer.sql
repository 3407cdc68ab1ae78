-- name: dataset
-- Every dataset, as a file has it.
select datasetid, {each column of dataset: column} from dataset order by datasetid;

-- name: job
-- What every job reads, writes and sets, as a file has it.
select jobid, itemtype, datasetid, itemvalue, cast(modified as text) as modified
from job order by jobid, itemtype, datasetid;

-- name: datastatus
-- Every chunk's status, as a file has it.
select datasetid, jobid, dataid, locktype, status, cast(modified as text) as modified
from datastatus order by datasetid, jobid, dataid;
