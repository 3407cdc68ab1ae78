-- name: all
-- The OUT rows of a dataset.
select dataid, jobid, status, generation from datastatus where datasetid = :datasetid and locktype = 'OUT';

-- name: size
-- How many rows a dataset has, counted up to :most.
select count(*) from (select 1 from datastatus where datasetid = :datasetid limit :most) as counted;

-- name: newest
-- The chunks of a dataset that changed last.
select dataid from datastatus where datasetid = :datasetid and locktype = 'OUT'
order by modified desc nulls last limit :limit;

-- name: page
-- The next chunks of a dataset that were produced, or are to be.
select distinct dataid from datastatus
where datasetid = :datasetid and dataid > :after and locktype = 'OUT' order by dataid limit :most;
