-- name: put
-- Accept items for a pipeline with this token, and with no other.
insert into streamtoken (jobid, hash) values (:jobid, :hash)
on conflict (jobid) do update set hash = excluded.hash, created = current_timestamp;

-- name: hash
-- The hash of a pipeline's token.
select hash from streamtoken where jobid = :jobid;

-- name: drop
-- Accept no items for a pipeline.
delete from streamtoken where jobid = :jobid;
