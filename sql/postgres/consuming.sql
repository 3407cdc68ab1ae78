-- name: sort
-- The queue is in its order already.
select 1;

-- name: heads
-- The items of a job that would be claimed next, how often each lost its worker, and whether any of the
-- first chunks is no item.
select p.dataid, coalesce(c.losses, 0), exists(
    select 1 from (select dataid from pending where jobid = :jobid
                   order by rank, sortkey, dataid collate "C" limit :k) as first
    where not exists (select 1 from streamitem i where i.jobid = :jobid and i.dataid = first.dataid))
from pending p
    join streamitem i on i.jobid = p.jobid and i.dataid = p.dataid
    left join claim c on c.jobid = p.jobid and c.dataid = p.dataid
where p.jobid = :jobid
order by p.rank, p.sortkey, p.dataid collate "C" limit :k;
