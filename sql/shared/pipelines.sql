-- name: tables
-- Whether the tables are there that pipelines need.
select 1 from pipelinestep limit 1;
