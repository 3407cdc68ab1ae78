-- name: next
-- The chunk that a job would claim first.
select dataid from pending where jobid = :jobid order by rank, sortkey, dataid collate "C" limit 1;

-- name: since
-- When history begins.
select at from dataevent order by xid, seq limit 1;
