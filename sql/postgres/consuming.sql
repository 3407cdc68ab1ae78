-- name: sort
-- The queue is in its order already.
select 1;

-- name: heads
-- The chunks of a job that would be claimed next, and whether each is an item.
select first.dataid, i.dataid is not null
from (select dataid, rank, sortkey from pending
      where jobid = :jobid order by rank, sortkey, dataid collate "C" limit :k) as first
    left join streamitem i on i.jobid = :jobid and i.dataid = first.dataid
order by first.rank, first.sortkey, first.dataid collate "C";
