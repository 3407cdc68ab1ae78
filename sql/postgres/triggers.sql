-- What happens when rows of the tables change: history, and who may claim now. Idempotent: every `odf init`
-- runs it. Run with search_path set to the schema of the tables.

-- Lock what claims and finishes lock, in the same order: later transactions wait for these locks first, and hold none
-- that are needed below.
lock table job in share row exclusive mode;
lock table fill in access exclusive mode;
lock table claim, pending in share row exclusive mode;

-- A sort key that puts 2 before 10: each run of digits is preceded by its length.
create or replace function naturalkey(dataid text) returns text
language sql immutable strict parallel safe as $$
    select string_agg(
        case when part ~ '^[0-9]'
             then lpad(length(ltrim(part, '0'))::text, 3, '0') || ltrim(part, '0')
             else part end, '' order by n)
    from (select m[1] as part, n
          from regexp_matches(dataid, '[0-9]+|[^0-9]+', 'g') with ordinality as r(m, n)) as parts
$$;

-- Undo a claim that found a row it needed changed by somebody else.
drop function if exists lost_race();
create function lost_race() returns boolean language plpgsql as $$
begin
    raise exception 'a row of this claim changed under it' using errcode = 'ODF01';
end $$;

-- What one row of datastatus means for a job whose input (IN) or output (OUT) is its dataset; `own` says whether
-- it is the job's own row. This is the rule of opendataflow_dagster/model.py. The function has no settings, so that
-- the planner inlines it into the statements that use it.
create or replace function claim_effect(itemtype text, own boolean, locktype text, word text) returns text
language sql immutable parallel safe as $$
    select case
        when itemtype = 'OUT' and locktype = 'OUT' then case
            when word = 'PENDING' then 'free'
            when word in ('RESUBMIT', 'RERUN') then case when own then 'again' else 'free' end
            when word = 'RUNNING' then 'LOCKED'
            when word = 'READY' then 'ALREADY_DONE'
            else 'HELD' end
        when itemtype = 'IN' and locktype = 'OUT' and not own then case
            when word = 'READY' then 'available'
            when word = 'RUNNING' then 'DATA_NOT_READY'
            else 'missing' end
        when not own and itemtype = 'OUT' and locktype = 'IN' and word = 'RUNNING' then 'read'
        when not own then 'free'
        when itemtype = 'IN' and locktype = 'IN' then case
            when word in ('FAILED', 'ERROR', 'RESUBMIT', 'RERUN') then 'free'
            when word = 'DONE' then 'consumed'
            when word = 'RUNNING' then 'LOCKED'
            else 'HELD' end
        -- a lock of another type, from when the job was another one, has the key of the claim's row
        when word in ('RESUBMIT', 'RERUN') or (itemtype = 'OUT' and word = 'PENDING') then 'free'
        else 'LOCKED'
    end
$$;

-- Datasets whose place keeps a version of a chunk for its readers, because a publish writes another version: see
-- spark/object_store.py. `is_remote` in opendataflow_dagster/location.py says which places these are.
create or replace view versioned_dataset as
select datasetid from (
    select datasetid, coalesce(nullif(hostname, ''), database) as place from dataset
    where coalesce(format, '') not in ('delta', 'iceberg')) as d
where
    place like 'remote+%' or place like 's3a://%' or place like 's3://%' or place like 's3n://%'
        or place like 'gs://%' or place like 'abfss://%' or place like 'abfs://%' or place like 'wasbs://%'
        or place like 'wasb://%' or place like 'adl://%' or place like 'oss://%' or place like 'cosn://%'
        or place like 'obs://%' or place like 'hdfs://%' or place like 'webhdfs://%' or place like 'viewfs://%';

-- Every row that matters to a chunk of a job, and what it means for a claim. An IN row locks the chunk only
-- while its job is working on it: the Java program leaves its IN rows behind.
create or replace view claim_row as
select cast(i.jobid as text) as jobid, cast(s.dataid as text) as dataid, cast(i.itemtype as text) as itemtype,
       cast(i.datasetid as text) as datasetid, s.jobid = i.jobid as own, cast(s.locktype as text) as locktype,
       s.generation,
       coalesce(nullif(claim_effect(i.itemtype, s.jobid = i.jobid, s.locktype, s.status), 'read'),
                case when exists (
                    select 1 from datastatus o
                    where o.dataid = s.dataid and o.jobid = s.jobid and o.locktype = 'OUT' and o.status = 'RUNNING')
                    and not exists (select 1 from versioned_dataset v where v.datasetid = s.datasetid)
                then 'LOCKED' else 'free' end) as effect
