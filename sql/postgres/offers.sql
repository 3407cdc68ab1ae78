-- name: offer
-- What a job's dials allow, how many chunks it may claim (counted up to :most), and the first of them.
select case when p.paused_until > now() then p.paused_until end, p.every_minutes, p.concurrency,
       case when p.concurrency is not null then (
           select count(*) from claim where jobid = :jobid and owner is not null) end,
       (select count(*) from (
           select 1 from pending
           where jobid = :jobid and (cast(:only as text) is null or dataid = :only) limit :most) as counted),
       (select dataid from pending
        where jobid = :jobid and (cast(:only as text) is null or dataid = :only)
        order by rank, sortkey, dataid collate "C" limit 1)
from (select) as always left join jobpolicy p on p.jobid = :jobid;

-- name: some
-- A few chunks of a job: those that changed last among the newest changes of all jobs, and FAILED ones.
select dataid from (
    select e.dataid, min(e.nth) as nth
    from (select datasetid, dataid, row_number() over (order by xid desc, seq desc) as nth from dataevent
          order by xid desc, seq desc limit 1000) as e
    where e.datasetid in (select j.datasetid from job j where j.jobid = :jobid and j.itemtype in ('IN', 'OUT'))
    group by e.dataid order by nth limit :last) as newest
union
select dataid from (
    select f.dataid from (
        select distinct dataid from dataevent where jobid = :jobid and status_after = 'FAILED' limit 1000) as f
    where exists (
        select 1 from datastatus s
        where s.dataid = f.dataid and s.jobid = :jobid and s.locktype = 'OUT' and s.status = 'FAILED')
    limit :last) as failed;
