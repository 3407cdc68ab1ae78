-- name: sort
-- Give new pending rows of a job their place in the natural order.
update pending set sortkey = naturalkey(dataid) where jobid = :jobid and rank in (0, 1) and sortkey is null;

-- name: heads
-- The chunks of a job that would be claimed next, and whether each is an item.
select first.dataid, i.dataid is not null
from (select dataid, rank, sortkey from pending where jobid = :jobid order by rank, sortkey, dataid limit :k) as first
    left join streamitem i on i.jobid = :jobid and i.dataid = first.dataid
order by first.rank, first.sortkey, first.dataid;