from job i join datastatus s on s.datasetid = i.datasetid
where i.itemtype in ('IN', 'OUT') and i.datasetid <> 'today';

-- Inputs that changed since a job locked them: they were published again with different data (or without a
-- fingerprint to compare), or they are being produced again now. Except those whose place keeps the version
-- that is being read.
create or replace view changed_input as
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
-- `offset 0` keeps the join separate: with the fingerprints in its condition, it would not run in parallel.
create or replace view stale_chunk as
select distinct c.jobid, c.datasetid, c.dataid
from (
    select o.jobid, o.datasetid, o.dataid, o.generation, i.datasetid as input, i.generation as newer
    from (
        select distinct w.jobid, w.datasetid, j.datasetid as input
        from job j join job w on w.jobid = j.jobid and w.itemtype = 'OUT'
        where j.itemtype = 'IN' and j.datasetid <> 'today') as flow
        join datastatus o on o.jobid = flow.jobid and o.datasetid = flow.datasetid
            and o.locktype = 'OUT' and o.status = 'READY'
        join datastatus i on i.dataid = o.dataid and i.datasetid = flow.input and i.locktype = 'OUT' and i.status = 'READY'
            and i.generation > o.generation and i.jobid <> o.jobid
    offset 0) as c
where ((
    select new.fingerprint from chunkfact new
    where new.datasetid = c.input and new.dataid = c.dataid and new.generation = c.newer) = (
    select read.fingerprint from chunkfact made join chunkfact read
        on read.datasetid = c.input and read.dataid = made.dataid
        and read.generation = cast(cast(made.inputs as json) ->> c.input as bigint)
    where made.datasetid = c.datasetid and made.dataid = c.dataid and made.generation = c.generation)) is not true;

-- Tell those who listen that chunks can be claimed, at most 20 times a second: PostgreSQL lets only one transaction that
-- has a notice commit at a time. Listeners hold the lock, shared, as long as their connections last; without a listener,
-- this is two calls that touch no table. Skipped notices delay a listener by at most 1/20 s, since it checks again
-- that long after each notice.
create or replace function send_notice() returns void
language plpgsql
set search_path from current
as $$
declare
    listeners bigint := hashtextextended(current_schema(), 79644);
    deciding bigint := hashtextextended(current_schema(), 79645);
    moment bigint := floor(extract(epoch from clock_timestamp()) * 20);
begin
    if pg_try_advisory_lock(listeners) then
        perform pg_advisory_unlock(listeners);
    elsif pg_try_advisory_lock(deciding) then
        if (select last_value from last_notice) < moment then
            perform setval('last_notice', moment);
            perform pg_notify('odf_claimable', current_schema());
        end if;
        perform pg_advisory_unlock(deciding);
    end if;
end $$;

-- Decide again whether each (job, dataid) pair may be claimed. The pending row is written first: as a lock,
-- it makes two judges of one pair take turns, and the second statement sees what the first judge
-- committed.
create or replace function judge(jobids text[], dataids text[]) returns void
language plpgsql security definer
set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
    insert into pending (jobid, dataid, rank, sortkey)
    select k.jobid, k.dataid,
           case when exists (
               select 1 from claim_row r
               where r.jobid = k.jobid and r.dataid = k.dataid and r.effect = 'again') then 0 else 1 end,
           naturalkey(k.dataid)
    from (select distinct jobid, dataid from unnest(jobids, dataids) as u(jobid, dataid)
          where jobid is not null and dataid <> '') as k
    order by k.jobid, k.dataid
    on conflict (jobid, dataid) do update set rank = excluded.rank where pending.rank <> excluded.rank;

    delete from pending p
    using (select distinct jobid, dataid from unnest(jobids, dataids) as u(jobid, dataid)) as k
    where p.jobid = k.jobid and p.dataid = k.dataid and not (
        -- the job writes something, and nothing that it also reads
        exists (select 1 from job o where o.jobid = k.jobid and o.itemtype = 'OUT')
        and not exists (
            select 1 from job i join job o on o.jobid = i.jobid and o.datasetid = i.datasetid
            where i.jobid = k.jobid and i.itemtype = 'IN' and o.itemtype = 'OUT')
        -- no row blocks it; a consumed input does, unless the chunk is to be produced again
        and not exists (
            select 1 from claim_row r
            where r.jobid = k.jobid and r.dataid = k.dataid
              and (r.effect in ('LOCKED', 'HELD', 'ALREADY_DONE', 'DATA_NOT_READY')
                   or (r.effect = 'consumed' and p.rank = 1)))
        -- every input is available
        and not exists (
            select 1 from job i
            where i.jobid = k.jobid and i.itemtype = 'IN' and i.datasetid <> 'today'
              and not exists (
                  select 1 from claim_row r
                  where r.jobid = k.jobid and r.dataid = k.dataid and r.datasetid = i.datasetid
                    and r.effect = 'available'))
        -- something says that the chunk exists: an input, or a row of the job's own
        and (exists (select 1 from job i where i.jobid = k.jobid and i.itemtype = 'IN')
             or exists (
                 select 1 from claim_row r
                 where r.jobid = k.jobid and r.dataid = k.dataid
                   and r.own and r.itemtype = 'OUT' and r.locktype = 'OUT')));

    if exists (
        select 1 from unnest(jobids, dataids) as k(jobid, dataid)
            join pending p on p.jobid = k.jobid and p.dataid = k.dataid)
    then
        perform send_notice();
    end if;
