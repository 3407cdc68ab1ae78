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
