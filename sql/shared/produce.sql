-- name: inputs
-- What a claim consumes: the generation that it locked of each input, and the facts about it.
select s.datasetid, s.generation, f.location, f.rows, f.fingerprint, f.validated
from (select distinct datasetid from job where jobid = :jobid and itemtype = 'IN') as j
    join datastatus s on s.datasetid = j.datasetid and s.jobid = :jobid and s.dataid = :dataid
    left join chunkfact f
        on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.locktype = 'IN';

-- name: outputs
-- The statuses of a job's outputs for one chunk, of any producer, and the facts about them.
select s.datasetid, s.jobid, s.status, s.generation, f.location, f.rows, f.bytes, f.fingerprint, f.inputs,
       f.schema, f.validated, f.checks, f.metadata, f.code
from (select distinct datasetid from job where jobid = :jobid and itemtype = 'OUT') as j
    join datastatus s on s.datasetid = j.datasetid and s.dataid = :dataid
    left join chunkfact f
        on f.datasetid = s.datasetid and f.dataid = s.dataid and f.generation = s.generation
where s.locktype = 'OUT';

-- name: note_invalid
-- Record the facts about a chunk that failed its checks.
insert into chunkfact (datasetid, dataid, generation, jobid, location, rows, bytes, fingerprint, validated, checks, schema,
                       metadata, code)
values (:datasetid, :dataid, :generation, :jobid, :location, :rows, :bytes, :fingerprint, :validated, :checks, :schema,
        :metadata, :code)
on conflict (datasetid, dataid, generation) do nothing;

-- name: note_schema
-- Record the schema with which a chunk written by others was read.
insert into chunkfact (datasetid, dataid, generation, schema)
values (:datasetid, :dataid, :generation, :schema)
on conflict (datasetid, dataid, generation) do update set schema = excluded.schema where chunkfact.schema is null;

-- name: known_schema
-- The schema of the dataset's chunk that was published or read last, except this one.
select f.dataid, f.schema from chunkfact f
    join datastatus s
        on s.datasetid = f.datasetid and s.dataid = f.dataid and coalesce(s.generation, 0) = f.generation
where f.datasetid = :datasetid and f.dataid <> :dataid and f.schema is not null
  and s.locktype = 'OUT' and s.status = 'READY'
order by f.generation desc, f.at desc limit 1;

-- name: last_rows
-- The row counts of the dataset's chunks that were published last, except this one.
select f.dataid, f.rows from chunkfact f
    join datastatus s on s.datasetid = f.datasetid and s.dataid = f.dataid and s.generation = f.generation
where f.datasetid = :datasetid and f.dataid <> :dataid and f.rows is not null
  and s.locktype = 'OUT' and s.status = 'READY'
order by f.generation desc limit :most;

-- name: last_schema
-- The schema of the dataset's chunk that was published last, except this one.
select f.dataid, f.schema from chunkfact f
    join datastatus s on s.datasetid = f.datasetid and s.dataid = f.dataid and s.generation = f.generation
where f.datasetid = :datasetid and f.dataid <> :dataid and f.schema is not null
  and s.locktype = 'OUT' and s.status = 'READY'
order by f.generation desc limit 1;
