-- name: outlook
-- Of each of some jobs: how many chunks it may claim (counted up to :most; of one that reads today, only today's), whether
-- more are still to be judged, how many claims there are, how many of those are runs' of Dagster and how many `odf work`'s,
-- seconds until a retry and until a lease ends, and what its dials say.
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
-- A number that is another one once somebody else has written to the file.
pragma data_version;
