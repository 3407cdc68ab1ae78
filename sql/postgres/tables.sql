-- name: turn
-- Publish a chunk one at a time: rows that don't exist yet can't be locked.
select pg_advisory_xact_lock(hashtextextended(:key, 0));

-- name: patience
-- Limit the wait for another publish.
set local lock_timeout = '60s';

-- name: hurry
-- Don't wait for locks, for a transaction that only reads.
set local statement_timeout = '3s';
