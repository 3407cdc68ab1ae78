-- name: jobs
-- Every job that reads or writes a dataset.
select distinct jobid from job where itemtype in ('IN', 'OUT') and jobid is not null order by jobid;

-- name: stamp
-- Remember which version of the tables this is.
insert into dataflow_meta (name, value) values ('schema', '3')
on conflict (name) do update set value = excluded.value;

-- name: remember
-- Begin the history of rows that were there before history was.
insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why)
select s.datasetid, s.jobid, s.dataid, s.locktype, s.status, s.generation, 'odf init', 'found on init'
from datastatus s
where not exists (select 1 from dataevent e where e.dataid = s.dataid and e.datasetid = s.datasetid
                    and e.jobid = s.jobid);
