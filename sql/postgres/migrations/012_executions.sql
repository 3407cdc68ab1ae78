-- Programs of version 3 to 11 work with these tables: the triggers tell one execution of theirs from another by its
-- transaction.

-- Which execution made a change of an output: of a process and job, of a Dagster run, of a transaction by hand.
alter table dataevent add column execution text;
create index dataevent_by_execution on dataevent (execution, jobid) where execution is not null;
