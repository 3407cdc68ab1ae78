-- name: tables
-- The tables in the file.
select name from sqlite_master where type = 'table';

-- name: columns
-- The columns of a table.
select name from pragma_table_info(:name);

-- name: sign
-- Tell the triggers who writes, and why.
update dataflow_context set act = 'init', who = 'odf init', why = 'found on init';

-- name: rebase
-- Nothing to do: the log has its own order, which a copied file keeps.
select 1;

-- name: rebuild
-- Queue every job: its claimable chunks are computed again.
insert into fill (jobid)
select distinct jobid from job where itemtype in ('IN', 'OUT') and jobid is not null order by jobid
on conflict (jobid) do update set datasetid = '', producer = '', dataid = '';

-- name: clear
-- The next writer signs for itself.
update dataflow_context set act = '', who = null, why = null;
