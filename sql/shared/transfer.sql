-- name: dataset
-- Every dataset, in the columns of its file.
select datasetid, {each column of dataset: column} from dataset order by datasetid;

-- name: job
-- What every job reads, writes and sets, in the columns of its file.
select jobid, itemtype, datasetid, itemvalue, cast(modified as text) as modified
from job order by jobid, itemtype, datasetid;

-- name: datastatus
-- Every chunk's status, in the columns of its file.
select datasetid, jobid, dataid, locktype, status, cast(modified as text) as modified
from datastatus order by datasetid, jobid, dataid;
