-- name: anything_pending
-- Whether a job has anything to claim, or may soon have: an idle worker polls this.
select 1 from pending where jobid = :jobid and (:only is null or dataid = :only)
union all select 1 from fill where jobid = :jobid limit 1;

-- name: sort_pending
-- Give new pending rows of a job their place in the natural order.
update pending set sortkey = naturalkey(dataid) where jobid = :jobid and rank in (0, 1) and sortkey is null;

-- name: dial
-- How many chunks may be claimed now, for how long, and how long a script may take.
select case when p.paused_until > strftime('%Y-%m-%d %H:%M:%f', 'now') then 0
            when (select cast(value as integer) from dataflow_meta where name = 'oldest_client') > :version then 0
            when p.concurrency is null then :k
            else max(0, min(:k, p.concurrency - (
                select count(*) from claim where jobid = :jobid and owner is not null)))
       end, coalesce(p.lease_seconds, :lease), p.time_limit
from (select 1) left join jobpolicy p on p.jobid = :jobid;

-- name: pick
-- The next chunks of a job: first those to be produced again, then in natural order.
select dataid from pending
where jobid = :jobid and (:only is null or dataid = :only)
order by rank, sortkey, dataid limit :free;

-- name: next_generation
-- A new generation.
update generation set last = last + 1 returning last;

-- name: open
-- Write a claim over the remains of an earlier one.
insert into claim (jobid, dataid, generation, owner, runid, started, heartbeat, lease_end)
values (:jobid, :dataid, :generation, :owner, :runid, strftime('%Y-%m-%d %H:%M:%f', 'now'),
        strftime('%Y-%m-%d %H:%M:%f', 'now'),
        strftime('%Y-%m-%d %H:%M:%f', 'now', :lease || ' seconds'))
on conflict (jobid, dataid) do update
    set generation = excluded.generation, owner = excluded.owner, runid = excluded.runid,
        started = excluded.started, heartbeat = excluded.heartbeat, lease_end = excluded.lease_end,
        attempts = attempts + 1, retry_at = null
returning attempts;

-- name: hold
-- Lock an input chunk for this job, if it is available and nobody is rewriting it.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified, generation)
select :datasetid, :jobid, :dataid, 'IN', 'RUNNING', strftime('%Y-%m-%d %H:%M:%f', 'now'), max(r.generation)
from (
    select dataid, generation, effect from claim_row
    where jobid = :jobid and dataid = :dataid and datasetid = :datasetid limit -1) as r
where r.effect in ('available', 'DATA_NOT_READY') and :generation is not null
group by r.dataid having sum(r.effect <> 'available') = 0
on conflict (datasetid, jobid, dataid) do update
    set locktype = 'IN', status = 'RUNNING', modified = excluded.modified, generation = excluded.generation
    where exists (
        select 1 from claim_row r
        where r.jobid = :jobid and r.dataid = :dataid and r.datasetid = :datasetid and r.itemtype = 'IN' and r.own
          and r.effect in ('free', 'consumed'));

-- name: lock
-- Lock an output chunk that doesn't exist yet, or that may be produced again.
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified, generation)
values (:datasetid, :jobid, :dataid, 'OUT', 'RUNNING', strftime('%Y-%m-%d %H:%M:%f', 'now'), :generation)
on conflict (datasetid, jobid, dataid) do update
    set locktype = 'OUT', status = 'RUNNING', modified = excluded.modified, generation = excluded.generation
    where exists (
        select 1 from claim_row r
        where r.jobid = :jobid and r.dataid = :dataid and r.datasetid = :datasetid and r.itemtype = 'OUT' and r.own
          and r.effect in ('free', 'again'));

-- name: rejudge
-- Judge again the first pending chunks of a job, whose rows turned out not to be claimable.
insert into judge (jobid, dataid)
select jobid, dataid from pending
where jobid = :jobid and (:only is null or dataid = :only)
order by rank, coalesce(sortkey, naturalkey(dataid)), dataid limit :k;

-- name: judge
-- Judge whether one chunk of a job may be claimed.
insert into judge (jobid, dataid) values (:jobid, :dataid);

