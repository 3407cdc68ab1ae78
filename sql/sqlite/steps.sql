-- name: record
-- Write the results of steps over earlier records of them.
insert into pipelinestep (jobid, dataid, generation, step, transformation, status, started, ended, rows,
                          stdout, traceback, reason)
select value ->> 'jobid', value ->> 'dataid', value ->> 'generation', value ->> 'step',
       value ->> 'transformation', value ->> 'status',
       strftime('%Y-%m-%d %H:%M:%f', value ->> 'started', 'unixepoch'),
       strftime('%Y-%m-%d %H:%M:%f', value ->> 'ended', 'unixepoch'),
       value ->> 'rows', value ->> 'stdout', value ->> 'traceback', value ->> 'reason'
from json_each(:steps) where true
on conflict (jobid, dataid, generation, step) do update
    set transformation = excluded.transformation, status = excluded.status,
        started = coalesce(excluded.started, started), ended = excluded.ended, rows = excluded.rows,
        stdout = excluded.stdout, traceback = excluded.traceback, reason = excluded.reason;
