-- name: waiting
-- The next chunk of a pipeline that `odf pipeline run` may claim.
select p.dataid from pending p
where p.jobid = :jobid
  and (p.rank = 0 or :items
       or not exists (select 1 from streamitem i where i.jobid = p.jobid and i.dataid = p.dataid))
order by p.rank, coalesce(p.sortkey, naturalkey(p.dataid)), p.dataid limit 1;

-- name: claim_items
-- Claim new chunks, which nobody else can know yet.
insert into claim (jobid, dataid, generation, owner, started, heartbeat, lease_end)
select :jobid, value ->> 'dataid', value ->> 'generation', :owner, strftime('%Y-%m-%d %H:%M:%f', 'now'),
       strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', :lease || ' seconds')
from json_each(:rows);
