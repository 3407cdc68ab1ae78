-- name: turn
-- Let another init finish first; the statements after this one see what it did.
select 1;

-- name: rebuild
-- Recompute what a job may claim.
insert into rebuild (jobid) values (:jobid);

-- name: rebase
-- The log's order is its own: a copied file needs nothing.
select 1;