-- name: close
-- Release a claim, if generation and owner still match.
delete from claim where jobid = :jobid and dataid = :dataid and generation = :generation and owner = :owner;

-- name: consumed
-- The generations of the inputs that a chunk was produced from.
select case when count(*) > 0 then json_group_object(datasetid, generation) end from (
    select datasetid, generation from datastatus
    where jobid = :jobid and dataid = :dataid and locktype = 'IN' order by datasetid);

-- name: settle_outputs
-- Move the outputs of one generation from a named status to another.
update datastatus set status = :status, modified = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    generation = case when :status = 'RESUBMIT' then null else generation end
where jobid = :jobid and dataid = :dataid and locktype = 'OUT' and status = :was and generation = :generation;

-- name: ready
-- Mark the outputs of a claim as READY.
update datastatus set status = 'READY', modified = strftime('%Y-%m-%d %H:%M:%f', 'now')
where jobid = :jobid and dataid = :dataid and locktype = 'OUT' and status = 'RUNNING' and generation = :generation
returning datasetid;

-- name: note
-- Record the facts about a produced chunk.
insert into chunkfact (datasetid, dataid, generation, jobid, inputs, location, rows, bytes, fingerprint,
                       validated, checks, schema, replaces, metadata, code)
values (:datasetid, :dataid, :generation, :jobid, :inputs, :location, :rows, :bytes, :fingerprint,
        :validated, :checks, :schema, :replaces, :metadata, :code)
on conflict (datasetid, dataid, generation) do nothing;

-- name: verdict
-- Whether a failed claim may be retried, and after how long.
select :at_once or c.attempts < coalesce(p.max_attempts, 1) and :may_retry,
    case when :at_once then 0 else coalesce(p.retry_delay, 0) end
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.jobid = :jobid and c.dataid = :dataid and c.generation = :generation and c.owner = :owner;

-- name: retry
-- Record the attempts of a chunk that will be retried.
update claim set owner = null, lease_end = null, heartbeat = null, interruptions = 0,
    retry_at = case when :delay > 0 then strftime('%Y-%m-%d %H:%M:%f', 'now', :delay || ' seconds') end
where jobid = :jobid and dataid = :dataid and generation = :generation;

-- name: heartbeat
-- Renew the lease of a claim that still belongs to its owner.
update claim set heartbeat = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    lease_end = strftime('%Y-%m-%d %H:%M:%f', 'now', :lease || ' seconds')
where jobid = :jobid and dataid = :dataid and generation = :generation and owner = :owner;

-- name: alive
-- Whether a claim is valid: nobody has settled it, and its lease hasn't ended.
select 1 from claim
where jobid = :jobid and dataid = :dataid and generation = :generation and owner is not null
  and lease_end > strftime('%Y-%m-%d %H:%M:%f', 'now');

-- name: lost_claims
-- Claims whose lease ran out, of a job and of those that read what it writes.
select c.jobid, c.dataid, c.generation, c.owner, c.losses + 1, coalesce(p.max_losses, :max_losses)
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is not null and c.lease_end < strftime('%Y-%m-%d %H:%M:%f', 'now')
  and (:jobid is null or c.jobid = :jobid or c.jobid in (
      select i.jobid from job o join job i on i.datasetid = o.datasetid
      where o.jobid = :jobid and o.itemtype = 'OUT' and i.itemtype = 'IN'))
order by c.jobid, c.dataid;

-- name: due_retries
-- Failed chunks whose retry delay is over.
select jobid, dataid, generation from claim
where owner is null and retry_at <= strftime('%Y-%m-%d %H:%M:%f', 'now') and (:jobid is null or jobid = :jobid)
order by jobid, dataid;

-- name: next_retry
-- Seconds until the first delayed retry of a job, or until its first lost claim may be settled.
select (julianday(min(case when owner is null then retry_at else lease_end end)) - julianday('now')) * 86400.0
from claim where jobid = :jobid and (retry_at is not null or (owner is not null and :leases));

-- name: now
-- The database's clock, in seconds since 1970.
select (julianday('now') - 2440587.5) * 86400.0;
