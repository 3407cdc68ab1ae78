-- name: begin
-- A worker is at work, until its lease is over.
insert into worker as w (owner, runid, jobid, started, heartbeat, lease_end)
values (:owner, :runid, :jobid, now(), now(), now() + :lease * interval '1 second')
on conflict (owner) do update
    set runid = excluded.runid, jobid = excluded.jobid, started = excluded.started,
        heartbeat = excluded.heartbeat, lease_end = excluded.lease_end;

-- name: beat
-- Renew a worker's lease, unless it was given up for lost.
update worker set heartbeat = now(), lease_end = now() + :lease * interval '1 second'
where owner = :owner;

-- name: lost
-- Workers whose lease has been over for so many seconds.
select owner, runid, jobid from worker
where lease_end < now() - :grace * interval '1 second'
order by runid, owner;

-- name: lost_runs
-- Runs of which no worker is left: one that is alive keeps its run alive.
select runid from worker
group by runid having max(lease_end) < now() - :grace * interval '1 second'
order by runid;

-- name: claims
-- The live claims of a run, kept from others until they are settled. It soon gives up on a claim that
-- somebody keeps locked, to try again.
with stamp as materialized (select set_config('lock_timeout', '200ms', true) as patience)
select c.jobid, c.dataid, c.generation, c.owner, c.losses + 1, coalesce(p.max_attempts, :max_losses)
from stamp cross join claim c left join jobpolicy p on p.jobid = c.jobid
where c.owner is not null and c.runid = :runid
order by c.jobid, c.dataid
for update of c;
