-- What happens when rows of the tables change: the same behaviour as on PostgreSQL, by row triggers.
-- All consequences follow from dataevent: what history records is what is judged. Idempotent: every
-- `odf init` runs it.

drop view if exists judge;
drop view if exists rebuild;
drop view if exists claim_row;
drop view if exists changed_input;
drop view if exists versioned_dataset;
drop view if exists stale_chunk;

-- Datasets whose place keeps a version of a chunk for its readers, because a publish writes another version: see
-- spark/object_store.py. `is_remote` in opendataflow_dagster/location.py says which places these are.
create view versioned_dataset as
select datasetid from (
    select datasetid, coalesce(nullif(hostname, ''), database) as place from dataset
    where coalesce(format, '') not in ('delta', 'iceberg')) as d
where
    place glob 'remote+*' or place glob 's3a://*' or place glob 's3://*' or place glob 's3n://*'
        or place glob 'gs://*' or place glob 'abfss://*' or place glob 'abfs://*' or place glob 'wasbs://*'
        or place glob 'wasb://*' or place glob 'adl://*' or place glob 'oss://*' or place glob 'cosn://*'
        or place glob 'obs://*' or place glob 'hdfs://*' or place glob 'webhdfs://*' or place glob 'viewfs://*';

-- Every row that matters to a chunk of a job, and what it means for a claim: the rule of opendataflow_dagster/model.py.
-- An IN row locks the chunk only while its job is working on it: the Java program leaves its IN rows behind.
create view claim_row as
select i.jobid, s.dataid, i.itemtype, i.datasetid, s.jobid is i.jobid as own, s.locktype, s.generation,
    case
        when i.itemtype = 'OUT' and s.locktype is 'OUT' then case
            when s.status = 'PENDING' then 'free'
            when s.status in ('RESUBMIT', 'RERUN') then case when s.jobid is i.jobid then 'again' else 'free' end
            when s.status = 'RUNNING' then 'LOCKED'
            when s.status = 'READY' then 'ALREADY_DONE'
            else 'HELD' end
        when i.itemtype = 'IN' and s.locktype is 'OUT' and s.jobid is not i.jobid then case
            when s.status = 'READY' then 'available'
            when s.status = 'RUNNING' then 'DATA_NOT_READY'
            else 'missing' end
        when s.jobid is not i.jobid then case
            when i.itemtype = 'OUT' and s.locktype is 'IN' and s.status is 'RUNNING' and exists (
                select 1 from datastatus o
                where o.dataid = s.dataid and o.jobid = s.jobid and o.locktype = 'OUT' and o.status = 'RUNNING')
                and not exists (select 1 from versioned_dataset v where v.datasetid = s.datasetid)
            then 'LOCKED' else 'free' end
        when i.itemtype = 'IN' and s.locktype is 'IN' then case
            when s.status in ('FAILED', 'ERROR', 'RESUBMIT', 'RERUN') then 'free'
            when s.status = 'DONE' then 'consumed'
            when s.status = 'RUNNING' then 'LOCKED'
            else 'HELD' end
        -- a lock of another type, from when the job was another one, has the key of the claim's row
        when s.status in ('RESUBMIT', 'RERUN') or (i.itemtype = 'OUT' and s.status is 'PENDING') then 'free'
        else 'LOCKED'
    end as effect
from job i join datastatus s on s.datasetid = i.datasetid
where i.itemtype in ('IN', 'OUT') and i.datasetid <> 'today';

-- Inputs that changed since a job locked them: they were published again with different data (or without a
-- fingerprint to compare), or they are being produced again now. Except those whose place keeps the version
-- that is being read.
create view changed_input as
select s.jobid, s.dataid, s.datasetid,
       case when exists (
           select 1 from datastatus o
           where o.dataid = s.dataid and o.datasetid = s.datasetid and o.locktype = 'OUT' and o.status = 'RUNNING')
       then 'is being made again' else 'was made again' end as how
