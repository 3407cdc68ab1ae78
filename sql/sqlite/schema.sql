-- The tables of OpenDataFlow on SQLite: those of PostgreSQL, and the same behaviour by row triggers.
-- Idempotent. All of the log's consequences hang on dataevent: what history records is what is judged.

create table if not exists dataset (
    datasetid text, hostname text, database text, schemaname text, tablename text, username text,
    encryptedpass text, format text, chunkcolumn text, domain text, writemode text
);
create index if not exists x_dataset on dataset (datasetid);

create table if not exists job (jobid text, itemtype text, datasetid text, itemvalue text, modified text);
create index if not exists job_by_jobid on job (jobid);
create index if not exists job_by_datasetid on job (datasetid);

create table if not exists datastatus (
    datasetid text, jobid text, dataid text, locktype text, status text, modified text, generation integer,
    primary key (datasetid, jobid, dataid)
);
create index if not exists datastatus_by_chunk on datastatus (dataid, datasetid, jobid);

create table if not exists jobpolicy (
    jobid text primary key,
    concurrency integer check (concurrency >= 0),
    max_attempts integer check (max_attempts >= 1),
    retry_delay integer check (retry_delay >= 0),
    lease_seconds integer check (lease_seconds >= 1),
    batch_size integer check (batch_size >= 1),
    time_limit integer check (time_limit >= 1),
    paused_until text,
    every_minutes integer check (every_minutes >= 1),
    modified text default (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

create table if not exists generation (last integer not null);
insert into generation (last) select 0 where not exists (select 1 from generation);

create table if not exists claim (
    jobid text not null, dataid text not null, generation integer not null,
    owner text, runid text, started text, heartbeat text, lease_end text,
    attempts integer not null default 1, losses integer not null default 0, retry_at text,
    primary key (jobid, dataid)
);

-- A step of a Dagster run that is at work, whether or not it holds a claim at the moment.
create table if not exists worker (
    owner text primary key, runid text not null, jobid text not null,
    started text not null, heartbeat text not null, lease_end text not null
);

create table if not exists chunkfact (
    datasetid text not null, dataid text not null, generation integer not null,
    location text, rows integer, bytes integer, fingerprint text, validated integer, checks text,
    at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), jobid text, inputs text, schema text,
    primary key (datasetid, dataid, generation)
) without rowid;

-- A chunk's rows: lower_bound <= column < upper_bound; column = lower_bound without an upper bound; column
-- modulo modulus = lower_bound with a modulus.
create table if not exists chunkrange (
    datasetid text not null, dataid text not null, lower_bound text, upper_bound text, modulus integer,
    primary key (datasetid, dataid)
);

-- The sort key is filled in by the claimers: SQLite has no function for it that every writer shares.
create table if not exists pending (
    jobid text not null, dataid text not null, rank integer not null, sortkey text,
    primary key (jobid, dataid)
) without rowid;
create index if not exists pending_in_order on pending (jobid, rank, sortkey, dataid);

create table if not exists dataevent (
    seq integer primary key autoincrement,
    at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    datasetid text, jobid text, dataid text, locktype text,
    status_before text, status_after text, generation integer, who text, why text
);
create index if not exists dataevent_by_chunk on dataevent (dataid, datasetid);
create index if not exists dataevent_of_failures on dataevent (jobid, dataid) where status_after = 'FAILED';

-- What each transformation of a pipeline's run did, told for people: nothing is decided by it.
create table if not exists pipelinestep (
    jobid text not null, dataid text not null, generation integer not null, step integer not null,
    transformation text not null, status text not null, started text, ended text, rows integer,
    stdout text, traceback text, reason text,
    primary key (jobid, dataid, generation, step)
);
create index if not exists pipelinestep_by_run on pipelinestep (jobid, generation, dataid);

-- An item that came over HTTP: a chunk of its job whose data is here. The payload goes when it is cleaned.
create table if not exists streamitem (
    jobid text not null, dataid text not null, payload text, idempotency text,
    received text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    primary key (jobid, dataid)
);
create index if not exists streamitem_kept on streamitem (jobid, dataid) where payload is not null;
create index if not exists streamitem_by_key on streamitem (jobid, idempotency) where idempotency is not null;

-- What a client's Idempotency-Key was answered, and for which payloads.
create table if not exists streamkey (
    jobid text not null, idempotency text not null, digest text not null, dataids text not null,
    received text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    primary key (jobid, idempotency)
) without rowid;

create table if not exists streamtoken (
    jobid text primary key, hash text not null,
    created text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);

create table if not exists dataflow_meta (name text primary key, value text not null);

-- Who is writing and why: set at the start of each of our transactions and cleared at its end.
create table if not exists dataflow_context (act text not null, who text, why text);
insert into dataflow_context (act) select '' where not exists (select 1 from dataflow_context);

drop view if exists judge;
drop view if exists rebuild;

-- "insert into judge" decides anew whether a (job, dataid) pair may be claimed.
create view judge as select null as jobid, null as dataid where false;
create trigger judge_pair instead of insert on judge begin
    delete from pending where jobid = new.jobid and dataid = new.dataid;
    insert into pending (jobid, dataid, rank)
    select new.jobid, new.dataid, again.rank
    from (select case when exists (
              select 1 from job o join datastatus s
                  on s.datasetid = o.datasetid and s.jobid = o.jobid and s.dataid = new.dataid
              where o.jobid = new.jobid and o.itemtype = 'OUT' and s.locktype = 'OUT'
                and s.status in ('RESUBMIT', 'RERUN')) then 0 else 1 end as rank) as again
    where new.dataid <> ''
      -- the job writes something, and nothing that it also reads
      and exists (select 1 from job o where o.jobid = new.jobid and o.itemtype = 'OUT')
      and not exists (
          select 1 from job i join job o on o.jobid = i.jobid and o.datasetid = i.datasetid
          where i.jobid = new.jobid and i.itemtype = 'IN' and o.itemtype = 'OUT')
      -- every input is READY, and nobody is rewriting it
      and not exists (
          select 1 from job i
          where i.jobid = new.jobid and i.itemtype = 'IN' and i.datasetid <> 'today'
            and (not exists (select 1 from datastatus s
                             where s.dataid = new.dataid and s.datasetid = i.datasetid
                               and s.locktype = 'OUT' and s.status = 'READY')
                 or exists (select 1 from datastatus s
                            where s.dataid = new.dataid and s.datasetid = i.datasetid
                              and s.locktype = 'OUT' and s.status = 'RUNNING')))
      -- nobody holds or has made an output
      and not exists (
          select 1 from job o join datastatus s on s.dataid = new.dataid and s.datasetid = o.datasetid
          where o.jobid = new.jobid and o.itemtype = 'OUT' and s.locktype = 'OUT'
            and (s.status is null or s.status not in ('PENDING', 'RESUBMIT', 'RERUN')))
      -- this job isn't consuming the chunk, nor has it (DONE) unless it is to run again; and no lock
      -- of another type, from when the job was another one, has the key of a row that it would write
      and not exists (
          select 1 from job i join datastatus s
              on s.datasetid = i.datasetid and s.jobid = i.jobid and s.dataid = new.dataid
          where i.jobid = new.jobid and i.itemtype in ('IN', 'OUT')
            and (s.status is null or s.status not in ('RESUBMIT', 'RERUN'))
            and case when i.itemtype = 'OUT' then s.locktype is not 'OUT' and s.status is not 'PENDING'
                     when s.locktype = 'IN'
                     then s.status is null or s.status not in ('DONE', 'FAILED', 'ERROR')
                          or (s.status = 'DONE' and again.rank = 1)
                     else true end)
      -- something says that the chunk exists: an input, or a row of the job's own
      and (exists (select 1 from job i where i.jobid = new.jobid and i.itemtype = 'IN')
           or exists (
               select 1 from job o join datastatus s
                   on s.datasetid = o.datasetid and s.jobid = o.jobid and s.dataid = new.dataid
               where o.jobid = new.jobid and o.itemtype = 'OUT' and s.locktype = 'OUT'));
end;

-- "insert into rebuild" judges every chunk that a job could know of.
create view rebuild as select null as jobid where false;
create trigger rebuild_job instead of insert on rebuild begin
    delete from pending where jobid = new.jobid;
    insert into judge (jobid, dataid)
    select distinct new.jobid, s.dataid from job j join datastatus s on s.datasetid = j.datasetid
    where j.jobid = new.jobid and s.locktype = 'OUT' and s.dataid <> ''
      and ((j.itemtype = 'IN' and s.status = 'READY')
           or (j.itemtype = 'OUT' and s.jobid = j.jobid and s.status in ('PENDING', 'RESUBMIT', 'RERUN')));
end;

drop trigger if exists event_for_readers;
create trigger event_for_readers after insert on dataevent
when new.locktype = 'OUT'
    and ((new.status_before is 'READY') <> (new.status_after is 'READY')
         or ((new.status_before is 'RUNNING' or new.status_after is 'RUNNING')
             and (select act from dataflow_context) <> 'claim'))
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job where datasetid = new.datasetid and itemtype = 'IN';
end;

drop trigger if exists event_for_producers;
create trigger event_for_producers after insert on dataevent
when new.locktype = 'OUT'
    and not (coalesce(new.status_before, '') in ('RUNNING', 'READY', 'FAILED')
             and coalesce(new.status_after, '') in ('RUNNING', 'READY', 'FAILED'))
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job where datasetid = new.datasetid and itemtype = 'OUT';
end;

drop trigger if exists event_for_consumer;
create trigger event_for_consumer after insert on dataevent
when (new.locktype = 'IN' and (select act from dataflow_context) not in ('claim', 'finish'))
    or ((select act from dataflow_context) = '' and exists (
        select 1 from job where jobid = new.jobid and datasetid = new.datasetid
          and itemtype in ('IN', 'OUT') and itemtype is not new.locktype))
begin
    insert into judge (jobid, dataid) values (new.jobid, new.dataid);
end;

-- "insert or replace" fires no delete trigger: history knows of the row that is gone.
drop trigger if exists datastatus_inserted;
create trigger datastatus_inserted after insert on datastatus begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why)
    select e.datasetid, e.jobid, e.dataid, e.locktype, e.status_after, e.generation, coalesce(c.who, 'sql'), c.why
    from dataflow_context c join dataevent e on e.seq = (
        select max(seq) from dataevent
        where dataid = new.dataid and datasetid = new.datasetid and jobid = new.jobid)
    where c.act = '' and e.status_after is not null;
    insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why)
    select new.datasetid, new.jobid, new.dataid, new.locktype, new.status, new.generation,
           coalesce(who, 'sql'), why from dataflow_context;
