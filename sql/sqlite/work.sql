-- name: outlook
-- For each of some jobs: how many chunks it may claim (counted up to :most; if it reads `today`, only today's), whether
-- more have to be judged, how many claims it has, how many of those belong to Dagster runs and to `odf work`,
-- seconds until a retry and until a lease ends, and its dials.
select j.jobid,
       (select count(*) from (
           select 1 from pending p
           where p.jobid = j.jobid and (j.today is null or p.dataid = j.today) limit :most)),
       exists (select 1 from fill f where f.jobid = j.jobid),
       (select count(*) from claim c where c.jobid = j.jobid and c.owner is not null),
       (select count(*) from claim c where c.jobid = j.jobid and c.owner is not null and c.runid is not null),
       (select count(*) from claim c where c.jobid = j.jobid and c.owner like '% of odf work'),
       (select (julianday(min(c.retry_at)) - julianday('now')) * 86400.0 from claim c
        where c.jobid = j.jobid and c.owner is null),
       (select (julianday(min(c.lease_end)) - julianday('now')) * 86400.0 from claim c
        where c.jobid = j.jobid and c.owner is not null),
       coalesce(d.paused_until > strftime('%Y-%m-%d %H:%M:%f', 'now'), 0), d.concurrency, d.every_minutes
from (select json_extract(value, '$.jobid') as jobid, json_extract(value, '$.today') as today from json_each(:jobs)) as j
    left join jobpolicy d on d.jobid = j.jobid;

-- name: changes
-- A number that changes when somebody else writes to the file.
pragma data_version;
