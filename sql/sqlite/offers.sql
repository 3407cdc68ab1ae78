-- name: offer
-- What a job's dials allow, how many chunks it may claim (counted up to :most), and one of the first.
select case when p.paused_until > strftime('%Y-%m-%d %H:%M:%f', 'now') then p.paused_until end,
       p.every_minutes, p.concurrency,
       case when p.concurrency is not null then (
           select count(*) from claim where jobid = :jobid and owner is not null) end,
       (select count(*) from (
           select 1 from pending where jobid = :jobid and (:only is null or dataid = :only) limit :most)),
       (select dataid from pending where jobid = :jobid and (:only is null or dataid = :only)
        order by rank, sortkey, dataid limit 1)
from (select 1) left join jobpolicy p on p.jobid = :jobid;
