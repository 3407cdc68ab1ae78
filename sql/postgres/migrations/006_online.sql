-- Programs of version 3 to 5 work with these tables: they claim and settle as before. Of a job that they register,
-- the first chunks are claimable at once, and the others when a program of this version is idle.

-- Jobs whose part of `pending` is still to be judged, chunk by chunk, and how far that has come: first what is pending,
-- then the rows of `datasetid` after (producer, dataid). `writers`: transactions that were writing chunks when the
-- job's registration was seen first, and may not know of it; null before that.
create table fill (
    jobid text primary key, writers text[],
    datasetid text not null default '', producer text not null default '', dataid text not null default ''
);

-- It locked datastatus while it judged all chunks of a job.
drop function if exists rebuild(text);
