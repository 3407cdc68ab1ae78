-- name: datasets
-- Where the datasets are.
select * from dataset where datasetid is not null order by datasetid;

-- name: live
-- The live claims, with or without a recent heartbeat.
select c.generation, c.dataid, c.jobid, c.started from claim c where c.owner is not null;

-- name: producers
-- The jobs that write a dataset.
select distinct jobid from job where itemtype = 'OUT' and datasetid = :datasetid and jobid is not null;

-- name: located
-- Where the chunks of a dataset are: the last production of each, and those that are being read.
select f.dataid, f.generation, f.location
from chunkfact f
where f.datasetid = :datasetid and f.location is not null
  and (f.generation = (
           select max(n.generation) from chunkfact n
           where n.datasetid = f.datasetid and n.dataid = f.dataid and n.location is not null
             and (n.validated is null or n.validated))
       or exists (
           select 1 from datastatus s
           where s.datasetid = f.datasetid and s.dataid = f.dataid and s.generation = f.generation));
