-- name: claim
-- Claim up to :k chunks of a job: every row of each is written, or the statement fails with ODF01.
-- It doesn't wait for row locks: :skip skips chunks that somebody keeps locked.
with dial as materialized (
    select set_config('dataflow.who', :owner, true), set_config('dataflow.act', 'claim', true),
           set_config('dataflow.execution', :execution, true),
           set_config('lock_timeout', '200ms', true),
           set_config('dataflow.filling', case when f.jobid is null then 'no' else '' end, true),
           coalesce(p.lease_seconds, :lease) as lease, p.time_limit,
           case when p.paused_until > now() then 0
                when (select cast(value as integer) from dataflow_meta where name = 'oldest_client') > :version then 0
                when p.concurrency is null then :k
                else greatest(0, least(:k, p.concurrency - (
                    select count(*) from claim where jobid = :jobid and owner is not null)))
           end as free
    from (select) as always left join jobpolicy p on p.jobid = :jobid left join fill f on f.jobid = :jobid
),
-- Deleting the row of the queue is the lock of the chunk: of two claimers one deletes it, and skip locked sends the
-- other one to the next row instead of making it wait.
taken as (
    delete from pending where jobid = :jobid and dataid = any(array(
        select dataid from pending
        where jobid = :jobid and (cast(:only as text) is null or dataid = :only)
        order by rank, sortkey, dataid collate "C"
        limit (select free from dial) offset :skip
        for update skip locked))
    returning dataid, rank
),
-- Each claim gets a new generation, from a sequence that never goes back. What settles a claim names its generation,
-- so that a worker declared lost can change nothing after another one has claimed the chunk.
opened as (
    insert into claim as c (jobid, dataid, generation, owner, runid, started, heartbeat, lease_end)
    select :jobid, t.dataid, nextval('generation'), :owner, :runid, now(), now(),
           now() + dial.lease * interval '1 second'
    from taken t cross join dial
    on conflict (jobid, dataid) do update
        set generation = excluded.generation, owner = excluded.owner, runid = excluded.runid,
            started = excluded.started, heartbeat = excluded.heartbeat, lease_end = excluded.lease_end,
            attempts = c.attempts + 1, retry_at = null
    returning dataid, generation, attempts
),
-- A job may be registered with the same dataset in several rows: each row to write must come once, or on conflict
-- fails on the second.
item as materialized (
    select distinct itemtype, datasetid from job
    where jobid = :jobid and itemtype in ('IN', 'OUT') and datasetid <> 'today'
),
written as (
    insert into datastatus as d (datasetid, jobid, dataid, locktype, status, modified, generation)
    select i.datasetid, :jobid, o.dataid, i.itemtype, 'RUNNING', now(),
           case when i.itemtype = 'OUT' then o.generation else ready.generation end
    from opened o cross join item i
        left join lateral (
            select true as found, max(r.generation) as generation from datastatus r
            where i.itemtype = 'IN' and r.dataid = o.dataid and r.datasetid = i.datasetid
              and claim_effect('IN', r.jobid = :jobid, r.locktype, r.status) in ('available', 'DATA_NOT_READY')
            having bool_and(r.status = 'READY')) as ready on true
    where i.itemtype = 'OUT' or ready.found
    on conflict (datasetid, jobid, dataid) do update
        set locktype = excluded.locktype, status = 'RUNNING', modified = excluded.modified,
            generation = excluded.generation
        where claim_effect(excluded.locktype, true, d.locktype, d.status) in ('free', 'again', 'consumed')
    returning 1
)
-- All or nothing: if one row changed since the queue was computed, the statement fails, and its claims are undone.
select o.dataid, o.generation, o.attempts, dial.lease, dial.time_limit, taken.rank
from opened o join taken using (dataid) cross join dial
where case when (select count(*) from written) = (select count(*) from opened cross join item)
           then true else lost_race() end;

-- name: tidy
-- Remove the dead rows of claimed chunks at the head of the queue, which every claim has to skip.
vacuum (skip_locked, truncate off, index_cleanup on, parallel 0) pending;

-- name: anything_pending
-- Whether an unpaused job has anything to claim, or may soon have: an idle worker polls this.
select 1 from pending
where jobid = :jobid and (cast(:only as text) is null or dataid = :only)
union all select 1 from fill where jobid = :jobid limit 1;

