-- name: datasets
-- Every registered dataset, with all columns of the table.
select * from dataset order by datasetid;

-- name: jobs
-- What every job reads, writes and sets.
select distinct jobid, itemtype, datasetid, itemvalue from job
where jobid is not null
order by jobid, itemtype, datasetid, itemvalue;

-- name: policies
-- The dials of every job that sets any.
select * from jobpolicy order by jobid;

-- name: produced
-- The datasets that have chunks; takes a step per dataset, not per chunk.
with recursive seen(datasetid) as (
    select min(datasetid) from datastatus
    union all
    select (select min(s.datasetid) from datastatus s where s.datasetid > seen.datasetid)
    from seen where seen.datasetid is not null
)
select seen.datasetid from seen
where seen.datasetid is not null
  and exists (select 1 from datastatus s where s.datasetid = seen.datasetid and s.locktype = 'OUT');

-- name: names
-- The name that the domain of each dataset had when it was first seen.
select datasetid, name from domainname order by datasetid;

-- name: keep_name
-- Record the name of a dataset's domain, unless it has one.
insert into domainname (datasetid, name) values (:datasetid, :name) on conflict (datasetid) do nothing;

-- name: change_name
-- Record another name of a dataset's domain.
update domainname set name = :name where datasetid = :datasetid;

-- name: forget_name
-- Forget the name of a dataset's domain, unless the dataset has chunks.
delete from domainname where datasetid = :datasetid
  and not exists (select 1 from datastatus s where s.datasetid = domainname.datasetid);
