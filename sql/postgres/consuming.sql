-- name: sort
-- Nothing to do: the queue is already in order.
select 1;

-- name: heads
-- The items of a job that would be claimed next, how often each lost its worker, and whether any of the
-- first chunks isn't an item. Each is looked up: a plan for few items must not read all that ever arrived.
select p.dataid, coalesce(c.losses, 0), exists(
    select 1 from (select dataid from pending where jobid = :jobid
                   order by rank, sortkey, dataid collate "C" limit :k) as first
    where (select i.dataid from streamitem i where i.jobid = :jobid and i.dataid = first.dataid) is null)
from pending p
    cross join lateral (select from streamitem i where i.jobid = p.jobid and i.dataid = p.dataid limit 1) as item
    left join lateral (select losses from claim c where c.jobid = p.jobid and c.dataid = p.dataid limit 1) as c on true
where p.jobid = :jobid
order by p.rank, p.sortkey, p.dataid collate "C" limit :k;