from datastatus s
where s.locktype = 'IN' and s.status = 'RUNNING' and case when
    exists (
        select 1 from datastatus o
        where o.dataid = s.dataid and o.datasetid = s.datasetid and o.locktype = 'OUT' and o.status = 'RUNNING')
    or exists (
        select 1 from chunkfact f
        where f.datasetid = s.datasetid and f.dataid = s.dataid
          and f.generation > coalesce(s.generation, (
              select c.generation from claim c where c.jobid = s.jobid and c.dataid = s.dataid))
          and (f.fingerprint = (
              select b.fingerprint from chunkfact b
              where b.datasetid = s.datasetid and b.dataid = s.dataid and b.generation = s.generation)) is not true)
    then not exists (select 1 from versioned_dataset v where v.datasetid = s.datasetid) else false end;

-- Stale outputs: READY, but produced from an input that was published again since, with different data or without a
-- fingerprint to compare.
-- The cross joins keep the order: outputs of one job and dataset by the primary key, and the input of each.
create view stale_chunk as
select distinct o.jobid, o.datasetid, o.dataid
from job j
    join job w on w.jobid = j.jobid and w.itemtype = 'OUT'
    cross join datastatus o on o.jobid = w.jobid and o.datasetid = w.datasetid and o.locktype = 'OUT' and o.status = 'READY'
    cross join datastatus i on i.dataid = o.dataid and i.datasetid = j.datasetid and i.locktype = 'OUT' and i.status = 'READY'
        and i.generation > o.generation and i.jobid <> o.jobid
where j.itemtype = 'IN' and j.datasetid <> 'today' and ((
    select new.fingerprint from chunkfact new
    where new.datasetid = i.datasetid and new.dataid = i.dataid and new.generation = i.generation) = (
    select read.fingerprint from chunkfact made join chunkfact read
        on read.datasetid = i.datasetid and read.dataid = made.dataid
        and read.generation = cast(made.inputs ->> i.datasetid as integer)
    where made.datasetid = o.datasetid and made.dataid = o.dataid and made.generation = o.generation)) is not true;

-- "insert into judge" decides again whether a (job, dataid) pair may be claimed.
create view judge as select null as jobid, null as dataid where false;
-- It deletes first, since a pair that may not be claimed any more must leave the queue. SQLite has one writer at a time,
-- so nobody sees the queue in between.
create trigger judge_pair instead of insert on judge begin
    delete from pending where jobid = new.jobid and dataid = new.dataid;
    insert into pending (jobid, dataid, rank)
    select new.jobid, new.dataid, 1 - c.again
    from (select coalesce(max(effect = 'again'), 0) as again,
                 coalesce(max(effect = 'consumed'), 0) as consumed,
                 coalesce(max(effect in ('LOCKED', 'HELD', 'ALREADY_DONE', 'DATA_NOT_READY')), 0) as blocked,
                 coalesce(max(own and itemtype = 'OUT' and locktype is 'OUT'), 0) as own,
                 count(distinct case when effect = 'available' then datasetid end) as available
          -- the limit keeps the rule from being compiled once for each of these columns
          from (select * from claim_row where jobid = new.jobid and dataid = new.dataid limit -1)) as c
    where new.dataid <> ''
      -- no row blocks it; a consumed input does, unless the chunk is to be produced again
      and not c.blocked and c.again >= c.consumed
      -- every input is available
      and c.available = (select count(distinct datasetid) from job
                         where jobid = new.jobid and itemtype = 'IN' and datasetid <> 'today')
      -- something says that the chunk exists: an input, or a row of the job's own
      and (c.own or exists (select 1 from job where jobid = new.jobid and itemtype = 'IN'))
      -- the job writes something, and nothing that it also reads
      and exists (select 1 from job where jobid = new.jobid and itemtype = 'OUT')
      and not exists (
          select 1 from job i join job o on o.jobid = i.jobid and o.datasetid = i.datasetid
          where i.jobid = new.jobid and i.itemtype = 'IN' and o.itemtype = 'OUT');
end;

