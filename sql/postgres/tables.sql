-- name: turn
-- One publish of a chunk after the other: rows that aren't there yet can't be locked.
select pg_advisory_xact_lock(hashtextextended(:key, 0));

-- name: patience
-- How long to wait for the other.
set local lock_timeout = '60s';

-- name: hurry
-- For who only looks.
set local statement_timeout = '3s';
