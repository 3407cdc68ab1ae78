-- name: live
-- How many chunks of a job are running, and one of their owners.
select count(*), min(owner) from claim where jobid = :jobid and owner is not null;

-- name: live_then
-- How many chunks of a job were running at a time in the past, and one of their owners.
select count(distinct e.dataid), min(e.who) from dataevent e
where e.jobid = :jobid and e.locktype = 'OUT' and e.status_after = 'RUNNING' and e.at <= :at
  and not exists (
      select 1 from dataevent l
      where l.dataid = e.dataid and l.datasetid = e.datasetid and l.jobid = e.jobid and l.seq > e.seq
        and l.at <= :at);

-- name: dial
-- What keeps a job from claiming.
select concurrency, paused_until from jobpolicy where jobid = :jobid;

-- name: claimable
-- How many chunks a job may claim now.
select count(*) from pending where jobid = :jobid;

-- name: size
-- How many rows the job's datasets have, counted up to :most.
select count(*) from (
    select 1 from datastatus s
    where s.datasetid in (
        select j.datasetid from job j where cast(:now as integer) = 1 and j.jobid = :jobid and j.itemtype in ('IN', 'OUT')
        union
        select r.datasetid from registration r
        where cast(:now as integer) = 0 and r.jobid = :jobid and r.itemtype in ('IN', 'OUT'))
    limit :most) as counted;

-- name: examples
-- Some chunks of a job: one of each status of its outputs, and a few that it hasn't produced.
select min(s.dataid) from datastatus s
where s.jobid = :jobid and s.locktype = 'OUT'
  and s.datasetid in (select j.datasetid from job j where j.jobid = :jobid and j.itemtype = 'OUT')
group by s.status
union
select dataid from (
    select i.dataid from datastatus i
    where i.datasetid in (select j.datasetid from job j where j.jobid = :jobid and j.itemtype = 'IN')
      and i.locktype = 'OUT' and i.dataid <> ''
      and not exists (
          select 1 from datastatus o where o.dataid = i.dataid and o.jobid = :jobid and o.locktype = 'OUT')
    limit :few) as unmade;

-- name: chunks
-- Every chunk that a job could know of, by its first obstacle ('' is none): how many there are of each
-- kind, and the first few of them. `versioned`: the datasets whose place keeps a version for its readers,
-- each between `=`.
with item as (
    select itemtype, datasetid from job
    where cast(:now as integer) = 1 and jobid = :jobid and itemtype in ('IN', 'OUT') and datasetid is not null
    union
    select itemtype, datasetid from registration
    where cast(:now as integer) = 0 and jobid = :jobid and itemtype in ('IN', 'OUT') and datasetid is not null
      and (found = 1 or at <= :at)
    group by itemtype, datasetid
    having sum(n) > 0
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
    select dataid,
        max(case when effect = 'LOCKED' then 1 else 0 end) as locked,
        max(case when effect = 'HELD' then 1 else 0 end) as held,
        max(case when effect = 'ALREADY_DONE' then 1 else 0 end) as done,
        max(case when effect = 'consumed' then 1 else 0 end) as consumed,
        max(case when effect = 'again' then 1 else 0 end) as again,
        max(case when effect = 'DATA_NOT_READY' then 1 else 0 end) as rewritten,
        max(case when own and itemtype = 'OUT' and locktype = 'OUT' then 1 else 0 end) as own,
        count(distinct case when effect = 'available' then datasetid end) as available
    from (select s.dataid, i.itemtype, i.datasetid, s.locktype, s.jobid = :jobid as own,
                 case when s.locktype = 'OUT' or s.jobid = :jobid
                      then claim_effect(i.itemtype, s.jobid = :jobid, s.locktype, s.status)
                      else 'LOCKED' end as effect
          from item i join state s on s.datasetid = i.datasetid
          where i.datasetid <> 'today' and s.dataid <> ''
            and (s.locktype = 'OUT' or s.jobid = :jobid
                 or (claim_effect(i.itemtype, s.jobid = :jobid, s.locktype, s.status) = 'read'
                     and replace(cast(:versioned as text), '=' || s.datasetid || '=', '') = :versioned and (
                     exists (select 1 from datastatus o
                             where cast(:now as integer) = 1 and o.dataid = s.dataid and o.jobid = s.jobid
                               and o.locktype = 'OUT' and o.status = 'RUNNING')
                     or exists (
                         select 1 from dataevent e
                         where cast(:now as integer) = 0 and e.dataid = s.dataid and e.jobid = s.jobid
                           and e.locktype = 'OUT' and e.status_after = 'RUNNING' and e.at <= :at
                           and not exists (
                               select 1 from dataevent l
                               where l.dataid = e.dataid and l.datasetid = e.datasetid and l.jobid = e.jobid
                                 and l.seq > e.seq and l.at <= :at)))))) as known
    group by dataid
),
judged as (
    select dataid,
        case when locked = 1 then 'LOCKED'
             when held = 1 then 'HELD'
             when done = 1 or (consumed = 1 and again = 0) then 'ALREADY_DONE'
             when rewritten = 1
                  or available < (select count(*) from item where itemtype = 'IN' and datasetid <> 'today')
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
