-- Programs of version 3 and 4 work with these tables: they claim and settle as before, and don't look whether an
-- input has changed.
alter table jobpolicy add column max_losses integer check (max_losses >= 1);
