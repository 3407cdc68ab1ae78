-- name: rebuild
-- Recompute what a job may claim.
insert into rebuild (jobid) values (:jobid);
