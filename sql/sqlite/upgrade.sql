-- name: turn
-- Let another init finish first; the statements after this one see what it did.
select 1;

-- name: rebuild
-- Recompute what a job may claim.
insert into rebuild (jobid) values (:jobid);

-- name: rebase
-- The log's order is its own: a copied file needs nothing.
select 1;

-- name: lacks_schema
-- Whether chunkfact is of a version that didn't keep schemas.
select 1 where not exists (select 1 from pragma_table_info('chunkfact') where name = 'schema');

-- name: add_schema
-- Keep the schemas of chunks.
alter table chunkfact add column schema text;

-- name: lacks_writemode
-- Whether dataset is of a version that didn't tell how a pipeline writes.
select 1 where not exists (select 1 from pragma_table_info('dataset') where name = 'writemode');

-- name: add_writemode
-- Tell of a dataset whether a pipeline appends to it or replaces it.
alter table dataset add column writemode text;
