-- name: sort
-- Give new pending rows of a job their place in the natural order.
update pending set sortkey = naturalkey(dataid) where jobid = :jobid and rank in (0, 1) and sortkey is null;

-- name: heads
-- The items of a job that would be claimed next, how often each lost its worker, and whether any of the
-- first chunks isn't an item.
select p.dataid, coalesce(c.losses, 0), exists(
    select 1 from (select dataid from pending where jobid = :jobid order by rank, sortkey, dataid limit :k) as first
    where not exists (select 1 from streamitem i where i.jobid = :jobid and i.dataid = first.dataid))
from pending p
    cross join streamitem i on i.jobid = p.jobid and i.dataid = p.dataid
    left join claim c on c.jobid = p.jobid and c.dataid = p.dataid
where p.jobid = :jobid
order by p.rank, p.sortkey, p.dataid limit :k;