end $$;

-- Judge up to `most` chunks that a job could know of, from where the last batch ended: pending ones first, then the
-- chunks of one of its inputs, or else of its outputs. Returns where it ended, or null after the last one. A chunk that
-- isn't pending and can't be claimed now needs no judging: the change that makes it claimable judges it.
create or replace function fill_batch(item fill, most integer) returns fill
language plpgsql security definer
set search_path from current
set enable_seqscan = off set enable_sort = off
as $$
declare
    input text := (
        select min(datasetid) from job where jobid = item.jobid and itemtype = 'IN' and datasetid <> 'today');
    room integer := most;
    producers text[];
    chunk_ids text[];
    wanted text[];
    found_here integer;
begin
    loop
        if item.datasetid = '' then
            select array_agg(dataid) into chunk_ids from (
                select dataid from pending where jobid = item.jobid and dataid > item.dataid
                order by dataid limit room) as waiting;
            producers := null;
            wanted := chunk_ids;
        else
            select array_agg(jobid), array_agg(dataid), array_agg(dataid) filter (where to_judge)
            into producers, chunk_ids, wanted from (
                select s.jobid, s.dataid, s.locktype = 'OUT' and s.dataid <> ''
                    and case when input is null then s.status in ('PENDING', 'RESUBMIT', 'RERUN')
                             else s.status = 'READY' and s.jobid <> item.jobid end
                    and not exists (select 1 from pending p where p.jobid = item.jobid and p.dataid = s.dataid)
                    and not exists (
                        select 1 from job o join datastatus made
                            on made.datasetid = o.datasetid and made.jobid = item.jobid and made.dataid = s.dataid
                        where o.jobid = item.jobid and o.itemtype = 'OUT'
                          and made.locktype = 'OUT' and made.status = 'READY') as to_judge
                from datastatus s
                where s.datasetid = item.datasetid and (s.jobid, s.dataid) > (item.producer, item.dataid)
                  and (input is not null or s.jobid = item.jobid)
                order by s.jobid, s.dataid limit room) as known;
        end if;
        if wanted is not null then
            perform judge(array_fill(item.jobid, array[cardinality(wanted)]), wanted);
        end if;
        found_here := coalesce(cardinality(chunk_ids), 0);
        if found_here = room then
            item.producer := coalesce(producers[found_here], '');
            item.dataid := chunk_ids[found_here];
            return item;
        end if;
        room := room - found_here;
        item.datasetid := case
            when input is null then (
                select min(datasetid) from job
                where jobid = item.jobid and itemtype = 'OUT' and datasetid > item.datasetid)
            when item.datasetid = '' then input end;
        if item.datasetid is null then
            return null;
        end if;
        item.producer := case when input is null then item.jobid else '' end;
        item.dataid := '';
    end loop;
end $$;

-- Judge the next chunks of a queued job; returns how many rows were read, at least 1 at its end. Does nothing while
-- another session does this, or while transactions are open that were writing chunks when the job was queued: after
-- them, everybody who writes chunks knows the job. It soon gives up on a chunk that somebody keeps locked.
create or replace function fill_next(queued text, most integer) returns integer
language plpgsql security definer
set search_path from current
as $$
declare
    item fill;
    after fill;
    writing text[];
begin
    perform set_config('lock_timeout', '200ms', true);
    select * into item from fill f where f.jobid = queued for update skip locked;
    if not found then
        return 0;
    end if;
    if item.writers is null or item.writers <> '{}' then
        select coalesce(array_agg(distinct l.virtualtransaction), '{}') into writing from pg_locks l
        where l.locktype = 'relation' and l.relation = cast('datastatus' as regclass) and l.granted
          and l.database = (select oid from pg_database where datname = current_database())
          and l.mode in ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
          and l.pid is distinct from pg_backend_pid()
          and (item.writers is null or l.virtualtransaction = any(item.writers));
        update fill set writers = writing where jobid = queued;
        if writing <> '{}' then
            return 0;
        end if;
    end if;
    after := fill_batch(item, most);
    if after.jobid is null then
        delete from fill where jobid = queued;
        return 1;
    end if;
    update fill set datasetid = after.datasetid, producer = after.producer, dataid = after.dataid
    where jobid = queued;
    return most;
