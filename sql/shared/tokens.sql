-- name: put
-- Let items be sent to a pipeline by whoever has this token, and no other.
insert into streamtoken (jobid, hash) values (:jobid, :hash)
on conflict (jobid) do update set hash = excluded.hash, created = current_timestamp;

-- name: hash
-- The hash of a pipeline's token.
select hash from streamtoken where jobid = :jobid;

-- name: drop
-- Let nobody send items to a pipeline.
delete from streamtoken where jobid = :jobid;