-- name: lock_dial
-- Take turns with the other claimers of a job whose concurrency is limited.
select concurrency from jobpolicy where jobid = :jobid for update;

-- name: lock_output
-- Take turns with the other producers of a dataset.
select pg_advisory_xact_lock(hashtextextended(:datasetid, 79643));

-- name: rejudge
-- Judge again the first pending chunks of a job, whose rows turned out not to be claimable.
select judge(array_agg(jobid), array_agg(dataid)) from (
    select jobid, dataid from pending
    where jobid = :jobid and (cast(:only as text) is null or dataid = :only)
    order by rank, sortkey, dataid collate "C" limit :k) as first;

-- name: judge
-- Judge whether one chunk of a job may be claimed.
select judge(array[cast(:jobid as text)], array[cast(:dataid as text)]);

-- name: finish
-- Finish claims: IN rows are deleted, OUT rows become READY, facts are written. Only for the claim's own
-- generation. With :compare it fails with ODF02 if an input may have changed: `changed` says whether it has.
-- It soon gives up on a row that somebody keeps locked, and tries again: otherwise a person who resubmits
-- this very chunk could become the victim of a deadlock.
with stamp as materialized (
    select set_config('dataflow.who', :owner, true) as who, set_config('dataflow.act', 'finish', true) as act,
           set_config('dataflow.execution', :execution, true) as execution,
           set_config('dataflow.why', :why, true) as why, set_config('lock_timeout', '200ms', true) as patience,
           set_config('dataflow.compare', :compare, true) as compare
),
done as materialized (
    select u.dataid, u.generation
    from stamp, unnest(cast(:dataids as text[]), cast(:generations as bigint[])) as u(dataid, generation)
),
-- The fence: without a row of claim with this generation and this owner, nothing below changes the chunk.
closed as (
    delete from claim c using done
    where c.jobid = :jobid and c.dataid = done.dataid and c.generation = done.generation and c.owner = :owner
    returning c.dataid, c.generation
),
released as (
    delete from datastatus s using closed c
    where s.jobid = :jobid and s.dataid = c.dataid and s.locktype = 'IN'
    returning s.dataid, s.datasetid, s.generation
),
settled as (
    update datastatus s set status = 'READY', modified = now()
    from closed c
    where s.jobid = :jobid and s.dataid = c.dataid
      and s.locktype = 'OUT' and s.status = 'RUNNING' and s.generation = c.generation
    returning s.datasetid, s.dataid, s.generation
),
consumed as materialized (
    -- one map, looked up for each output: a join here would compare all with all
    select jsonb_object_agg(dataid, inputs) as inputs_of from (
        select dataid, cast(json_object_agg(datasetid, generation order by datasetid) as text) as inputs
        from released group by dataid) as of_chunk
),
told as (
    select * from json_to_recordset(cast(:facts as json)) as f(
        datasetid text, dataid text, location text, rows bigint, bytes bigint, fingerprint text,
        validated boolean, checks text, schema text, replaces boolean, metadata text, code text)
),
noted as (
    insert into chunkfact (datasetid, dataid, generation, jobid, inputs, location, rows, bytes, fingerprint,
                           validated, checks, schema, replaces, metadata, code)
    select s.datasetid, s.dataid, s.generation, :jobid,
           (select inputs_of from consumed) ->> cast(s.dataid as text), f.location, f.rows, f.bytes, f.fingerprint,
           f.validated, f.checks, f.schema, f.replaces, f.metadata, f.code
    from settled s
        left join told f on f.datasetid = s.datasetid and f.dataid = s.dataid
)
select dataid, count(*) from settled group by dataid;

-- name: hold_inputs
-- Lock what some claims read until the end of the transaction.
with stamp as materialized (select set_config('lock_timeout', '200ms', true) as patience)
select 1
from stamp cross join unnest(cast(:dataids as text[])) as u(dataid)
    join datastatus i on i.dataid = u.dataid and i.jobid = :jobid and i.locktype = 'IN'
    join datastatus o on o.dataid = i.dataid and o.datasetid = i.datasetid and o.locktype = 'OUT'
