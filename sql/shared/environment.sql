-- name: datasets
-- The datasets of a job, each with its registration and whether its chunks have bounds.
select d.*, j.datasetid as "dataflow datasetid", j.itemtype as "dataflow itemtype",
    exists (select 1 from chunkrange r where r.datasetid = j.datasetid) as "dataflow ranged"
from (select distinct itemtype, datasetid from job
      where jobid = :jobid and itemtype in ('IN', 'OUT') and datasetid <> 'today') as j
    left join dataset d on d.datasetid = j.datasetid;

-- name: bounds
-- The bounds of one chunk in those datasets of a job that are split by a column.
select r.datasetid, r.lower_bound, r.upper_bound
from chunkrange r
where r.dataid = :dataid and r.datasetid in (
    select j.datasetid from job j where j.jobid = :jobid and j.itemtype in ('IN', 'OUT'));
