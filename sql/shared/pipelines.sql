-- name: tables
-- Whether the tables that pipelines need exist.
select 1 from pipelinestep limit 1;
