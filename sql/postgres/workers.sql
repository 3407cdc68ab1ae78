-- name: begin
-- Record that a worker is at work until its lease ends: that of its job's policy, if there is one.
insert into worker as w (owner, runid, jobid, started, heartbeat, lease_end)
select :owner, :runid, :jobid, now(), now(), now() + coalesce(p.lease_seconds, :lease) * interval '1 second'
from (select) as always left join jobpolicy p on p.jobid = :jobid
on conflict (owner) do update
    set runid = excluded.runid, jobid = excluded.jobid, started = excluded.started,
        heartbeat = excluded.heartbeat, lease_end = excluded.lease_end
returning extract(epoch from lease_end - heartbeat);

-- name: beat
-- Renew a worker's lease, unless it was declared lost.
update worker w
set heartbeat = now(), lease_end = now() + interval '1 second' * coalesce(
        (select p.lease_seconds from jobpolicy p where p.jobid = w.jobid), :lease)
where w.owner = :owner
returning extract(epoch from lease_end - heartbeat);

-- name: lost_runs
-- Runs without a live worker.
select runid from worker
group by runid having max(lease_end) < now() - :grace * interval '1 second'
order by runid;

-- name: claims
-- The live claims of a run, locked until they are settled. It soon gives up on a claim that somebody
-- else keeps locked, and tries again.
with stamp as materialized (select set_config('lock_timeout', '200ms', true) as patience)
select c.jobid, c.dataid, c.generation, c.owner, c.losses + 1, coalesce(p.max_losses, :max_losses)
from stamp cross join claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is not null and c.runid = :runid
order by c.jobid, c.dataid
for update of c;
