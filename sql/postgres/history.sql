-- name: after
-- The next rows of the log that are final: those of transactions older than all running ones.
select seq, at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why, null, execution,
       cast(xid as text) as transaction
from dataevent e
where e.xid < pg_snapshot_xmin(pg_current_snapshot())
  and (e.xid, e.seq) > (cast(cast(:xid as text) as xid8), cast(:seq as bigint))
order by e.xid, e.seq
limit :limit;

-- name: restored
-- Whether the log has rows of another server, with other transaction numbers.
select last.xid >= pg_snapshot_xmax(pg_current_snapshot())
       and last.xid is distinct from pg_current_xact_id_if_assigned()
from (select xid from dataevent order by xid desc limit 1) as last;

-- name: waiting
-- For how many seconds the oldest change that readers of the log don't see yet has been waiting, and for which
-- transaction: an older one that is still open, in any database of the server.
select cast(extract(epoch from clock_timestamp() - at) as integer), cast(pg_snapshot_xmin(pg_current_snapshot()) as text)
from dataevent
where xid >= pg_snapshot_xmin(pg_current_snapshot()) and xid is distinct from pg_current_xact_id_if_assigned()
order by xid, seq
limit 1;

-- name: blocker
-- Whose transaction it is, as far as this user may see it.
select 'process ' || pid || ' of ' || usename || coalesce(' (' || nullif(application_name, '') || ')', '')
       || ' in database ' || datname
from pg_stat_activity where backend_xid = cast(cast(:xid as xid8) as xid)
union all
select 'prepared transaction ' || quote_literal(gid) || ' in database ' || database
from pg_prepared_xacts where transaction = cast(cast(:xid as xid8) as xid);

-- name: end
-- Up to where the log is final, the next transaction's number, and how often the log was renumbered.
select cast(pg_snapshot_xmin(pg_current_snapshot()) as text),
       cast(pg_snapshot_xmax(pg_current_snapshot()) as text),
       coalesce((select value from dataflow_meta where name = 'log'), '0');

-- name: listing
-- The newest rows of history that match; the index sorts by transaction, the caller by `seq`.
select seq, at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why,
       (select f.code from chunkfact f
        where locktype = 'OUT' and status_after = 'READY'
          and f.datasetid = e.datasetid and f.dataid = e.dataid and f.generation = e.generation) as code, execution
from dataevent e
where (cast(:jobid as text) is null or jobid = :jobid)
  and (cast(:dataid as text) is null or dataid = :dataid)
  and (cast(:datasetid as text) is null or datasetid = :datasetid)
  and (cast(:since as timestamptz) is null or at >= :since)
  and (cast(:words as text) is null or status_after in (select json_array_elements_text(cast(:words as json))))
order by xid desc, seq desc
limit :limit;

-- name: whole
-- All rows of history that match, the newest last.
select seq, at, datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why,
       (select f.code from chunkfact f
        where locktype = 'OUT' and status_after = 'READY'
          and f.datasetid = e.datasetid and f.dataid = e.dataid and f.generation = e.generation) as code, execution
from dataevent e
where (cast(:jobid as text) is null or jobid = :jobid)
  and (cast(:dataid as text) is null or dataid = :dataid)
  and (cast(:datasetid as text) is null or datasetid = :datasetid)
  and (cast(:since as timestamptz) is null or at >= :since)
  and (cast(:words as text) is null or status_after in (select json_array_elements_text(cast(:words as json))))
order by xid, seq;

-- name: runs
-- The newest outputs of jobs.
select s.datasetid, s.jobid, s.dataid, s.locktype, s.status,
       cast(s.modified as timestamptz) as modified, s.generation, c.attempts, c.owner
from datastatus s left join claim c on c.jobid = s.jobid and c.dataid = s.dataid
where s.locktype = 'OUT' and (cast(:jobid as text) is null or s.jobid = :jobid)
  and (cast(:words as text) is null or s.status in (select json_array_elements_text(cast(:words as json))))
  and (cast(:since as timestamptz) is null or cast(s.modified as timestamptz) >= :since)
order by s.modified desc nulls last, s.generation desc nulls last, s.dataid desc
limit cast(:limit as bigint);