end $$;

-- Judge the first chunks of a registration as it commits, so that a small job is claimable at once, whichever program
-- registers it. The job stays queued, because another transaction may be writing chunks at this moment.
create or replace function fill_queued() returns trigger
language plpgsql security definer
set search_path from current
as $$
begin
    perform set_config('lock_timeout', '200ms', true);
    perform fill_batch(new, 500);
    return null;
exception when lock_not_available or deadlock_detected then
    return null;
end $$;

-- While its job is queued, a claim takes only chunks that may still be claimed: earlier pending rows may be outdated.
create or replace function pending_taken() returns trigger
language plpgsql security definer
set search_path from current
as $$
begin
    if pg_trigger_depth() > 1 or not exists (select 1 from fill where jobid = old.jobid) then
        return old;
    end if;
    perform judge(array[old.jobid], array[old.dataid]);
    if exists (select 1 from pending where jobid = old.jobid and dataid = old.dataid and rank = old.rank) then
        return old;
    end if;
    return null;
end $$;

-- What follows when a person or the Java program, not we, resubmits a chunk: a worker that still runs it
-- loses its claim and its locks, and the job's other outputs are produced again with it.
create or replace function sent_back(jobids text[], dataids text[], again boolean[]) returns void
language plpgsql security definer
set search_path from current
set enable_seqscan = off
as $$
begin
    delete from claim c using unnest(jobids, dataids) as k(jobid, dataid)
    where c.jobid = k.jobid and c.dataid = k.dataid;

    -- Looked up chunk by chunk: on tables that aren't analyzed yet, a join would scan all chunks of the job for each.
    delete from datastatus s
    using unnest(jobids, dataids) as k(jobid, dataid) cross join lateral (
        select d.ctid as place from job i join datastatus d
            on d.datasetid = i.datasetid and d.jobid = k.jobid and d.dataid = k.dataid
        where i.jobid = k.jobid and i.itemtype = 'IN' and d.locktype = 'IN' for update of d) as own
    where s.ctid = own.place;

    update datastatus s set status = 'RESUBMIT', modified = now(), generation = null
    from unnest(jobids, dataids, again) as k(jobid, dataid, again) cross join lateral (
        select d.ctid as place from job o join datastatus d
            on d.datasetid = o.datasetid and d.jobid = k.jobid and d.dataid = k.dataid
        where o.jobid = k.jobid and o.itemtype = 'OUT' and d.locktype = 'OUT'
          and ((k.again and d.status in ('READY', 'FAILED', 'ERROR', 'RUNNING'))
               or (d.status = 'RUNNING' and d.generation is not null))
        for update of d) as own
    where s.ctid = own.place;
end $$;

-- How our own transactions identify themselves: `claim`, `finish`, or nothing for a person's change.
create or replace function act() returns text language sql stable as $$
    select coalesce(current_setting('dataflow.act', true), '')