end;

drop trigger if exists datastatus_deleted;
create trigger datastatus_deleted after delete on datastatus begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why)
    select old.datasetid, old.jobid, old.dataid, old.locktype, old.status, old.generation,
           coalesce(who, 'sql'), why from dataflow_context;
end;

drop trigger if exists datastatus_updated;
create trigger datastatus_updated after update on datastatus
when new.status is not old.status and new.datasetid is old.datasetid and new.jobid is old.jobid
    and new.dataid is old.dataid and new.locktype is old.locktype
begin
    insert into dataevent
        (datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why)
    select new.datasetid, new.jobid, new.dataid, new.locktype, old.status, new.status,
           coalesce(new.generation, old.generation), coalesce(who, 'sql'), why from dataflow_context;
end;

-- A row that changes its key or its locktype is logged as one lock gone and another come.
drop trigger if exists datastatus_rekeyed;
create trigger datastatus_rekeyed after update on datastatus
when new.datasetid is not old.datasetid or new.jobid is not old.jobid
    or new.dataid is not old.dataid or new.locktype is not old.locktype
begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why)
    select old.datasetid, old.jobid, old.dataid, old.locktype, old.status, old.generation,
           coalesce(who, 'sql'), why from dataflow_context;
    insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why)
    select new.datasetid, new.jobid, new.dataid, new.locktype, new.status, new.generation,
           coalesce(who, 'sql'), why from dataflow_context;
    insert into sent_back select old.jobid, old.dataid, false from dataflow_context
    where act = '' and old.locktype = 'OUT' and old.status = 'RUNNING';
