-- name: latest
-- The newest change of some outputs: which execution made it, who and why.
select k.value ->> 'dataid', k.value ->> 'jobid', e.execution, e.who, e.why
from json_each(:chunks) k join dataevent e on e.seq = (
    select d.seq from dataevent d
    where d.dataid = k.value ->> 'dataid' and d.datasetid = :datasetid and d.jobid = k.value ->> 'jobid'
      and d.locktype = 'OUT' order by d.seq desc limit 1);

-- name: changes
-- An execution's last changes of the outputs of a job, the newest first.
select datasetid, dataid, status_before, status_after, generation, (julianday(at) - 2440587.5) * 86400, who, why
from dataevent where execution = :execution and jobid = :jobid and locktype = 'OUT'
order by seq desc limit :most;

-- name: earlier
-- Outputs of a job that aren't READY because of changes from before executions were recorded.
select s.datasetid, s.dataid, null, s.status, s.generation, (julianday(e.at) - 2440587.5) * 86400, e.who, e.why
from datastatus s join dataevent e on e.seq = (
    select d.seq from dataevent d
    where d.dataid = s.dataid and d.datasetid = s.datasetid and d.jobid = s.jobid and d.locktype = 'OUT'
    order by d.seq desc limit 1)
where s.jobid = :jobid and s.locktype = 'OUT' and s.status not in ('READY', 'PENDING') and e.execution is null;

-- name: recent
-- The newest executions: each with its job and the end of its last change.
select execution, jobid, (julianday(max(at)) - 2440587.5) * 86400 as ended from dataevent
where execution is not null and at >= strftime('%Y-%m-%d %H:%M:%f', 'now', '-' || :days || ' days')
  and status_after in (select value from json_each(:words))
group by execution, jobid order by ended desc limit :most;
