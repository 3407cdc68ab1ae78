-- name: record
-- Write the results of steps over earlier records of them.
insert into pipelinestep as p (jobid, dataid, generation, step, transformation, status, started, ended, rows,
                               stdout, traceback, reason)
select jobid, dataid, generation, step, transformation, status, to_timestamp(started), to_timestamp(ended), rows,
       stdout, traceback, reason
from json_to_recordset(cast(:steps as json)) as s(
    jobid text, dataid text, generation bigint, step integer, transformation text, status text,
    started float8, ended float8, rows bigint, stdout text, traceback text, reason text)
on conflict (jobid, dataid, generation, step) do update
    set transformation = excluded.transformation, status = excluded.status,
        started = coalesce(excluded.started, p.started), ended = excluded.ended, rows = excluded.rows,
        stdout = excluded.stdout, traceback = excluded.traceback, reason = excluded.reason;
