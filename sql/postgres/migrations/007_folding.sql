-- Programs of version 3 to 5 work with these tables. They fold nothing, and don't know which bytes of a CSV file this
-- version has appended for an item: end their `odf serve` before this version's begins.

-- Seconds after which a finished item is folded.
alter table jobpolicy add column if not exists fold_after integer check (fold_after >= 60);

create index streamitem_by_age on streamitem (jobid, received, dataid);

-- Items that are finished and were folded, by job: how many, between which numbers, and a digest chained over what
-- each had made. They have no other row any more.
create table streamfold (
    jobid text primary key, items bigint not null, first bigint not null, last bigint not null, digest text not null,
    folded timestamptz not null default clock_timestamp()
);

-- A CSV file that is appended to, by the number of the journal beside it: how long it is with all that is committed.
create table csvfile (
    journal text primary key, location text not null, length bigint not null, batch text not null
);

-- The bytes that a claim has appended to it; they go when their item is folded.
create table csvpart (
    dataid text not null, journal text not null, generation bigint not null, jobid text not null,
    start bigint not null, length bigint not null, digest text not null,
    primary key (dataid, journal, generation)
);