end;

-- What follows when a person, not we, sends a chunk back or takes it away: whoever still runs it loses
-- its claim and its locks, and the job's other outputs are made again with it.
drop view if exists sent_back;
create view sent_back as select null as jobid, null as dataid, null as again where false;
create trigger sent_back_chunk instead of insert on sent_back begin
    delete from claim where jobid = new.jobid and dataid = new.dataid;
    update datastatus set status = 'RESUBMIT', generation = null,
        modified = strftime('%Y-%m-%d %H:%M:%f', 'now')
    where jobid = new.jobid and dataid = new.dataid and locktype = 'OUT'
      and ((new.again and status in ('READY', 'FAILED', 'ERROR', 'RUNNING'))
           or (status = 'RUNNING' and generation is not null))
      and datasetid in (select datasetid from job where jobid = new.jobid and itemtype = 'OUT');
    delete from datastatus
    where jobid = new.jobid and dataid = new.dataid and locktype = 'IN'
      and datasetid in (select datasetid from job where jobid = new.jobid and itemtype = 'IN');
end;

drop trigger if exists datastatus_sent_back;
create trigger datastatus_sent_back after update on datastatus
when (select act from dataflow_context) = '' and new.locktype = 'OUT'
    and ((new.status in ('RESUBMIT', 'RERUN') and (old.status is null or old.status not in ('RESUBMIT', 'RERUN')
                                                   or old.locktype is not 'OUT' or new.jobid is not old.jobid
                                                   or new.dataid is not old.dataid))
         or (new.status = 'PENDING' and old.status <> 'PENDING'))