-- "insert into rebuild" queues a job to be judged again. The first chunks are judged at once, so that a small job is
-- claimable, whichever program registers it. A large job's pending rows stay, and are judged when they are
-- claimed: nobody waits while they are deleted and computed again.
create view rebuild as select null as jobid where false;
create trigger rebuild_job instead of insert on rebuild begin
    insert into fill (jobid) values (new.jobid)
    on conflict (jobid) do update set datasetid = '', producer = '', dataid = '';
    delete from pending
    where jobid = new.jobid and not exists (select 1 from pending where jobid = new.jobid limit 1 offset 500);
    insert into judge (jobid, dataid)
    select distinct new.jobid, r.dataid from (select * from claim_row where jobid = new.jobid limit 5000) r
    where r.dataid <> '' and r.locktype = 'OUT'
      and (r.effect = 'available' or (r.itemtype = 'OUT' and r.own and r.effect in ('free', 'again')))
    limit 500;
    delete from fill
    where jobid = new.jobid
      and not exists (select 1 from pending where jobid = new.jobid limit 1 offset 500)
      and not exists (select 1 from claim_row where jobid = new.jobid limit 1 offset 5000)
      and 500 > (
        select count(*) from (
            select distinct r.dataid from claim_row r
            where r.jobid = new.jobid and r.dataid <> '' and r.locktype = 'OUT'
              and (r.effect = 'available' or (r.itemtype = 'OUT' and r.own and r.effect in ('free', 'again')))
            limit 500));
end;

-- While its job is queued, a claim takes only chunks that may still be claimed: earlier pending rows may be outdated.
drop trigger if exists claim_of_queued;
create trigger claim_of_queued before insert on claim
when (select act from dataflow_context) = 'claim' and exists (select 1 from fill where jobid = new.jobid)
begin
    insert into judge (jobid, dataid) values (new.jobid, new.dataid);
    select raise(ignore)
    where not exists (select 1 from pending where jobid = new.jobid and dataid = new.dataid);
end;

drop trigger if exists event_for_readers;
create trigger event_for_readers after insert on dataevent
when new.locktype = 'OUT'
    and ((new.status_before is 'READY') <> (new.status_after is 'READY')
         or ((new.status_before is 'RUNNING' or new.status_after is 'RUNNING')
             and (select act from dataflow_context) <> 'claim'))
    and exists (select 1 from job where datasetid = new.datasetid and itemtype = 'IN')
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job where datasetid = new.datasetid and itemtype = 'IN';
end;

drop trigger if exists event_for_producers;
create trigger event_for_producers after insert on dataevent
when new.locktype = 'OUT'
    and not (coalesce(new.status_before, '') in ('RUNNING', 'READY', 'FAILED')
             and coalesce(new.status_after, '') in ('RUNNING', 'READY', 'FAILED'))
    and exists (
        select 1 from job where datasetid = new.datasetid and itemtype = 'OUT'
          and not (jobid is new.jobid and (select act from dataflow_context) = 'claim'))
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job
    where datasetid = new.datasetid and itemtype = 'OUT'
      and not (jobid is new.jobid and (select act from dataflow_context) = 'claim');
end;

-- A claim's own job needs no judging: its chunk leaves the queue.
drop trigger if exists event_of_claim;
create trigger event_of_claim after insert on dataevent
when new.locktype = 'OUT' and coalesce(new.status_before, '') not in ('RUNNING', 'READY', 'FAILED')
    and (select act from dataflow_context) = 'claim'
begin
    delete from pending where jobid = new.jobid and dataid = new.dataid;
end;

-- A reader locks its chunk: when it ends, the chunk's producers may claim it, unless it is READY.
drop trigger if exists event_of_reader;
create trigger event_of_reader after insert on dataevent
when new.locktype = 'IN' and (new.status_before is 'RUNNING' or new.status_after is 'RUNNING')
    and (select act from dataflow_context) <> 'claim'
    and not exists (
        select 1 from datastatus s
        where s.dataid = new.dataid and s.datasetid = new.datasetid and s.locktype = 'OUT' and s.status = 'READY')
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job
    where datasetid = new.datasetid and itemtype = 'OUT' and jobid is not new.jobid;
end;

drop trigger if exists event_of_foreign_reader;
create trigger event_of_foreign_reader after insert on dataevent
when new.locktype = 'OUT' and (new.status_before is 'RUNNING' or new.status_after is 'RUNNING')
    and (select act from dataflow_context) = ''
begin
    insert into judge (jobid, dataid)
    select distinct j.jobid, new.dataid from datastatus i join job j on j.datasetid = i.datasetid
    where i.dataid = new.dataid and i.jobid = new.jobid and i.locktype = 'IN' and i.status = 'RUNNING'
      and j.itemtype = 'OUT' and j.jobid is not new.jobid;
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

