-- name: stamp
-- Record the version of the tables, and that its triggers exist. :version is replaced by the number.
insert into dataflow_meta (name, value) values ('version', ':version'), ('schema', ':version')
on conflict (name) do update set value = excluded.value;

-- name: remember
-- Begin the history of rows that are older than the history.
insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why)
select s.datasetid, s.jobid, s.dataid, s.locktype, s.status, s.generation, 'odf init', 'found on init'
from datastatus s
where not exists (select 1 from dataevent e where e.dataid = s.dataid and e.datasetid = s.datasetid
                    and e.jobid = s.jobid);

-- name: forgotten
-- Whether a row has no history.
select 1 from datastatus s
where not exists (select 1 from dataevent e where e.dataid = s.dataid and e.datasetid = s.datasetid
                    and e.jobid = s.jobid)
limit 1;

-- name: record
-- Record in history what was registered while its triggers were missing.
insert into registration (tablename, jobid, datasetid, itemtype, n, content, found, who, why)
select u.tablename, u.jobid, u.datasetid, u.itemtype, u.n, u.content,
       case when exists (
           select 1 from registration r
           where r.tablename = u.tablename and (r.jobid = u.jobid or (u.jobid is null and r.datasetid = u.datasetid)))
       then 0 else 1 end,
       'odf init', 'found on init'
from unrecorded u order by u.n;
