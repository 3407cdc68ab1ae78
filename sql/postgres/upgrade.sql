-- name: rebuild
-- Recompute what a job may claim.
select rebuild(:jobid);