-- What others declare READY (the Java program, a person) gets a generation, so that it differs from what was
-- there before. A chunk that was held and is released keeps the generation that it was published with; `outdated`
-- says that the row has the generation of an older claim.
drop view if exists numbered;
create view numbered as
select null as datasetid, null as jobid, null as dataid, null as locktype, null as status, null as outdated where false;
create trigger numbered_ready instead of insert on numbered
when new.locktype = 'OUT' and new.status = 'READY' and (select act from dataflow_context) = ''
begin
    update datastatus set generation = null
    where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid and new.outdated;
    update generation set last = last + 1;
    update datastatus set generation = (select last from generation)
    where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid and generation is null;
    insert into chunkfact (datasetid, dataid, generation, jobid)
    select datasetid, dataid, generation, jobid from datastatus
    where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid
    on conflict (datasetid, dataid, generation) do nothing;
    -- Failed attempts are deleted, as by our own `finish`.
    delete from claim where jobid = new.jobid and dataid = new.dataid and owner is null;
end;

-- "insert or replace" fires no delete trigger: history knows the replaced row.
drop view if exists replaced;
create view replaced as select null as datasetid, null as jobid, null as dataid where false;
create trigger replaced_row instead of insert on replaced
when (select act from dataflow_context) = ''
begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why, execution)
    select e.datasetid, e.jobid, e.dataid, e.locktype, e.status_after, e.generation, coalesce(c.who, 'sql'), c.why,
           case when e.status_after = 'RUNNING' then e.execution end
    from dataflow_context c join dataevent e on e.seq = (
        select max(seq) from dataevent
        where dataid = new.dataid and datasetid = new.datasetid and jobid = new.jobid)
    where e.status_after is not null;
end;

-- The triggers of every claim insert by VALUES, into views whose triggers have the condition: for INSERT ... SELECT into
-- something with triggers, SQLite creates a temporary table, which costs more than the insert itself.
drop trigger if exists datastatus_inserted;
create trigger datastatus_inserted after insert on datastatus begin
    insert into replaced values (new.datasetid, new.jobid, new.dataid);
    insert into numbered values (new.datasetid, new.jobid, new.dataid, new.locktype, new.status, false);
    insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why, execution)
    values (new.datasetid, new.jobid, new.dataid, new.locktype, new.status,
            case when new.locktype = 'OUT' and (select act from dataflow_context) = '' then (
                select generation from datastatus
                where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid)
            else new.generation end,
            coalesce((select who from dataflow_context), 'sql'), (select why from dataflow_context),
            case when new.locktype = 'OUT' then coalesce((select execution from dataflow_context),
                coalesce((select who from dataflow_context), 'sql') || ':' || (strftime('%s', 'now') / 10)) end);
end;

drop trigger if exists datastatus_deleted;
create trigger datastatus_deleted after delete on datastatus
when (select act from dataflow_context) <> 'fold'
begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why, execution)
    values (old.datasetid, old.jobid, old.dataid, old.locktype, old.status, old.generation,
            coalesce((select who from dataflow_context), 'sql'), (select why from dataflow_context),
            case when old.locktype = 'OUT' then coalesce((select execution from dataflow_context),
                case when old.status = 'RUNNING' then (
                    select execution from dataevent
                    where dataid = old.dataid and datasetid = old.datasetid and jobid = old.jobid
                      and locktype = 'OUT' and status_after = 'RUNNING' order by seq desc limit 1) end,
                coalesce((select who from dataflow_context), 'sql') || ':' || (strftime('%s', 'now') / 10)) end);
end;

-- A folded item's history is deleted with it.
drop trigger if exists datastatus_folded;
create trigger datastatus_folded after delete on datastatus
when (select act from dataflow_context) = 'fold'
begin
    delete from dataevent where dataid = old.dataid and datasetid = old.datasetid;
end;

drop trigger if exists datastatus_updated;
create trigger datastatus_updated after update on datastatus
when new.status is not old.status and new.datasetid is old.datasetid and new.jobid is old.jobid
    and new.dataid is old.dataid and new.locktype is old.locktype
