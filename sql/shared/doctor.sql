-- name: probe
-- Write a row that the transaction takes back.
insert into datastatus (datasetid, jobid, dataid, locktype, status)
values ('odf doctor', 'odf doctor', 'odf doctor', 'OUT', 'PENDING');

-- name: jobs
-- Every job that may have something to claim.
select distinct jobid from job where itemtype = 'OUT' and jobid is not null order by jobid;

-- name: size
-- How many rows there are to compare.
select count(*) from datastatus;
