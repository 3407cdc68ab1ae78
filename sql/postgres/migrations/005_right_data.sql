-- Programs of version 3 and 4 work with these tables: they claim and settle as before, and don't look whether an
-- input has changed.

-- Workers lost, or inputs changed, in a row before a chunk is on HOLD.
alter table jobpolicy add column if not exists max_losses integer check (max_losses >= 1);

-- Interruptions in a row of a chunk's work: after five it is on HOLD.
alter table claim add column interruptions integer not null default 0;

-- How CSV files of others are written, as JSON; whether a chunk has replaced all others of its dataset.
alter table dataset add column options varchar;
alter table chunkfact add column replaces boolean;
create index chunkfact_replacing on chunkfact (datasetid, generation) where replaces;