begin
    -- a generation that this change didn't set is an older claim's, unless the chunk was held and is released
    insert into numbered values (
        new.datasetid, new.jobid, new.dataid, new.locktype, new.status,
        case when new.generation is old.generation and (select act from dataflow_context) = '' then
            old.status in ('PENDING', 'RUNNING', 'FAILED', 'ERROR', 'RESUBMIT', 'RERUN')
            or not exists (
                select 1 from chunkfact f
                where f.datasetid = new.datasetid and f.dataid = new.dataid and f.generation = new.generation)
        end);
    insert into dataevent
        (datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why, execution)
    values (new.datasetid, new.jobid, new.dataid, new.locktype, old.status, new.status,
            case when new.locktype = 'OUT' and new.status = 'READY' and (select act from dataflow_context) = '' then (
                select generation from datastatus
                where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid)
            else coalesce(new.generation, old.generation) end,
            coalesce((select who from dataflow_context), 'sql'), (select why from dataflow_context),
            case when old.locktype = 'OUT' then coalesce((select execution from dataflow_context),
                case when old.status = 'RUNNING' then (
                    select execution from dataevent
                    where dataid = old.dataid and datasetid = old.datasetid and jobid = old.jobid
                      and locktype = 'OUT' and status_after = 'RUNNING' order by seq desc limit 1) end,
                coalesce((select who from dataflow_context), 'sql') || ':' || (strftime('%s', 'now') / 10)) end);
end;

-- A row that changes its key or its locktype is logged as one lock removed and another added.
drop trigger if exists datastatus_rekeyed;
create trigger datastatus_rekeyed after update on datastatus
when new.datasetid is not old.datasetid or new.jobid is not old.jobid
    or new.dataid is not old.dataid or new.locktype is not old.locktype
begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why, execution)
    select old.datasetid, old.jobid, old.dataid, old.locktype, old.status, old.generation,
           coalesce(who, 'sql'), why,
           case when old.locktype = 'OUT' then coalesce((select execution from dataflow_context),
                case when old.status = 'RUNNING' then (
                    select execution from dataevent
                    where dataid = old.dataid and datasetid = old.datasetid and jobid = old.jobid
                      and locktype = 'OUT' and status_after = 'RUNNING' order by seq desc limit 1) end,
                coalesce((select who from dataflow_context), 'sql') || ':' || (strftime('%s', 'now') / 10)) end
    from dataflow_context;
    insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why, execution)
    select new.datasetid, new.jobid, new.dataid, new.locktype, new.status, new.generation,
           coalesce(who, 'sql'), why,
           case when new.locktype = 'OUT' then coalesce((select execution from dataflow_context),
                coalesce((select who from dataflow_context), 'sql') || ':' || (strftime('%s', 'now') / 10)) end
    from dataflow_context;
    insert into sent_back select old.jobid, old.dataid, false from dataflow_context
    where act = '' and old.locktype = 'OUT' and old.status = 'RUNNING';
end;

-- What follows when a person, not we, resubmits or deletes a chunk: a worker that still runs it loses
-- its claim and its locks, and the job's other outputs are produced again with it.
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

-- A change by hand rarely sets the columns for time and generation.
drop trigger if exists datastatus_refreshed;
create trigger datastatus_refreshed after update of status on datastatus
when (select act from dataflow_context) = '' and new.status is not old.status
begin
    update datastatus
    set modified = case when new.modified is not old.modified then new.modified
                        else strftime('%Y-%m-%d %H:%M:%f', 'now') end,
        generation = case when new.status in ('RESUBMIT', 'RERUN', 'PENDING') then null else generation end
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

-- What is registered now, in the form that history keeps: a digest instead of a password, computed with functions that
-- SQLite has in every writer. The digest is last, and the columns are in the order of their lists in
-- opendataflow_dagster/model.py: history compares these texts, and another order would be a change of every row.
drop view if exists unrecorded;
drop view if exists registered;
create view registered as
select 'dataset' as tablename, null as jobid, datasetid, null as itemtype, json_patch(
    json_patch('{}', json_remove(
        json_object({each column of dataset: 'column', cast(column as text)}), '$.encryptedpass')),
    json_object('encryptedpass', case when encryptedpass <> '' then 'digest ' || (
        select printf('%08x', sum(
            unicode(substr(encryptedpass, key + 1, 1)) * ((key + 1) * 2654435761 % 4294967291) % 4294967291) % 4294967291)
        from json_each('[0' || replace(hex(zeroblob(length(encryptedpass) - 1)), '00', ',0') || ']')) end)) as content