-- In the same order everywhere, so that two workers don't deadlock on each other's rows.
order by o.datasetid, o.dataid, o.jobid
for share of o;

-- name: fail
-- Fail a claim: FAILED, or RESUBMIT if another attempt without delay is granted, by the job's policy or by
-- :at_once.
with stamp as materialized (
    select set_config('dataflow.who', :owner, true) as who, set_config('dataflow.act', 'finish', true) as act,
           set_config('dataflow.execution', :execution, true) as execution,
           set_config('dataflow.why', :why, true) as why, set_config('lock_timeout', '200ms', true) as patience
),
verdict as materialized (
    select c.jobid, c.dataid, c.generation,
           :at_once or c.attempts < coalesce(p.max_attempts, 1) and :may_retry as again,
           case when :at_once then 0 else coalesce(p.retry_delay, 0) end as delay
    from stamp cross join claim c left join jobpolicy p on p.jobid = c.jobid
    where c.jobid = :jobid and c.dataid = :dataid and c.generation = :generation and c.owner = :owner
    -- Recovering lost claims locks this row, too: only one of the two settles the chunk.
    for update of c
),
retried as (
    update claim c set owner = null, lease_end = null, heartbeat = null, interruptions = 0,
                       retry_at = case when v.delay > 0 then now() + v.delay * interval '1 second' end
    from verdict v where c.jobid = v.jobid and c.dataid = v.dataid and v.again
),
closed as (
    delete from claim c using verdict v where c.jobid = v.jobid and c.dataid = v.dataid and not v.again
),
released as (
    delete from datastatus s using verdict v
    where s.jobid = v.jobid and s.dataid = v.dataid and s.locktype = 'IN'
),
settled as (
    update datastatus s
    set status = case when v.again and v.delay = 0 then 'RESUBMIT' else 'FAILED' end, modified = now(),
        generation = case when v.again and v.delay = 0 then null else s.generation end
    from verdict v
    where s.jobid = v.jobid and s.dataid = v.dataid
      and s.locktype = 'OUT' and s.status = 'RUNNING' and s.generation = v.generation
    returning s.status
)
select s.status, v.again, v.delay from settled s cross join verdict v;

-- name: heartbeat
-- Renew the leases of claims that still belong to their owner.
update claim c set heartbeat = now(), lease_end = now() + :lease * interval '1 second'
from unnest(cast(:dataids as text[]), cast(:generations as bigint[])) as mine(dataid, generation)
where c.jobid = :jobid and c.dataid = mine.dataid and c.generation = mine.generation and c.owner = :owner
returning c.dataid;

-- name: alive
-- Whether a claim is valid: nobody has settled it, and its lease hasn't ended.
select 1 from claim
where jobid = :jobid and dataid = :dataid and generation = :generation and owner is not null
  and lease_end > now();

-- name: lost_claims
-- Claims whose lease ran out, of a job and of those that read what it writes; each is locked by the one
-- that recovers it.
with stamp as materialized (select set_config('lock_timeout', '200ms', true) as patience)
select c.jobid, c.dataid, c.generation, c.owner, c.losses + 1, coalesce(p.max_losses, :max_losses)
from stamp cross join claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is not null and c.lease_end < now() and (cast(:jobid as text) is null or c.jobid in (
    select cast(:jobid as text)
    union all
    select i.jobid from job o join job i on i.datasetid = o.datasetid
    where o.jobid = :jobid and o.itemtype = 'OUT' and i.itemtype = 'IN'))
order by c.jobid, c.dataid
for update of c skip locked;

-- name: due_retries
-- Failed chunks whose retry delay is over.
select c.jobid, c.dataid, c.generation
from claim c
where c.owner is null and c.retry_at <= now() and (cast(:jobid as text) is null or c.jobid = :jobid)
order by c.jobid, c.dataid
for update skip locked;

-- name: next_retry
-- Seconds until the first delayed retry of a job, or until its first lost claim may be settled.
select extract(epoch from min(case when owner is null then retry_at else lease_end end) - clock_timestamp())
from claim where jobid = :jobid and (retry_at is not null or (owner is not null and :leases));

-- name: now
-- The database's clock, in seconds since 1970.
select extract(epoch from clock_timestamp());
