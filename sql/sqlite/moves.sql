-- name: failed
-- The chunks that failed, of a job or of all, since a given time or ever.
select distinct jobid, dataid from datastatus
where locktype = 'OUT' and status in ('FAILED', 'ERROR') and (:jobid is null or jobid = :jobid)
  and (:since is null or modified >= :since)
limit :most;

-- name: outputs
-- The OUT rows of some jobs for some chunks.
select s.jobid, s.datasetid, s.dataid, s.status
from json_each(:dataids) as k cross join datastatus s on s.dataid = k.value
where s.locktype = 'OUT' and s.jobid in (select value from json_each(:jobids));

-- name: produced
-- The OUT rows of a dataset for some chunks, of any producer.
select s.jobid, s.datasetid, s.dataid, s.status
from json_each(:dataids) as k cross join datastatus s on s.dataid = k.value and s.datasetid = :datasetid
where s.locktype = 'OUT';

-- name: move
-- Move OUT rows from the status that was read to another; a row that changed since stays unchanged.
update datastatus
set status = k.value ->> 'status_after'
from json_each(:rows) as k
where datasetid = k.value ->> 'datasetid' and jobid = k.value ->> 'jobid' and dataid = k.value ->> 'dataid'
  and locktype = 'OUT' and status is k.value ->> 'status_before';

-- name: add
-- Write OUT rows of chunks that had none.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified, generation)
select value ->> 'datasetid', value ->> 'jobid', value ->> 'dataid', 'OUT', value ->> 'status_after',
       strftime('%Y-%m-%d %H:%M:%f', 'now'), value ->> 'generation'
from json_each(:rows) where true
on conflict (datasetid, jobid, dataid) do nothing;

-- name: generations
-- New generations, as JSON.
update generation set last = last + :count
returning (
    with recursive number(value) as (
        select last - :count + 1 union all select value + 1 from number where value < last)
    select json_group_array(value) from number);

-- name: before_hold
-- The earlier statuses of held rows, from history: '' is absent, UNKNOWN was held when history began.
select k.jobid, k.datasetid, k.dataid,
       case when e.seq is null or (e.who = 'odf init' and e.why = 'found on init') then 'UNKNOWN'
            else coalesce(e.status_before, '') end
from (select value ->> 'jobid' as jobid, value ->> 'datasetid' as datasetid, value ->> 'dataid' as dataid,
             (select max(seq) from dataevent e
              where e.dataid = value ->> 'dataid' and e.datasetid = value ->> 'datasetid'
                and e.jobid = value ->> 'jobid' and e.locktype = 'OUT'
                and (e.status_before is null or e.status_before in (select w.value from json_each(:words) as w))
             ) as seq
      from json_each(:rows)) as k
    left join dataevent e on e.seq = k.seq;

-- name: holder
-- Who holds a chunk of a job, since when, until when.
select owner, strftime('%Y-%m-%d %H:%M:%S UTC', started), strftime('%Y-%m-%d %H:%M:%S UTC', lease_end),
       lease_end < strftime('%Y-%m-%d %H:%M:%f', 'now')
from claim where jobid = :jobid and dataid = :dataid and owner is not null;

-- name: unclaimed
-- Chunks that are RUNNING without a claim, since when, and whether that is longer than :age seconds.
select jobid, datasetid, dataid, status, strftime('%Y-%m-%d %H:%M:%S UTC', at),
       coalesce(julianday(at) < julianday('now') - :age / 86400.0, true)
from (
    select s.jobid, s.datasetid, s.dataid, s.status,
           coalesce((
               select case when e.who = 'odf init' and e.why = 'found on init'
                           then coalesce(min(e.at, s.modified), e.at) else e.at end
               from dataevent e
               where e.dataid = s.dataid and e.datasetid = s.datasetid and e.jobid = s.jobid
                 and e.locktype = 'OUT' and e.status_after = 'RUNNING'
               order by e.seq desc limit 1), s.modified) as at
    from datastatus s
    where s.locktype = 'OUT' and s.status = 'RUNNING' and (:jobid is null or s.jobid = :jobid)
      and not exists (
          select 1 from claim c where c.jobid = s.jobid and c.dataid = s.dataid and c.owner is not null))
order by jobid, dataid, datasetid;