$$;
create or replace function author() returns text language sql stable as $$
    select coalesce(
        nullif(current_setting('dataflow.who', true), ''),
        session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', ''))
$$;
create or replace function reason() returns text language sql stable as $$
    select nullif(current_setting('dataflow.why', true), '')
$$;
-- Which execution a change of an output belongs to: the one that signs it; or else the one that had the chunk RUNNING,
-- even if another settles it; or else this transaction, with its start in seconds, since another server that the
-- tables are moved to reuses transaction numbers.
create or replace function execution(before text, datasetid text, jobid text, dataid text) returns text
language sql stable as $$
    select coalesce(
        nullif(current_setting('dataflow.execution', true), ''),
        case when before = 'RUNNING' then (
            select e.execution from dataevent e
            where e.dataid = $4 and e.datasetid = $2 and e.jobid = $3 and e.locktype = 'OUT' and e.status_after = 'RUNNING'
            order by e.xid desc, e.seq desc limit 1) end,
        'xid:' || pg_current_xact_id() || ':' || cast(extract(epoch from now()) as bigint))
$$;

-- What others declare READY (the Java program, a person) gets a generation, so that it differs from what was
-- there before. A chunk that was held and is released keeps the generation that it was published with.
create or replace function datastatus_numbered() returns trigger
language plpgsql security definer
set search_path from current
as $$
begin
    if new.generation is null or (tg_op = 'UPDATE' and new.generation = old.generation and (
        old.status in ('PENDING', 'RUNNING', 'FAILED', 'ERROR', 'RESUBMIT', 'RERUN')
        or not exists (
            select 1 from chunkfact f
            where f.datasetid = new.datasetid and f.dataid = new.dataid and f.generation = new.generation)))
    then
        new.generation := nextval('generation');
    end if;
    -- Failed attempts are deleted, as by our own `finish`, except if the chunk is being claimed again: a claim
    -- locks this row before the chunk, so waiting for it could be a deadlock.
    delete from claim c using (
        select ctid as place from claim
        where jobid = new.jobid and dataid = new.dataid and owner is null for update skip locked) as gone
    where c.ctid = gone.place;
    return new;
end $$;

-- Act on what history has just recorded, from first_seq on: judge the pairs that it may allow or forbid.
create or replace function follow(first_seq bigint) returns void
language plpgsql security definer
set search_path from current
as $$
declare
    pairs record;
begin
    if act() = '' then
        select array_agg(jobid) as jobids, array_agg(dataid) as dataids, array_agg(again) as again
        into pairs
        from (
            select jobid, dataid, bool_or(status_after in ('RESUBMIT', 'RERUN')) is true as again
            from dataevent
            where xid = pg_current_xact_id() and seq >= first_seq and locktype = 'OUT'
              and ((status_after in ('RESUBMIT', 'RERUN')
                    and status_before is distinct from 'RESUBMIT' and status_before is distinct from 'RERUN')
                   or (status_before = 'RUNNING' and status_after is null)
                   or (status_before is not null and status_after = 'PENDING'))
            group by jobid, dataid) as back;
        if pairs.jobids is not null then
            perform sent_back(pairs.jobids, pairs.dataids, pairs.again);
        end if;
        -- A reader that began to finish before this change saw the chunk READY, and wakes nobody: wait for its
        -- end, then judge. One that finishes later sees that the row is changing, and judges after this.
        perform 1
        from dataevent c join datastatus s on s.dataid = c.dataid and s.datasetid = c.datasetid
        where c.xid = pg_current_xact_id() and c.seq >= first_seq and c.locktype = 'OUT'
          and c.status_before = 'READY' and s.locktype = 'IN' and s.status = 'RUNNING'
        order by s.datasetid, s.dataid, s.jobid
        for share of s;
    end if;

    for pairs in
        select array_agg(jobid) as jobids, array_agg(dataid) as dataids from (
            select jobid, dataid, row_number() over () / 10000 as batch from (
                select j.jobid, c.dataid
                from dataevent c join job j on j.datasetid = c.datasetid
                where c.xid = pg_current_xact_id() and c.seq >= first_seq and c.locktype = 'OUT'
                  and ((j.itemtype = 'IN'
                        and (coalesce(c.status_before = 'READY', false) <> coalesce(c.status_after = 'READY', false)
                             or (act() <> 'claim' and 'RUNNING' in (c.status_before, c.status_after))))
                       or (j.itemtype = 'OUT'
                           and not (act() = 'claim' and j.jobid = c.jobid)
                           and (c.status_before in ('RUNNING', 'READY', 'FAILED')
                                and c.status_after in ('RUNNING', 'READY', 'FAILED')) is not true))
                union
                select c.jobid, c.dataid
                from dataevent c
                where c.xid = pg_current_xact_id() and c.seq >= first_seq
                  and ((c.locktype = 'IN' and act() not in ('claim', 'finish'))
                       or (act() = '' and exists (
                           select 1 from job j where j.jobid = c.jobid and j.datasetid = c.datasetid
                             and j.itemtype in ('IN', 'OUT') and j.itemtype is distinct from c.locktype)))
                union
                -- A reader locks its chunk: when it ends, the chunk's producers may claim it, unless it is READY.
                -- With an xmax, somebody may be resubmitting it now without having seen the reader end.
                select j.jobid, c.dataid
                from dataevent c join job j on j.datasetid = c.datasetid and j.itemtype = 'OUT'
                where c.xid = pg_current_xact_id() and c.seq >= first_seq and c.locktype = 'IN'
                  and j.jobid <> c.jobid and act() <> 'claim' and 'RUNNING' in (c.status_before, c.status_after)
                  and not exists (
                      select 1 from datastatus s
                      where s.dataid = c.dataid and s.datasetid = c.datasetid and s.locktype = 'OUT'
                        and s.status = 'READY' and s.xmax = 0)
                union
                select j.jobid, c.dataid
                from dataevent c
                    join datastatus i on i.dataid = c.dataid and i.jobid = c.jobid
                    join job j on j.datasetid = i.datasetid and j.itemtype = 'OUT'
                where c.xid = pg_current_xact_id() and c.seq >= first_seq and c.locktype = 'OUT' and act() = ''
                  and 'RUNNING' in (c.status_before, c.status_after)
                  and i.locktype = 'IN' and i.status = 'RUNNING' and j.jobid <> c.jobid
                ) as touched
            order by jobid, dataid) as numbered
        group by batch order by batch
    loop
        perform judge(pairs.jobids, pairs.dataids);
    end loop;
end $$;

-- History of every change of a status, by any program; and what follows from the change.
-- A row whose locktype changes is logged as one lock removed and another added.
-- Our own claims and finishes take shortcuts: a claim has already deleted its pending row, and one that
-- ends READY or FAILED leaves its job nothing to claim.
create or replace function datastatus_inserted() returns trigger
language plpgsql security definer
set search_path from current
as $$
declare
    first_seq bigint;
begin
    with logged as (
        insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why, execution)
        select datasetid, jobid, dataid, locktype, status, generation, author(), reason(),
               case when locktype = 'OUT' then execution('', datasetid, jobid, dataid) end
        from newrows
        returning seq)
    select min(seq) into first_seq from logged;
    if act() = '' then
        insert into chunkfact (datasetid, dataid, generation, jobid)
        select n.datasetid, n.dataid, n.generation, n.jobid from newrows n
        where n.locktype = 'OUT' and n.status = 'READY' and n.generation is not null
        on conflict (datasetid, dataid, generation) do nothing;
    end if;
    if first_seq is not null and (act() <> 'claim' or exists (
        select 1 from newrows n join job j on j.datasetid = n.datasetid
        where n.locktype = 'OUT' and j.itemtype = 'OUT' and j.jobid <> n.jobid))
    then
        perform follow(first_seq);
    end if;
    return null;
