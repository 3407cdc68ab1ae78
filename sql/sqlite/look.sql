-- name: rows
-- The rows of a job or a dataset, those with shorter ids first: nearly the natural order, and cheap to sort by.
select datasetid, jobid, dataid, locktype, status, modified, generation
from datastatus
where (cast(:which as text) is null or jobid = :which or datasetid = :which)
  and (cast(:words as text) is null or status in (select value from json_each(:words)))
  and (:since is null or modified >= :since)
order by length(dataid), dataid, datasetid, jobid
limit coalesce(:limit, -1);

-- name: counts
-- How many chunks each job has made, of each output and status. In the order of the primary key, nothing has to be sorted.
with output as materialized (
    select datasetid, jobid, count(*) as chunks, count(case when status = 'READY' then 1 end) as ready,
           count(case when status = 'PENDING' then 1 end) as pending
    from datastatus
    where locktype = 'OUT' and (:which is null or jobid = :which or datasetid = :which)
    group by datasetid, jobid
)
select jobid, datasetid, 'READY', ready from output where ready > 0
union all
select jobid, datasetid, 'PENDING', pending from output where pending > 0
union all
select s.jobid, s.datasetid, s.status, count(*)
from output o cross join datastatus s on s.datasetid = o.datasetid and s.jobid = o.jobid
where o.chunks > o.ready + o.pending and s.locktype = 'OUT' and s.status is not 'READY' and s.status is not 'PENDING'
group by s.jobid, s.datasetid, s.status;

-- name: sample
-- Some of the squares: a share of each output of each job, by :rates, but all whose status is in :rare.
with rate as materialized (
    select value ->> 'jobid' as jobid, value ->> 'datasetid' as datasetid,
           cast((value ->> 'rate') * 4611686018427387904.0 as integer) as most
    from json_each(:rates))
select s.jobid, s.datasetid, s.dataid, s.status
from rate r cross join datastatus s on s.jobid = r.jobid and s.datasetid = r.datasetid
where s.locktype = 'OUT' and ((random() & 4611686018427387903) < r.most or s.status in (select value from json_each(:rare)))
union all
select p.jobid, r.datasetid, p.dataid, ''
from rate r cross join pending p on p.jobid = r.jobid
where (random() & 4611686018427387903) < r.most
  and exists (select 1 from job o where o.jobid = p.jobid and o.itemtype = 'OUT' and o.datasetid = r.datasetid)
  and (p.dataid = :today or not exists (
      select 1 from job t where t.jobid = p.jobid and t.itemtype = 'IN' and t.datasetid = 'today'))
  and not exists (select 1 from datastatus s
                  where s.dataid = p.dataid and s.datasetid = r.datasetid and s.jobid = p.jobid);

-- name: failures
-- The chunks that failed, the last first: why, by the last change of an output, and when a retry is due.
select f.jobid, f.dataid, f.modified,
       (select d.why from dataevent d
        where d.dataid = f.dataid and d.datasetid = f.datasetid and d.jobid = f.jobid and d.locktype = 'OUT'
        order by d.seq desc limit 1),
       c.retry_at
from (
    select jobid, dataid, min(datasetid) as datasetid, max(modified) as modified
    from datastatus
    where locktype = 'OUT' and status in ('FAILED', 'ERROR')
      and (:which is null or jobid = :which or datasetid = :which)
      and (:since is null or modified >= :since)
    group by jobid, dataid
    order by max(modified) desc, jobid, length(dataid), dataid
    limit coalesce(:limit, -1)) as f
    left join claim c on c.jobid = f.jobid and c.dataid = f.dataid and c.owner is null
order by f.modified desc, f.jobid, length(f.dataid), f.dataid;
