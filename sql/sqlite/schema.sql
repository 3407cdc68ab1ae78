-- The tables of OpenDataFlow on SQLite, as on PostgreSQL. Idempotent: every `odf init` runs it, to create what is
-- missing. migrations/ upgrades older tables to this; what happens when rows change is in triggers.sql.

create table if not exists dataset (
    datasetid text, hostname text, database text, schemaname text, tablename text, username text,
    encryptedpass text, format text, chunkcolumn text, domain text, writemode text,
    options text
);
create index if not exists x_dataset on dataset (datasetid);

create table if not exists job (jobid text, itemtype text, datasetid text, itemvalue text, modified text);
create index if not exists job_by_jobid on job (jobid);
create index if not exists job_by_datasetid on job (datasetid);

create table if not exists datastatus (
    datasetid text, jobid text, dataid text, locktype text, status text, modified text, generation integer,
    primary key (datasetid, jobid, dataid)
);
create index if not exists datastatus_by_chunk on datastatus (dataid, datasetid, jobid);

create table if not exists jobpolicy (
    jobid text primary key,
    concurrency integer check (concurrency >= 0),
    max_attempts integer check (max_attempts >= 1),
    retry_delay integer check (retry_delay >= 0),
    lease_seconds integer check (lease_seconds >= 1),
    batch_size integer check (batch_size >= 1),
    time_limit integer check (time_limit >= 1),
    paused_until text,
    every_minutes integer check (every_minutes >= 1),
    modified text default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    max_losses integer check (max_losses >= 1),
    fold_after integer check (fold_after >= 60),
    on_stale text check (on_stale in ('auto', 'skip', 'remake'))
);

create table if not exists generation (last integer not null);
insert into generation (last) select 0 where not exists (select 1 from generation);

create table if not exists claim (
    jobid text not null, dataid text not null, generation integer not null,
    owner text, runid text, started text, heartbeat text, lease_end text,
    attempts integer not null default 1, losses integer not null default 0, retry_at text,
    interruptions integer not null default 0,
    primary key (jobid, dataid)
);

-- A step of a Dagster run that is at work, with or without a claim.
create table if not exists worker (
    owner text primary key, runid text not null, jobid text not null,
    started text not null, heartbeat text not null, lease_end text not null
);

create table if not exists chunkfact (
    datasetid text not null, dataid text not null, generation integer not null,
    location text, rows integer, bytes integer, fingerprint text, validated integer, checks text,
    at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), jobid text, inputs text, schema text,
    replaces integer, metadata text, code text,
    primary key (datasetid, dataid, generation)
) without rowid;
create index if not exists chunkfact_replacing on chunkfact (datasetid, generation) where replaces;

-- A chunk's rows: lower_bound <= column < upper_bound; column = lower_bound without an upper bound; column
-- modulo modulus = lower_bound with a modulus.
create table if not exists chunkrange (
    datasetid text not null, dataid text not null, lower_bound text, upper_bound text, modulus integer,
    primary key (datasetid, dataid)
);

-- Claimers fill in the sort key: SQLite has no function for it that every writer shares.
create table if not exists pending (
    jobid text not null, dataid text not null, rank integer not null, sortkey text,
    primary key (jobid, dataid)
) without rowid;
create index if not exists pending_in_order on pending (jobid, rank, sortkey, dataid);

-- Jobs whose part of `pending` has to be judged, chunk by chunk, and how far that has come.
create table if not exists fill (
    jobid text primary key,
    datasetid text not null default '', producer text not null default '', dataid text not null default ''
) without rowid;

-- `execution`: what made the change, such as one `odf run`; only changes of outputs have one.
create table if not exists dataevent (
    seq integer primary key autoincrement,
    at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    datasetid text, jobid text, dataid text, locktype text,
    status_before text, status_after text, generation integer, who text, why text,
    execution text
);
create index if not exists dataevent_by_chunk on dataevent (dataid, datasetid);
create index if not exists dataevent_of_failures on dataevent (jobid, dataid) where status_after = 'FAILED';
create index if not exists dataevent_by_execution on dataevent (execution, jobid) where execution is not null;