end $$;

create or replace function datastatus_deleted() returns trigger
language plpgsql security definer
set search_path from current
as $$
declare
    first_seq bigint;
begin
    if act() = 'fold' then  -- a folded item's history is deleted with it
        delete from dataevent e using oldrows o where e.dataid = o.dataid and e.datasetid = o.datasetid;
        return null;
    end if;
    with logged as (
        insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why, execution)
        select datasetid, jobid, dataid, locktype, status, generation, author(), reason(),
               case when locktype = 'OUT' then execution(status, datasetid, jobid, dataid) end
        from oldrows
        returning seq)
    select min(seq) into first_seq from logged;
    if first_seq is null then
        return null;
    end if;
    if act() <> 'finish' then
        perform follow(first_seq);
    elsif exists (
        select 1 from oldrows i
        where i.locktype = 'IN' and i.status = 'RUNNING' and (
            select min(case when s.status = 'READY' and s.generation = i.generation and s.xmax = 0 then 1 else 0 end)
            from datastatus s
            where s.dataid = i.dataid and s.datasetid = i.datasetid and s.locktype = 'OUT') is distinct from 1)
    then
        if current_setting('dataflow.compare', true) = 'yes' then
            raise exception 'an input of this claim may have changed' using errcode = 'ODF02';
        end if;
        perform follow(first_seq);
    end if;
    return null;
end $$;

create or replace function datastatus_updated() returns trigger
language plpgsql security definer
set search_path from current
as $$
declare
    first_seq bigint;
