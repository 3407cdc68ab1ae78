-- name: bounds
-- The bounds of a chunk's rows in its table.
select lower_bound, upper_bound, modulus from chunkrange
where datasetid = :datasetid and dataid = :dataid;