begin
    insert into sent_back values (new.jobid, new.dataid, new.status <> 'PENDING');
end;

drop trigger if exists datastatus_inserted_back;
create trigger datastatus_inserted_back after insert on datastatus
when (select act from dataflow_context) = '' and new.locktype = 'OUT' and new.status in ('RESUBMIT', 'RERUN')
begin
    insert into sent_back values (new.jobid, new.dataid, true);
end;

drop trigger if exists datastatus_taken_away;
create trigger datastatus_taken_away after delete on datastatus
when (select act from dataflow_context) = '' and old.locktype = 'OUT' and old.status = 'RUNNING'
begin
    insert into sent_back values (old.jobid, old.dataid, false);
end;

-- A change by hand seldom names the columns that tell when, and of which generation.
drop trigger if exists datastatus_refreshed;
create trigger datastatus_refreshed after update of status on datastatus
when (select act from dataflow_context) = '' and new.status is not old.status
begin
    update datastatus
    set modified = case when new.modified is not old.modified then new.modified
                        else strftime('%Y-%m-%d %H:%M:%f', 'now') end,
        generation = case when new.status in ('RESUBMIT', 'RERUN', 'PENDING') then null
                          else new.generation end
    where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid;
end;

drop trigger if exists job_inserted;
create trigger job_inserted after insert on job
when new.itemtype in ('IN', 'OUT') and new.jobid is not null
begin
    insert into rebuild (jobid) values (new.jobid);
end;

drop trigger if exists job_deleted;
create trigger job_deleted after delete on job
when old.itemtype in ('IN', 'OUT') and old.jobid is not null
begin
    insert into rebuild (jobid) values (old.jobid);
end;

drop trigger if exists job_updated;
create trigger job_updated after update on job
when old.itemtype in ('IN', 'OUT') or new.itemtype in ('IN', 'OUT')
begin
    insert into rebuild (jobid) select old.jobid where old.jobid is not null;
    insert into rebuild (jobid) select new.jobid where new.jobid is not null and new.jobid is not old.jobid;
end;