begin
    if not exists (select 1 from newrows) then
        return null;
    end if;
    with logged as (
        insert into dataevent
            (datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why, execution)
        select datasetid, jobid, dataid, locktype, o.status, n.status,
               coalesce(n.generation, o.generation), author(), reason(),
               case when locktype = 'OUT' then execution(o.status, datasetid, jobid, dataid) end
        from oldrows o full join newrows n using (datasetid, jobid, dataid, locktype)
        where o.status is distinct from n.status
        returning seq)
    select min(seq) into first_seq from logged;
    if first_seq is null then
        return null;
    end if;
    if act() = '' then
        -- Materialized, and a full join: the planner expects a single row in each of these tables, and would otherwise
        -- compare every row with every other one.
        with changed as materialized (
            select datasetid, jobid, dataid, o.status as status_before, n.status as status_after,
                   o.modified as modified_before, n.modified as modified_after, n.generation as generation_after
            from oldrows o full join newrows n using (datasetid, jobid, dataid)
        )
        update datastatus s
        set modified = case when c.modified_after is distinct from c.modified_before then c.modified_after else now() end,
            generation = case when c.status_after in ('RESUBMIT', 'RERUN', 'PENDING') then null
                              else c.generation_after end
        from changed c
        where s.datasetid = c.datasetid and s.jobid = c.jobid and s.dataid = c.dataid
          and c.status_before is distinct from c.status_after;
        with changed as materialized (
            select datasetid, dataid, jobid, locktype, o.status as status_before, n.status as status_after,
                   n.generation as generation_after
            from oldrows o full join newrows n using (datasetid, jobid, dataid, locktype)
        )
        insert into chunkfact (datasetid, dataid, generation, jobid)
        select datasetid, dataid, generation_after, jobid from changed
        where locktype = 'OUT' and status_after = 'READY' and status_before is distinct from 'READY'
          and generation_after is not null
        on conflict (datasetid, dataid, generation) do nothing;
    end if;
    if act() not in ('claim', 'finish') or exists (
        select 1 from newrows n join job j on j.datasetid = n.datasetid
        where n.locktype = 'OUT' and (j.itemtype = 'IN' or j.itemtype = 'OUT'
              and (j.jobid <> n.jobid or n.status not in ('RUNNING', 'READY', 'FAILED'))))
    then
        perform follow(first_seq);
    end if;
    return null;
end $$;

create or replace function datastatus_truncated() returns trigger
language plpgsql security definer
set search_path from current
as $$
begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why, execution)
    select datasetid, jobid, dataid, locktype, status, generation, session_user, 'truncate',
           case when locktype = 'OUT' then execution(status, datasetid, jobid, dataid) end
    from datastatus;
    delete from pending;
    delete from claim;
    return null;
end $$;

-- Queue the jobs whose datasets change.
create or replace function job_changed() returns trigger
language plpgsql security definer
set search_path from current
as $$
declare
    changed text[];
begin
    if tg_op <> 'DELETE' then
        changed := array(select jobid from newrows where itemtype in ('IN', 'OUT') and jobid is not null);
    end if;
    if tg_op <> 'INSERT' then
        changed := changed || array(select jobid from oldrows where itemtype in ('IN', 'OUT') and jobid is not null);
    end if;
    insert into fill (jobid) select distinct jobid from unnest(changed) as c(jobid) order by jobid
    on conflict (jobid) do update set writers = null, datasetid = '', producer = '', dataid = '';
    return null;
end $$;

create or replace function job_truncated() returns trigger
language plpgsql security definer
set search_path from current
as $$
begin
    insert into fill (jobid)
    select distinct jobid from job where itemtype in ('IN', 'OUT') and jobid is not null order by jobid
    on conflict (jobid) do update set writers = null, datasetid = '', producer = '', dataid = '';
    return null;
end $$;

-- What is registered now, in the form that history keeps: a digest instead of a password.
create or replace function kept(registered jsonb) returns text language sql stable as $$
    select cast(jsonb_strip_nulls(
        registered - cast('{jobid,datasetid,itemtype,modified}' as text[])
        || case when registered ->> 'encryptedpass' is not null then jsonb_build_object(
               'encryptedpass', 'digest ' || left(encode(sha256(convert_to(registered ->> 'encryptedpass', 'UTF8')), 'hex'), 8))
           else '{}' end) as text)
$$;
-- All columns have one type; otherwise no index could look up the rows of one job.
create or replace view registered as
select cast('dataset' as text) as tablename, cast(null as text) as jobid, cast(datasetid as text) as datasetid,
       cast(null as text) as itemtype, kept(to_jsonb(d)) as content
from dataset d
union all
select 'job', cast(jobid as text), cast(datasetid as text), cast(itemtype as text), kept(to_jsonb(j)) from job j
union all
select 'jobpolicy', jobid, cast(null as text), cast(null as text),
       kept(to_jsonb(p) || jsonb_build_object('paused_until', p.paused_until at time zone 'UTC'))
from jobpolicy p;

-- Which registrations history doesn't know yet: added (n > 0) or removed.
create or replace view unrecorded as
select tablename, jobid, datasetid, itemtype, content, cast(sum(n) as integer) as n
from (
    select tablename, jobid, datasetid, itemtype, content, 1 as n from registered
    union all
    select tablename, jobid, datasetid, itemtype, content, -n from registration) as known
group by tablename, jobid, datasetid, itemtype, content
having sum(n) <> 0;

create or replace function registration_changed() returns trigger
language plpgsql security definer
set search_path from current
as $$
declare
    moment timestamptz := clock_timestamp();
    before jsonb;
    after jsonb;
