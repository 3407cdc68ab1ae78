-- name: committed
-- The length of a file with everything committed, and the batch that was committed last.
select length, batch from csvfile where journal = :journal;

-- name: is_last
-- Whether a batch is the one that was committed last.
select 1 from csvfile where journal = :journal and batch = :batch;

-- name: shift
-- Move the recorded positions behind replaced bytes.
update csvpart set start = start + :by where journal = :journal and start >= :start;

-- name: commit
-- Record the length of a file with everything committed.
insert into csvfile (journal, location, length, batch) values (:journal, :location, :length, :batch)
on conflict (journal) do update
    set location = excluded.location, length = excluded.length, batch = excluded.batch;
