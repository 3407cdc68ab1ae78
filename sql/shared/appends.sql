-- name: committed
-- How long a file was with all that is committed, and the batch that was committed last.
select length, batch from csvfile where journal = :journal;

-- name: is_last
-- Whether a batch is the one that was committed last.
select 1 from csvfile where journal = :journal and batch = :batch;

-- name: shift
-- What lies behind bytes that were replaced has moved.
update csvpart set start = start + :by where journal = :journal and start >= :start;

-- name: commit
-- A file is this long with all that is committed.
insert into csvfile (journal, location, length, batch) values (:journal, :location, :length, :batch)
on conflict (journal) do update
    set location = excluded.location, length = excluded.length, batch = excluded.batch;