begin
    if tg_op = 'TRUNCATE' then
        insert into registration (at, tablename, jobid, datasetid, itemtype, n, content, who, why)
        select moment, tablename, jobid, datasetid, itemtype, -count(*), content, author(), reason()
        from registered where tablename = tg_table_name
        group by tablename, jobid, datasetid, itemtype, content;
        return null;
    end if;
    if tg_op <> 'INSERT' then
        before := to_jsonb(old);
    end if;
    if tg_op <> 'DELETE' then
        after := to_jsonb(new);
    end if;
    if tg_table_name = 'dataset' then
        insert into registration (at, tablename, datasetid, n, content, who, why)
        select moment, tablename, datasetid, n, content, author(), reason() from unrecorded
        where tablename = 'dataset' and datasetid in (before ->> 'datasetid', after ->> 'datasetid')
        order by n;
    else
        insert into registration (at, tablename, jobid, datasetid, itemtype, n, content, who, why)
        select moment, tablename, jobid, datasetid, itemtype, n, content, author(), reason() from unrecorded
        where tablename = tg_table_name and jobid in (before ->> 'jobid', after ->> 'jobid')
        order by n;
    end if;
    return null;
end $$;

create or replace trigger datastatus_added_ready before insert on datastatus for each row
    when (new.locktype = 'OUT' and new.status = 'READY'
          and coalesce(current_setting('dataflow.act', true), '') = '')
    execute function datastatus_numbered();
create or replace trigger datastatus_became_ready before update of status on datastatus for each row
    when (new.locktype = 'OUT' and new.status = 'READY' and old.status is distinct from 'READY'
          and coalesce(current_setting('dataflow.act', true), '') = '')
    execute function datastatus_numbered();
create or replace trigger datastatus_inserted after insert on datastatus
    referencing new table as newrows for each statement execute function datastatus_inserted();
create or replace trigger datastatus_updated after update on datastatus
    referencing old table as oldrows new table as newrows
    for each statement execute function datastatus_updated();
create or replace trigger datastatus_deleted after delete on datastatus
    referencing old table as oldrows for each statement execute function datastatus_deleted();
create or replace trigger datastatus_truncated before truncate on datastatus
    for each statement execute function datastatus_truncated();
create or replace trigger job_inserted after insert on job
    referencing new table as newrows for each statement execute function job_changed();
create or replace trigger job_updated after update on job
    referencing old table as oldrows new table as newrows for each statement execute function job_changed();
create or replace trigger job_deleted after delete on job
    referencing old table as oldrows for each statement execute function job_changed();
create or replace trigger job_truncated before truncate on job
    for each statement execute function job_truncated();
create or replace trigger dataset_recorded after insert or update or delete on dataset for each row
    execute function registration_changed();
create or replace trigger dataset_emptied before truncate on dataset for each statement
    execute function registration_changed();
create or replace trigger job_recorded after insert or update or delete on job for each row
    execute function registration_changed();
create or replace trigger job_emptied before truncate on job for each statement
    execute function registration_changed();
create or replace trigger jobpolicy_recorded after insert or update or delete on jobpolicy for each row
    execute function registration_changed();
create or replace trigger jobpolicy_emptied before truncate on jobpolicy for each statement
    execute function registration_changed();
create or replace trigger pending_taken before delete on pending for each row
    when (current_setting('dataflow.act', true) = 'claim'
          and coalesce(current_setting('dataflow.filling', true), '') <> 'no') execute function pending_taken();
drop trigger if exists fill_queued on fill;
create constraint trigger fill_queued after insert or update on fill deferrable initially deferred for each row
    when (new.writers is null and coalesce(current_setting('dataflow.act', true), '') <> 'init')
    execute function fill_queued();

-- These functions act as the owner of the tables: nobody else may call them, or use them as triggers of another table.
-- Roles that may claim may have a chunk judged, and a queued job filled.
revoke execute on function
    send_notice, judge, fill_batch, fill_next, fill_queued, pending_taken, sent_back, follow, datastatus_numbered, datastatus_inserted,
    datastatus_updated, datastatus_deleted, datastatus_truncated, job_changed, job_truncated, registration_changed from public;
do $$
declare
    other record;
begin
    for other in
        select case when grantee = 0 then 'public' else cast(cast(grantee as regrole) as text) end as name,
               bool_or(privilege_type = 'INSERT') as claims
        from pg_class c cross join aclexplode(c.relacl)
        where c.oid = cast('claim' as regclass) and privilege_type in ('SELECT', 'INSERT') and grantee <> c.relowner
        group by grantee
    loop
        execute format('grant select on fill, registration to %s', other.name);
        if other.claims then
            execute format('grant execute on function judge, fill_next to %s', other.name);
        end if;
    end loop;
end $$;
