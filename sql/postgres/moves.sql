-- name: failed
-- The chunks that failed, of a job or of all, since a given time or ever.
select distinct jobid, dataid from datastatus
where locktype = 'OUT' and status in ('FAILED', 'ERROR') and (cast(:jobid as text) is null or jobid = :jobid)
  and (cast(:since as timestamptz) is null or cast(modified as timestamptz) >= :since)
limit :most;

-- name: outputs
-- The OUT rows of some jobs for some chunks, locked until the move has ended.
-- The lock keeps each subquery separate, so that the planner has to look up chunk by chunk.
select s.jobid, s.datasetid, s.dataid, s.status
from json_array_elements_text(cast(:dataids as json)) as k(dataid)
    cross join lateral (
        select * from datastatus d
        where d.dataid = k.dataid and d.locktype = 'OUT'
          and d.jobid = any(array(select json_array_elements_text(cast(:jobids as json))))
        for update of d) as s;

-- name: produced
-- The OUT rows of a dataset for some chunks, of any producer, locked until the move has ended.
select s.jobid, s.datasetid, s.dataid, s.status
from json_array_elements_text(cast(:dataids as json)) as k(dataid)
    cross join lateral (
        select * from datastatus d
        where d.dataid = k.dataid and d.datasetid = :datasetid and d.locktype = 'OUT'
        for update of d) as s;

-- name: move
-- Move OUT rows from the status that was read to another; a row that changed since stays unchanged.
with target as materialized (
    select s.place, k.status_before, k.status_after
    from json_to_recordset(cast(:rows as json)) as k(
            datasetid text, jobid text, dataid text, status_before text, status_after text)
        cross join lateral (
            select d.ctid as place from datastatus d
            where d.datasetid = k.datasetid and d.jobid = k.jobid and d.dataid = k.dataid and d.locktype = 'OUT'
            for update of d) as s
)
update datastatus s
set status = target.status_after
from target
where s.ctid = target.place and s.status is not distinct from target.status_before;

-- name: add
-- Write OUT rows of chunks that had none.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified, generation)
select k.datasetid, k.jobid, k.dataid, 'OUT', k.status_after, now(), k.generation
from json_to_recordset(cast(:rows as json)) as k(
    datasetid text, jobid text, dataid text, status_after text, generation bigint)
on conflict (datasetid, jobid, dataid) do nothing;

-- name: generations
-- New generations, as JSON.
select cast(json_agg(nextval('generation')) as text) from generate_series(1, cast(:count as bigint));

-- name: before_hold
-- The earlier statuses of held rows, from history: '' is absent, UNKNOWN was held when history began.
select k.jobid, k.datasetid, k.dataid,
       case when e.seq is null or e.why = 'found on init' and e.who = 'odf init' then 'UNKNOWN'
            else coalesce(e.status_before, '') end
from json_to_recordset(cast(:rows as json)) as k(datasetid text, jobid text, dataid text)
    left join lateral (
        select e.seq, e.status_before, e.who, e.why from dataevent e
        where e.dataid = k.dataid and e.datasetid = k.datasetid and e.jobid = k.jobid and e.locktype = 'OUT'
          and (e.status_before is null
               or e.status_before in (select json_array_elements_text(cast(:words as json))))
        order by e.seq desc limit 1) as e on true;

-- name: holder
-- Who holds a chunk of a job, since when, until when.
select owner, to_char(started at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
       to_char(lease_end at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), lease_end < now()
from claim where jobid = :jobid and dataid = :dataid and owner is not null;

-- name: unclaimed
-- Chunks that are RUNNING without a claim, since when, and whether that is longer than :age seconds.
select s.jobid, s.datasetid, s.dataid, s.status,
       to_char(began.at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
       coalesce(began.at < now() - cast(:age as float8) * interval '1 second', true)
from datastatus s
    left join lateral (
        select case when e.who = 'odf init' and e.why = 'found on init'
                    then least(e.at, cast(s.modified as timestamptz)) else e.at end as at
        from dataevent e
        where e.dataid = s.dataid and e.datasetid = s.datasetid and e.jobid = s.jobid
          and e.locktype = 'OUT' and e.status_after = 'RUNNING'
        order by e.seq desc limit 1) as event on true
    cross join lateral (select coalesce(event.at, cast(s.modified as timestamptz)) as at) as began
where s.locktype = 'OUT' and s.status = 'RUNNING' and (cast(:jobid as text) is null or s.jobid = :jobid)
  and not exists (
      select 1 from claim c where c.jobid = s.jobid and c.dataid = s.dataid and c.owner is not null)
order by s.jobid, s.dataid, s.datasetid;
