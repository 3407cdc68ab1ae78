-- name: waiting
-- The next chunk of a pipeline that `odf pipeline run` may claim: first what is to be produced again, then runs that
-- nobody has started. Items that came over HTTP are for `odf serve`, unless :items.
select p.dataid from pending p
where p.jobid = :jobid
  and (p.rank = 0 or :items
       or not exists (select 1 from streamitem i where i.jobid = p.jobid and i.dataid = p.dataid))
order by p.rank, p.sortkey, p.dataid collate "C" limit 1;

-- name: claim_items
-- Claim new chunks, which nobody else can know yet.
insert into claim (jobid, dataid, generation, owner, started, heartbeat, lease_end)
select :jobid, r.dataid, r.generation, :owner, now(), now(), now() + :lease * interval '1 second'
from json_to_recordset(cast(:rows as json)) as r(dataid text, generation bigint);
