-- name: disown
-- Void a claim, but keep its attempts and losses.
update claim set owner = null, lease_end = null, heartbeat = null, retry_at = null,
    losses = :losses, interruptions = 0
where jobid = :jobid and dataid = :dataid;

-- name: give_back
-- Void a claim whose work hasn't begun, if generation and owner still match.
update claim set owner = null, lease_end = null, heartbeat = null, retry_at = null, attempts = attempts - 1
where jobid = :jobid and dataid = :dataid and generation = :generation and owner = :owner;

-- name: interrupt
-- Void a claim whose work was interrupted, if it is still ours; returns how often in a row that happened.
update claim set owner = null, lease_end = null, heartbeat = null, retry_at = null,
    attempts = attempts - 1, interruptions = interruptions + 1
where jobid = :jobid and dataid = :dataid and generation = :generation and owner = :owner
returning interruptions;

-- name: retried
-- A delayed retry has been granted.
update claim set retry_at = null where jobid = :jobid and dataid = :dataid;

-- name: release_inputs
-- Give up a job's locks on the inputs of one chunk.
delete from datastatus where jobid = :jobid and dataid = :dataid and locktype = 'IN';

-- name: settle_outputs
-- Move the outputs of one generation from a named status to another.
-- RESUBMIT clears the generation: its data doesn't count, and a late worker finds no row of its own.
update datastatus set status = cast(:status as varchar(20)), modified = current_timestamp,
    generation = case when cast(:status as varchar(20)) = 'RESUBMIT' then null else generation end
where jobid = :jobid and dataid = :dataid and locktype = 'OUT' and status = :was and generation = :generation;

-- name: plan
-- What a job reads, writes and sets; how many jobs write each dataset; the dials that limit its claims.
select distinct j.itemtype, j.datasetid, j.itemvalue,
    case when j.itemtype = 'OUT' then (
        select count(distinct o.jobid) from job o where o.itemtype = 'OUT' and o.datasetid = j.datasetid)
    end as producers,
    p.concurrency, p.batch_size
from job j left join jobpolicy p on p.jobid = j.jobid where j.jobid = :jobid;

-- name: versions
-- The version of the tables, and the oldest program that may claim: read once per connection.
select name, value from dataflow_meta where name in ('version', 'oldest_client', 'schema');

-- name: store
-- Which store this is.
select value from dataflow_meta where name = 'store';

-- name: changed
-- Which inputs of a chunk changed since the job locked them.
select datasetid, how from changed_input where jobid = :jobid and dataid = :dataid order by datasetid;

-- name: losses
-- Count a claim as lost once more, if generation and owner still match.
select c.jobid, c.dataid, c.generation, c.owner, c.losses + 1, coalesce(p.max_losses, :max_losses)
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.jobid = :jobid and c.dataid = :dataid and c.generation = :generation and c.owner = :owner;

-- name: outcome
-- The statuses of one generation's outputs, for a worker that lost its connection while settling.
select distinct status from datastatus
where jobid = :jobid and dataid = :dataid and locktype = 'OUT' and generation = :generation;

-- name: adopt
-- The live claims of an owner: those that a worker took just before it lost its connection.
select c.dataid, c.generation, c.attempts, coalesce(p.lease_seconds, :lease), p.time_limit
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.jobid = :jobid and c.owner = :owner;
