-- Programs of version 3 to 12 work with these tables. They don't know the dial, and make no chunk again because of it.

-- What a run in Dagster does with a READY chunk whose inputs have been replaced since it was made.
alter table jobpolicy add column on_stale text check (on_stale in ('auto', 'skip', 'remake'));
