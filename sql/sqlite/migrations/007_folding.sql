-- Programs of version 3 to 5 work with these tables. They fold nothing, and don't know which bytes of a CSV file this
-- version has appended for an item: end their `odf serve` before this version's begins.

-- Seconds after which a finished item is folded.
alter table jobpolicy add column fold_after integer check (fold_after >= 60);

create index streamitem_by_age on streamitem (jobid, received, dataid);

-- Items that are finished and were folded, by job: how many, between which numbers, and a digest chained over what
-- each had made. They have no other row any more.
create table streamfold (
    jobid text primary key, items integer not null, first integer not null, last integer not null, digest text not null,
    folded text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

-- A CSV file that is appended to, by the number of the journal beside it: how long it is with all that is committed.
create table csvfile (
    journal text primary key, location text not null, length integer not null, batch text not null
);

-- The bytes that a claim has appended to it; they go when their item is folded.
create table csvpart (
    dataid text not null, journal text not null, generation integer not null, jobid text not null,
    start integer not null, length integer not null, digest text not null,
    primary key (dataid, journal, generation)
) without rowid;
