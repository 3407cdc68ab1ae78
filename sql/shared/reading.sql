-- name: rows
-- How a chunk of a dataset stands, whoever made it.
select datasetid, jobid, locktype, status, modified, generation
from datastatus where datasetid = :datasetid and dataid = :dataid and locktype = 'OUT'
order by jobid;

-- name: events
-- The last change of each of those rows.
select e.jobid, e.status_after, e.at, e.who, e.why
from (select d.*, row_number() over (partition by d.jobid order by d.seq desc) as nth
      from dataevent d
      where d.datasetid = :datasetid and d.dataid = :dataid and d.locktype = 'OUT') as e
where e.nth = 1;

-- name: facts
-- What is known of every generation of the chunk.
select datasetid, generation, jobid, location, rows, bytes, fingerprint, validated, checks, at, inputs
from chunkfact where datasetid = :datasetid and dataid = :dataid;

-- name: dataset
-- Where the dataset is.
select * from dataset where datasetid = :datasetid;

-- name: producers
-- Which jobs write the dataset.
select distinct jobid from job
where itemtype = 'OUT' and datasetid = :datasetid and jobid is not null order by jobid;

-- name: bounds
-- Which rows of a table the chunk is.
select lower_bound, upper_bound, modulus from chunkrange
where datasetid = :datasetid and dataid = :dataid;
