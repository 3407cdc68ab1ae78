-- Programs of version 3 to 8 work with these tables: they leave the new columns empty.

-- What a job tells of a chunk beside its figures, as an object of JSON; and which code made it.
alter table chunkfact add column metadata text;
alter table chunkfact add column code text;