from dataset
union all
select 'job', jobid, datasetid, itemtype, json_patch('{}', json_object('itemvalue', cast(itemvalue as text))) from job
union all
select 'jobpolicy', jobid, null, null, json_patch('{}', json_object({each dial: 'dial', cast(dial as text)}))
from jobpolicy;

-- Which registrations history doesn't know yet: added (n > 0) or removed.
create view unrecorded as
select tablename, jobid, datasetid, itemtype, content, sum(n) as n
from (
    select tablename, jobid, datasetid, itemtype, content, 1 as n from registered
    union all
    select tablename, jobid, datasetid, itemtype, content, -n from registration) as known
group by tablename, jobid, datasetid, itemtype, content
having sum(n) <> 0;

-- The triggers read the rows of one dataset or job, not `unrecorded`, for which all rows are read.
drop view if exists record_dataset;
create view record_dataset as select null as datasetid where false;
create trigger recorded_dataset instead of insert on record_dataset begin
    insert into registration (tablename, datasetid, n, content, who, why)
    select u.tablename, u.datasetid, u.n, u.content, coalesce(c.who, 'sql'), c.why
    from dataflow_context c, (
        select tablename, jobid, datasetid, itemtype, content, sum(n) as n from (
            select tablename, jobid, datasetid, itemtype, content, 1 as n from registered
            where tablename = 'dataset' and datasetid = new.datasetid
            union all
            select tablename, jobid, datasetid, itemtype, content, -n from registration
            where tablename = 'dataset' and datasetid = new.datasetid)
        group by tablename, jobid, datasetid, itemtype, content having sum(n) <> 0) as u
    order by u.n;
end;

drop view if exists record_job;
create view record_job as select null as jobid where false;
create trigger recorded_job instead of insert on record_job begin
    insert into registration (tablename, jobid, datasetid, itemtype, n, content, who, why)
    select u.tablename, u.jobid, u.datasetid, u.itemtype, u.n, u.content, coalesce(c.who, 'sql'), c.why
    from dataflow_context c, (
        select tablename, jobid, datasetid, itemtype, content, sum(n) as n from (
            select tablename, jobid, datasetid, itemtype, content, 1 as n from registered
            where tablename <> 'dataset' and jobid = new.jobid
            union all
            select tablename, jobid, datasetid, itemtype, content, -n from registration
            where tablename <> 'dataset' and jobid = new.jobid)
        group by tablename, jobid, datasetid, itemtype, content having sum(n) <> 0) as u
    order by u.n;
end;

drop trigger if exists dataset_added;
create trigger dataset_added after insert on dataset begin
    insert into record_dataset values (new.datasetid);
end;

drop trigger if exists dataset_changed;
create trigger dataset_changed after update on dataset begin
    insert into record_dataset values (old.datasetid);
    insert into record_dataset select new.datasetid where new.datasetid is not old.datasetid;
end;

drop trigger if exists dataset_removed;
create trigger dataset_removed after delete on dataset begin
    insert into record_dataset values (old.datasetid);
end;

drop trigger if exists job_added;
create trigger job_added after insert on job begin
    insert into record_job values (new.jobid);
end;

drop trigger if exists job_changed;
create trigger job_changed after update on job begin
    insert into record_job values (old.jobid);
    insert into record_job select new.jobid where new.jobid is not old.jobid;
end;

drop trigger if exists job_removed;
create trigger job_removed after delete on job begin
    insert into record_job values (old.jobid);
end;

drop trigger if exists jobpolicy_added;
create trigger jobpolicy_added after insert on jobpolicy begin
    insert into record_job values (new.jobid);
end;

drop trigger if exists jobpolicy_changed;
create trigger jobpolicy_changed after update on jobpolicy begin
    insert into record_job values (old.jobid);
    insert into record_job select new.jobid where new.jobid is not old.jobid;
end;

drop trigger if exists jobpolicy_removed;
create trigger jobpolicy_removed after delete on jobpolicy begin
    insert into record_job values (old.jobid);
end;
