-- Programs of version 3 work with these tables: they claim and settle as before.
insert into dataflow_meta (name, value) values ('oldest_client', '3') on conflict (name) do nothing;
