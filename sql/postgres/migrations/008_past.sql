-- Programs of version 3 to 7 work with these tables: triggers write the history of registrations.

-- What is registered, as it comes and goes: `n` rows of `dataset`, `job` or `jobpolicy` with this content came, or went if
-- it is negative. Its sum over rows of one content tells how many there were at a time. `found`: it was there before
-- history was, since when nobody knows.
create table registration (
    seq bigint generated always as identity primary key, at timestamptz not null default clock_timestamp(),
    tablename text not null, jobid text, datasetid text, itemtype text,
    n integer not null, content text not null, found integer not null default 0, who text, why text
);
create index registration_by_job on registration (jobid);
create index registration_by_dataset on registration (datasetid);
