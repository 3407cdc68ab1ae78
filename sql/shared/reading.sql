-- name: bounds
-- Which rows of a table the chunk is.
select lower_bound, upper_bound, modulus from chunkrange
where datasetid = :datasetid and dataid = :dataid;