-- The result of each transformation in a pipeline's runs: for people, it decides nothing.
create table if not exists pipelinestep (
    jobid text not null, dataid text not null, generation integer not null, step integer not null,
    transformation text not null, status text not null, started text, ended text, rows integer,
    stdout text, traceback text, reason text,
    primary key (jobid, dataid, generation, step)
);
create index if not exists pipelinestep_by_run on pipelinestep (jobid, generation, dataid);

-- An item that came over HTTP: a chunk of its job, with its data. `odf history clean` deletes the payload.
create table if not exists streamitem (
    jobid text not null, dataid text not null, payload text, idempotency text,
    received text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    primary key (jobid, dataid)
);
create index if not exists streamitem_kept on streamitem (jobid, dataid) where payload is not null;
create index if not exists streamitem_by_key on streamitem (jobid, idempotency) where idempotency is not null;
create index if not exists streamitem_by_age on streamitem (jobid, received, dataid);

-- The answer to a client's Idempotency-Key, and a digest of its payloads.
create table if not exists streamkey (
    jobid text not null, idempotency text not null, digest text not null, dataids text not null,
    received text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    primary key (jobid, idempotency)
) without rowid;

create table if not exists streamtoken (
    jobid text primary key, hash text not null,
    created text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- Finished items that were folded, by job: how many, their first and last number, and a digest chained over their
-- results. They have no other rows any more.
create table if not exists streamfold (
    jobid text primary key, items integer not null, first integer not null, last integer not null, digest text not null,
    folded text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- A CSV file with appended rows, by the number of the journal beside it: its length with everything committed.
create table if not exists csvfile (
    journal text primary key, location text not null, length integer not null, batch text not null
);

-- The bytes that a claim has appended to it; the row is deleted when its item is folded.
create table if not exists csvpart (
    dataid text not null, journal text not null, generation integer not null, jobid text not null,
    start integer not null, length integer not null, digest text not null,
    primary key (dataid, journal, generation)
) without rowid;

-- The history of registrations: `n` rows of `dataset`, `job` or `jobpolicy` with this content were added, or removed if
-- `n` is negative. The sum of `n` up to a time says how many there were. `found`: the registration is older than this
-- history, and nobody knows by how much.
create table if not exists registration (
    seq integer primary key, at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    tablename text not null, jobid text, datasetid text, itemtype text,
    n integer not null, content text not null, found integer not null default 0, who text, why text
);
create index if not exists registration_by_job on registration (jobid);
create index if not exists registration_by_dataset on registration (datasetid);

-- Who declares a dataset or a job: `flow:NAME` or `project:NAME`. There may be several; one typed by hand has none.
-- `dials`: those that a flow sets, as a JSON list; a dial that it no longer sets is reset.
create table if not exists origin (
    kind text not null, name text not null, origin text not null,
    who text, at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), revision text, dials text,
    primary key (kind, name, origin)
);

-- The name that a dataset's domain had when it was first seen: Dagster's partitions are called by it, so it stays.
create table if not exists domainname (datasetid text not null primary key, name text not null);

-- `version`: of these tables. `oldest_client`: an older program takes no new claim, but settles those that it has.
-- `schema`: the version whose triggers.sql ran last. The `odf init` of version 3 knows only this row and writes '3' into
-- it, so a number other than `version` shows that an older program has rewritten functions and triggers.
create table if not exists dataflow_meta (name text primary key, value text not null);
insert into dataflow_meta (name, value) values ('oldest_client', '3') on conflict (name) do nothing;
-- The store's id, which notes beside the data mention. Created once.
insert into dataflow_meta (name, value) values ('store', lower(hex(randomblob(16)))) on conflict (name) do nothing;

-- Who is writing and why: set at the start of each of our transactions, and cleared at its end.
create table if not exists dataflow_context (act text not null, who text, why text, execution text);
insert into dataflow_context (act) select '' where not exists (select 1 from dataflow_context);
