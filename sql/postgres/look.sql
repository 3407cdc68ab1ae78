-- name: rows
-- The rows of a job or a dataset, those with shorter ids first: nearly the natural order, and cheap to sort by.
select datasetid, jobid, dataid, locktype, status, modified, generation
from datastatus
where (cast(:which as text) is null or jobid = :which or datasetid = :which)
  and (cast(:words as text) is null or status in (select json_array_elements_text(cast(:words as json))))
  and (cast(:since as timestamptz) is null or cast(modified as timestamptz) >= :since)
order by length(dataid), dataid, datasetid, jobid
limit cast(:limit as bigint);

-- name: sample
-- Some of the squares: a share of each output of each job, by :rates, but all whose status is in :rare.
select s.jobid, s.datasetid, s.dataid, s.status
from json_to_recordset(cast(:rates as json)) as r(jobid text, datasetid text, rate float8)
    join datastatus s on s.jobid = r.jobid and s.datasetid = r.datasetid
where s.locktype = 'OUT' and (random() < r.rate or s.status in (select json_array_elements_text(cast(:rare as json))))
union all
select p.jobid, r.datasetid, p.dataid, ''
from json_to_recordset(cast(:rates as json)) as r(jobid text, datasetid text, rate float8)
    join pending p on p.jobid = r.jobid
where random() < r.rate
  and exists (select 1 from job o where o.jobid = p.jobid and o.itemtype = 'OUT' and o.datasetid = r.datasetid)
  and (p.dataid = :today or not exists (
      select 1 from job t where t.jobid = p.jobid and t.itemtype = 'IN' and t.datasetid = 'today'))
  and not exists (select 1 from datastatus s
                  where s.dataid = p.dataid and s.datasetid = r.datasetid and s.jobid = p.jobid);

-- name: failures
-- The chunks that failed, the last first: why, by the last change of an output, and when a retry is due.
select f.jobid, f.dataid, f.modified, e.why, c.retry_at
from (
    select jobid, dataid, min(datasetid) as datasetid, max(cast(modified as timestamptz)) as modified
    from datastatus
    where locktype = 'OUT' and status in ('FAILED', 'ERROR')
      and (cast(:which as text) is null or jobid = :which or datasetid = :which)
      and (cast(:since as timestamptz) is null or cast(modified as timestamptz) >= :since)
    group by jobid, dataid
    order by max(modified) desc nulls last, jobid, length(dataid), dataid
    limit cast(:limit as bigint)) as f
    left join lateral (
        select d.why from dataevent d
        where d.dataid = f.dataid and d.datasetid = f.datasetid and d.jobid = f.jobid and d.locktype = 'OUT'
        order by d.seq desc limit 1) as e on true
    left join claim c on c.jobid = f.jobid and c.dataid = f.dataid and c.owner is null
order by f.modified desc nulls last, f.jobid, length(f.dataid), f.dataid;
