-- name: rows
-- The rows that decide about one chunk of a job: its own, and those of its datasets by any job.
select s.datasetid, s.jobid, s.locktype, s.status, s.modified, s.generation
from datastatus s
where s.dataid = :dataid and s.datasetid in (select j.datasetid from job j where j.jobid = :jobid)
order by s.datasetid, s.jobid;

-- name: events
-- The last change of each of those rows, until now or until a moment in the past.
select e.datasetid, e.jobid, e.locktype, e.status_after, e.at, e.generation, e.who, e.why
from (select d.*, row_number() over (partition by d.datasetid, d.jobid order by d.seq desc) as nth
      from dataevent d
      where d.dataid = :dataid and d.datasetid in (select j.datasetid from job j where j.jobid = :jobid)
        and (cast(:now as integer) = 1 or d.at <= :at)) as e
where e.nth = 1
order by e.datasetid, e.jobid;

-- name: facts
-- What is known of every generation of a chunk.
select datasetid, generation, jobid, location, rows, bytes, fingerprint, validated, checks, at, inputs
from chunkfact
where dataid = :dataid and datasetid in (select j.datasetid from job j where j.jobid = :jobid)
  and (cast(:now as integer) = 1 or at <= :at)
order by datasetid, generation;

-- name: claims
-- Who holds or will retry a chunk.
select jobid, generation, owner, runid, started, heartbeat, lease_end, attempts, losses, retry_at
from claim where dataid = :dataid;

-- name: datasets
-- Where the datasets of a job are.
select distinct d.datasetid, d.hostname, d.database, d.schemaname, d.tablename, d.format
from dataset d where d.datasetid in (select j.datasetid from job j where j.jobid = :jobid)
order by d.datasetid;

-- name: producers
-- Which jobs write the datasets of a job.
select distinct o.datasetid, o.jobid from job o
where o.itemtype = 'OUT' and o.jobid is not null
  and o.datasetid in (select j.datasetid from job j where j.jobid = :jobid)
order by o.datasetid, o.jobid;

-- name: live
-- How many chunks of a job are being run, and by whom for one.
select count(*), min(owner) from claim where jobid = :jobid and owner is not null;

-- name: dial
-- What keeps a job from claiming.
select concurrency, paused_until from jobpolicy where jobid = :jobid;

-- name: claimable
-- How many chunks a job may claim now.
select count(*) from pending where jobid = :jobid;

-- name: since
-- When history begins.
select min(at) from dataevent;

-- name: chunks
-- Every chunk that a job could know of, by the first thing that stands in its way: how many there are of
-- each kind, and the first few of them. Nothing in the way is ''.
with item as (
    select distinct itemtype, datasetid from job
    where jobid = :jobid and itemtype in ('IN', 'OUT') and datasetid is not null
),
state as (
    select s.datasetid, s.jobid, s.dataid, coalesce(s.locktype, '') as locktype, coalesce(s.status, '?') as status
    from datastatus s
    where cast(:now as integer) = 1 and s.datasetid in (select datasetid from item)
    union all
    select e.datasetid, e.jobid, e.dataid, coalesce(e.locktype, ''), e.status_after
    from (select d.*, row_number() over (partition by d.datasetid, d.jobid, d.dataid order by d.seq desc) as nth
          from dataevent d
          where cast(:now as integer) = 0 and d.at <= :at and d.datasetid in (select datasetid from item)) as e
    where e.nth = 1 and e.status_after is not null
),
chunk as (
    select s.dataid,
        max(case when i.itemtype = 'OUT' and s.locktype = 'OUT' and s.status = 'RUNNING' then 1
                 when i.itemtype = 'OUT' and s.jobid = :jobid and s.locktype <> 'OUT'
                      and s.status not in ('PENDING', 'RESUBMIT', 'RERUN') then 1
                 when i.itemtype = 'IN' and s.jobid = :jobid and s.locktype = 'IN' and s.status = 'RUNNING' then 1
                 when i.itemtype = 'IN' and s.jobid = :jobid and s.locktype <> 'IN'
                      and s.status not in ('RESUBMIT', 'RERUN') then 1
                 else 0 end) as locked,
        max(case when i.itemtype = 'OUT' and s.locktype = 'OUT'
                      and s.status not in ('PENDING', 'RESUBMIT', 'RERUN', 'RUNNING', 'READY') then 1
                 when i.itemtype = 'IN' and s.jobid = :jobid and s.locktype = 'IN'
                      and s.status not in ('DONE', 'FAILED', 'ERROR', 'RESUBMIT', 'RERUN', 'RUNNING') then 1
                 else 0 end) as held,
        max(case when i.itemtype = 'OUT' and s.locktype = 'OUT' and s.status = 'READY' then 1 else 0 end) as made,
        max(case when i.itemtype = 'IN' and s.jobid = :jobid and s.locktype = 'IN' and s.status = 'DONE'
                 then 1 else 0 end) as consumed,
        max(case when i.itemtype = 'OUT' and s.jobid = :jobid and s.locktype = 'OUT'
                      and s.status in ('RESUBMIT', 'RERUN') then 1 else 0 end) as again,
        max(case when i.itemtype = 'OUT' and s.jobid = :jobid and s.locktype = 'OUT' then 1 else 0 end) as own,
        max(case when i.itemtype = 'IN' and s.locktype = 'OUT' and s.status = 'RUNNING' then 1 else 0 end) as rewritten,
        count(distinct case when i.itemtype = 'IN' and s.locktype = 'OUT' and s.status = 'READY'
                            then s.datasetid end) as ready
    from item i join state s on s.datasetid = i.datasetid
    where i.datasetid <> 'today' and s.dataid <> '' and (s.locktype = 'OUT' or s.jobid = :jobid)
    group by s.dataid
),
judged as (
    select dataid,
        case when locked = 1 then 'LOCKED'
             when held = 1 then 'HELD'
             when made = 1 or (consumed = 1 and again = 0) then 'ALREADY_DONE'
             when rewritten = 1
                  or ready < (select count(*) from item where itemtype = 'IN' and datasetid <> 'today')
             then 'DATA_NOT_READY'
             when own = 0 and not exists (select 1 from item where itemtype = 'IN') then 'DATA_NOT_READY'
             else '' end as code
    from chunk
)
select code, chunks, dataid from (
    select code, dataid, count(*) over (partition by code) as chunks,
           row_number() over (
               partition by code
               order by case when code = 'ALREADY_DONE' then null else naturalkey(dataid) end, dataid) as nth
    from judged) as numbered
where nth <= :few
order by code, nth;
