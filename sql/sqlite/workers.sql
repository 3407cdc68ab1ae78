-- name: begin
-- Record that a worker is at work until its lease ends: that of its job's policy, if there is one.
insert into worker (owner, runid, jobid, started, heartbeat, lease_end)
select :owner, :runid, :jobid, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now'),
       strftime('%Y-%m-%d %H:%M:%f', 'now', coalesce(p.lease_seconds, :lease) || ' seconds')
from (select 1) left join jobpolicy p on p.jobid = :jobid
where true
on conflict (owner) do update
    set runid = excluded.runid, jobid = excluded.jobid, started = excluded.started,
        heartbeat = excluded.heartbeat, lease_end = excluded.lease_end
returning (julianday(lease_end) - julianday(heartbeat)) * 86400;

-- name: beat
-- Renew a worker's lease, unless it was declared lost.
update worker set heartbeat = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    lease_end = strftime('%Y-%m-%d %H:%M:%f', 'now', coalesce(
        (select p.lease_seconds from jobpolicy p where p.jobid = worker.jobid), :lease) || ' seconds')
where owner = :owner
returning (julianday(lease_end) - julianday(heartbeat)) * 86400;

-- name: lost_runs
-- Runs without a live worker.
select runid from worker
group by runid having max(lease_end) < strftime('%Y-%m-%d %H:%M:%f', 'now', '-' || :grace || ' seconds')
order by runid;

-- name: claims
-- The live claims of a run.
select c.jobid, c.dataid, c.generation, c.owner, c.losses + 1, coalesce(p.max_losses, :max_losses)
from claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is not null and c.runid = :runid
order by c.jobid, c.dataid;
