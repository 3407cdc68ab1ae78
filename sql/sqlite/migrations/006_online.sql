-- Programs of version 3 to 5 work with these tables: they claim and settle as before. Of a job that they register,
-- the first chunks are claimable at once, and the others when a program of this version is idle.

-- Jobs whose part of `pending` is still to be judged, chunk by chunk, and how far that has come.
create table fill (
    jobid text primary key,
    datasetid text not null default '', producer text not null default '', dataid text not null default ''
) without rowid;
