-- name: listen
-- Get notices when chunks can be claimed, as long as this connection lasts.
listen odf_claimable;

-- name: listening
-- Show that somebody listens: `send_notice` checks this lock.
select pg_advisory_lock_shared(hashtextextended(current_schema(), 79644));

-- name: outlook
-- For each of some jobs: how many chunks it may claim (counted up to :most; if it reads `today`, only today's), whether
-- more have to be judged, how many claims it has, how many of those belong to Dagster runs and to `odf work`,
-- seconds until a retry and until a lease ends, and its dials.
select j.jobid,
       (select count(*) from (
           select 1 from pending p
           where p.jobid = j.jobid and (j.today is null or p.dataid = j.today) limit :most) as counted),
       exists (select 1 from fill f where f.jobid = j.jobid),
       c.live, c.of_runs, c.of_work, c.retry_in, c.lease_in,
       coalesce(d.paused_until > now(), false), d.concurrency, d.every_minutes
from json_to_recordset(cast(:jobs as json)) as j(jobid text, today text)
    left join jobpolicy d on d.jobid = j.jobid
    cross join lateral (
        select count(c.owner) as live, count(case when c.owner is not null then c.runid end) as of_runs,
               count(case when c.owner like '% of odf work' then c.owner end) as of_work,
               cast(extract(epoch from min(case when c.owner is null then c.retry_at end) - clock_timestamp()) as float8)
                   as retry_in,
               cast(extract(epoch from min(case when c.owner is not null then c.lease_end end) - clock_timestamp()) as float8)
                   as lease_in
        from claim c where c.jobid = j.jobid) as c;
