-- Programs of version 3 to 13 work with these tables: they take a domain's name from what is registered at the moment.

-- The name that a dataset's domain had when it was first seen: Dagster's partitions are called by it, so it stays.
create table domainname (datasetid text not null primary key, name text not null);
