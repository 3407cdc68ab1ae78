SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
CREATE SCHEMA dataflow;
CREATE FUNCTION dataflow.act() RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select coalesce(current_setting('dataflow.act', true), '')
$$;
CREATE FUNCTION dataflow.author() RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select coalesce(
        nullif(current_setting('dataflow.who', true), ''),
        session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', ''))
$$;
CREATE FUNCTION dataflow.datastatus_deleted() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
declare
    first_seq bigint;
begin
    with logged as (
        insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why)
        select datasetid, jobid, dataid, locktype, status, generation, author(), reason() from oldrows
        returning seq)
    select min(seq) into first_seq from logged;
    if first_seq is not null and act() <> 'finish' then
        perform follow(first_seq);
    end if;
    return null;
end $$;
CREATE FUNCTION dataflow.datastatus_inserted() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
declare
    first_seq bigint;
begin
    with logged as (
        insert into dataevent (datasetid, jobid, dataid, locktype, status_after, generation, who, why)
        select datasetid, jobid, dataid, locktype, status, generation, author(), reason() from newrows
        returning seq)
    select min(seq) into first_seq from logged;
    if first_seq is not null and (act() <> 'claim' or exists (
        select 1 from newrows n join job j on j.datasetid = n.datasetid
        where n.locktype = 'OUT' and j.itemtype = 'OUT' and j.jobid <> n.jobid))
    then
        perform follow(first_seq);
    end if;
    return null;
end $$;
CREATE FUNCTION dataflow.datastatus_truncated() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why)
    select datasetid, jobid, dataid, locktype, status, generation, session_user, 'truncate' from datastatus;
    delete from pending;
    delete from claim;
    return null;
end $$;
CREATE FUNCTION dataflow.datastatus_updated() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
declare
    first_seq bigint;
begin
    if not exists (select 1 from newrows) then
        return null;
    end if;
    with logged as (
        insert into dataevent
            (datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why)
        select datasetid, jobid, dataid, locktype, o.status, n.status,
               coalesce(n.generation, o.generation), author(), reason()
        from oldrows o full join newrows n using (datasetid, jobid, dataid, locktype)
        where o.status is distinct from n.status
        returning seq)
    select min(seq) into first_seq from logged;
    if first_seq is null then
        return null;
    end if;
    if act() = '' then
        update datastatus s
        set modified = case when n.modified is distinct from o.modified then n.modified else now() end,
            generation = case when n.status in ('RESUBMIT', 'RERUN', 'PENDING') then null
                              else n.generation end
        from newrows n join oldrows o using (datasetid, jobid, dataid)
        where s.datasetid = n.datasetid and s.jobid = n.jobid and s.dataid = n.dataid
          and o.status is distinct from n.status;
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
CREATE FUNCTION dataflow.follow(first_seq bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
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
                ) as touched
            order by jobid, dataid) as numbered
        group by batch order by batch
    loop
        perform judge(pairs.jobids, pairs.dataids);
    end loop;
end $$;
CREATE FUNCTION dataflow.job_changed() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
declare
    changed text;
begin
    if tg_op = 'INSERT' then
        for changed in select distinct jobid from newrows where itemtype in ('IN', 'OUT') and jobid is not null
        loop perform rebuild(changed); end loop;
    elsif tg_op = 'DELETE' then
        for changed in select distinct jobid from oldrows where itemtype in ('IN', 'OUT') and jobid is not null
        loop perform rebuild(changed); end loop;
    else
        for changed in
            select jobid from newrows where itemtype in ('IN', 'OUT') and jobid is not null
            union select jobid from oldrows where itemtype in ('IN', 'OUT') and jobid is not null
        loop perform rebuild(changed); end loop;
    end if;
    return null;
end $$;
CREATE FUNCTION dataflow.job_truncated() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
begin
    delete from pending;
    return null;
end $$;
CREATE FUNCTION dataflow.judge(jobids text[], dataids text[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
begin
    insert into pending (jobid, dataid, rank, sortkey)
    select k.jobid, k.dataid,
           case when exists (
               select 1 from job o join datastatus s
                   on s.datasetid = o.datasetid and s.jobid = o.jobid and s.dataid = k.dataid
               where o.jobid = k.jobid and o.itemtype = 'OUT' and s.locktype = 'OUT'
                 and s.status in ('RESUBMIT', 'RERUN')) then 0 else 1 end,
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
        -- every input is READY, and nobody is rewriting it
        and not exists (
            select 1 from job i
            where i.jobid = k.jobid and i.itemtype = 'IN' and i.datasetid <> 'today'
              and (not exists (select 1 from datastatus s
                               where s.dataid = k.dataid and s.datasetid = i.datasetid
                                 and s.locktype = 'OUT' and s.status = 'READY')
                   or exists (select 1 from datastatus s
                              where s.dataid = k.dataid and s.datasetid = i.datasetid
                                and s.locktype = 'OUT' and s.status = 'RUNNING')))
        -- nobody holds or has made an output
        and not exists (
            select 1 from job o join datastatus s
                on s.dataid = k.dataid and s.datasetid = o.datasetid
            where o.jobid = k.jobid and o.itemtype = 'OUT' and s.locktype = 'OUT'
              and (s.status is null or s.status not in ('PENDING', 'RESUBMIT', 'RERUN')))
        -- this job isn't consuming the chunk, nor has it (DONE) unless it is to run again; and no lock
        -- of another type, from when the job was another one, has the key of a row that it would write
        and not exists (
            select 1 from job i join datastatus s
                on s.datasetid = i.datasetid and s.jobid = i.jobid and s.dataid = k.dataid
            where i.jobid = k.jobid and i.itemtype in ('IN', 'OUT')
              and (s.status is null or s.status not in ('RESUBMIT', 'RERUN'))
              and case when i.itemtype = 'OUT'
                       then s.locktype is distinct from 'OUT' and s.status is distinct from 'PENDING'
                       when s.locktype = 'IN'
                       then s.status is null or s.status not in ('DONE', 'FAILED', 'ERROR')
                            or (s.status = 'DONE' and p.rank = 1)
                       else true end)
        -- something says that the chunk exists: an input, or a row of the job's own
        and (exists (select 1 from job i where i.jobid = k.jobid and i.itemtype = 'IN')
             or exists (
                 select 1 from job o join datastatus s
                     on s.datasetid = o.datasetid and s.jobid = o.jobid and s.dataid = k.dataid
                 where o.jobid = k.jobid and o.itemtype = 'OUT' and s.locktype = 'OUT')));
end $$;
CREATE FUNCTION dataflow.lost_race() RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    raise exception 'a row of this claim changed under it' using errcode = 'ODF01';
end $$;
CREATE FUNCTION dataflow.naturalkey(dataid text) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    select string_agg(
        case when part ~ '^[0-9]'
             then lpad(length(ltrim(part, '0'))::text, 3, '0') || ltrim(part, '0')
             else part end, '' order by n)
    from (select m[1] as part, n
          from regexp_matches(dataid, '[0-9]+|[^0-9]+', 'g') with ordinality as r(m, n)) as parts
$$;
CREATE FUNCTION dataflow.reason() RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select nullif(current_setting('dataflow.why', true), '')
$$;
CREATE FUNCTION dataflow.rebuild(job_to_judge text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    AS $$
declare
    chunk_ids text[];
begin
    lock table datastatus in share row exclusive mode;
    delete from pending where jobid = job_to_judge;
    for chunk_ids in
        select array_agg(dataid) from (
            select dataid, row_number() over () / 10000 as batch from (
                select distinct s.dataid from job j join datastatus s on s.datasetid = j.datasetid
                where j.jobid = job_to_judge and s.locktype = 'OUT' and s.dataid <> ''
                  and ((j.itemtype = 'IN' and s.status = 'READY')
                       or (j.itemtype = 'OUT' and s.jobid = j.jobid
                           and s.status in ('PENDING', 'RESUBMIT', 'RERUN')))) as known
        ) as numbered group by batch
    loop
        perform judge(array_fill(job_to_judge, array[cardinality(chunk_ids)]), chunk_ids);
    end loop;
end $$;
CREATE FUNCTION dataflow.sent_back(jobids text[], dataids text[], again boolean[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dataflow', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
begin
    delete from claim c using unnest(jobids, dataids) as k(jobid, dataid)
    where c.jobid = k.jobid and c.dataid = k.dataid;
    -- Looked up chunk by chunk: on tables not analyzed yet, a join would scan all chunks of the job for each.
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
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE dataflow.chunkfact (
    datasetid text NOT NULL,
    dataid text NOT NULL,
    generation bigint NOT NULL,
    location text,
    rows bigint,
    bytes bigint,
    fingerprint text,
    validated boolean,
    checks text,
    at timestamp with time zone DEFAULT now() NOT NULL,
    jobid text,
    inputs text,
    schema text
);
CREATE TABLE dataflow.chunkrange (
    datasetid text NOT NULL,
    dataid text NOT NULL,
    lower_bound text,
    upper_bound text,
    modulus bigint
);
CREATE TABLE dataflow.claim (
    jobid text NOT NULL,
    dataid text NOT NULL,
    generation bigint NOT NULL,
    owner text,
    runid text,
    started timestamp with time zone,
    heartbeat timestamp with time zone,
    lease_end timestamp with time zone,
    attempts integer DEFAULT 1 NOT NULL,
    losses integer DEFAULT 0 NOT NULL,
    retry_at timestamp with time zone
);
CREATE TABLE dataflow.dataevent (
    seq bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    datasetid text,
    jobid text,
    dataid text,
    locktype text,
    status_before text,
    status_after text,
    generation bigint,
    who text,
    why text,
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL
);
ALTER TABLE dataflow.dataevent ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dataflow.dataevent_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dataflow.dataflow_meta (
    name text NOT NULL,
    value text NOT NULL
);
CREATE TABLE dataflow.dataset (
    datasetid character varying,
    hostname character varying,
    database character varying,
    schemaname character varying,
    tablename character varying,
    username character varying,
    encryptedpass character varying,
    format character varying,
    chunkcolumn character varying,
    domain character varying,
    writemode character varying
);
CREATE TABLE dataflow.datastatus (
    datasetid character varying NOT NULL,
    jobid character varying NOT NULL,
    dataid character varying NOT NULL,
    locktype character varying,
    status character varying,
    modified timestamp without time zone,
    generation bigint
)
WITH (fillfactor='85');
CREATE SEQUENCE dataflow.generation
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE dataflow.job (
    jobid character varying,
    itemtype character varying,
    datasetid character varying,
    itemvalue character varying,
    modified timestamp without time zone
);
CREATE TABLE dataflow.jobpolicy (
    jobid text NOT NULL,
    concurrency integer,
    max_attempts integer,
    retry_delay integer,
    lease_seconds integer,
    batch_size integer,
    time_limit integer,
    paused_until timestamp with time zone,
    every_minutes integer,
    modified timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT jobpolicy_batch_size_check CHECK ((batch_size >= 1)),
    CONSTRAINT jobpolicy_concurrency_check CHECK ((concurrency >= 0)),
    CONSTRAINT jobpolicy_every_minutes_check CHECK ((every_minutes >= 1)),
    CONSTRAINT jobpolicy_lease_seconds_check CHECK ((lease_seconds >= 1)),
    CONSTRAINT jobpolicy_max_attempts_check CHECK ((max_attempts >= 1)),
    CONSTRAINT jobpolicy_retry_delay_check CHECK ((retry_delay >= 0)),
    CONSTRAINT jobpolicy_time_limit_check CHECK ((time_limit >= 1))
);
CREATE TABLE dataflow.pending (
    jobid text NOT NULL,
    dataid text NOT NULL,
    rank smallint NOT NULL,
    sortkey text NOT NULL COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='2000');
CREATE TABLE dataflow.pipelinestep (
    jobid text NOT NULL,
    dataid text NOT NULL,
    generation bigint NOT NULL,
    step integer NOT NULL,
    transformation text NOT NULL,
    status text NOT NULL,
    started timestamp with time zone,
    ended timestamp with time zone,
    rows bigint,
    stdout text,
    traceback text,
    reason text
);
CREATE TABLE dataflow.streamitem (
    jobid text NOT NULL,
    dataid text NOT NULL,
    payload text,
    idempotency text,
    received timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
CREATE TABLE dataflow.streamkey (
    jobid text NOT NULL,
    idempotency text NOT NULL,
    digest text NOT NULL,
    dataids text NOT NULL,
    received timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
CREATE TABLE dataflow.streamtoken (
    jobid text NOT NULL,
    hash text NOT NULL,
    created timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE dataflow.worker (
    owner text NOT NULL,
    runid text NOT NULL,
    jobid text NOT NULL,
    started timestamp with time zone NOT NULL,
    heartbeat timestamp with time zone NOT NULL,
    lease_end timestamp with time zone NOT NULL
);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '1', 1, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '2', 2, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '3', 3, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '4', 4, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '5', 5, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '6', 6, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '7', 7, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '8', 8, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '9', 9, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '11', 10, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobin', '12', 11, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.105901+00', 'external', NULL, NULL);
INSERT INTO dataflow.chunkfact VALUES ('bobout', '1', 12, NULL, 3, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.173504+00', 'loadbob', '{ "bobin" : 1 }', 'n:bigint');
INSERT INTO dataflow.chunkfact VALUES ('bobout', '2', 13, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.192052+00', 'loadbob', '{ "bobin" : 2 }', NULL);
INSERT INTO dataflow.chunkfact VALUES ('packed', '1', 18, '/data/packed/_packs/pack-0123abcd.parquet#dataid=1', 1, 9, NULL, NULL, NULL, '2026-11-19 08:10:10.254766+00', 'sums', '{ "bobout" : 12 }', NULL);
INSERT INTO dataflow.chunkfact VALUES ('packed', '2', 19, '/data/packed/_packs/pack-0123abcd.parquet#dataid=2', 1, 9, NULL, NULL, NULL, '2026-11-19 08:10:10.254766+00', 'sums', '{ "bobout" : 13 }', NULL);
INSERT INTO dataflow.chunkfact VALUES ('sums', '1', 18, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.254766+00', 'sums', '{ "bobout" : 12 }', NULL);
INSERT INTO dataflow.chunkfact VALUES ('sums', '2', 19, NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.254766+00', 'sums', '{ "bobout" : 13 }', NULL);
INSERT INTO dataflow.chunkrange VALUES ('bobin', '1', '2024-01-01', '2024-02-01', NULL);
INSERT INTO dataflow.chunkrange VALUES ('bobin', '2', '0', NULL, 7);
INSERT INTO dataflow.claim VALUES ('loadbob', '5', 16, 'worker of 3', 'run-1', '2026-11-19 08:10:10.146058+00', '2026-11-19 08:10:10.146058+00', '2058-07-28 09:56:50.146058+00', 1, 0, NULL);
INSERT INTO dataflow.claim VALUES ('loadbob', '3', 14, NULL, 'run-1', '2026-11-19 08:10:10.146058+00', NULL, NULL, 1, 0, '2058-07-28 09:56:50.198925+00');
INSERT INTO dataflow.claim VALUES ('loadbob', '9', 17, 'forced of 3', NULL, '2026-11-19 08:10:10.219009+00', '2026-11-19 08:10:10.219009+00', '2058-07-28 09:56:50.219009+00', 1, 0, NULL);
INSERT INTO dataflow.claim VALUES ('items', '20', 23, 'items of 3', NULL, '2026-11-19 08:10:10.326242+00', '2026-11-19 08:10:10.326242+00', '2058-07-28 09:56:50.326242+00', 1, 0, NULL);
INSERT INTO dataflow.claim VALUES ('gone', 'x', 1, NULL, NULL, NULL, NULL, NULL, 2, 0, NULL);
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (1, '2026-11-19 08:10:10.006231+00', 'bobin', 'other', '10', 'OUT', NULL, 'READY', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (2, '2026-11-19 08:10:10.00635+00', '', '', '', '', NULL, '', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (3, '2026-11-19 08:10:10.006355+00', 'bobin', 'hand', '', 'OUT', NULL, 'READY', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (4, '2026-11-19 08:10:10.006358+00', 'bobin', 'hand', 'odd', NULL, NULL, NULL, NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (5, '2026-11-19 08:10:10.00636+00', 'bobin', 'hand', 'none', 'OUT', NULL, NULL, NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (6, '2026-11-19 08:10:10.006362+00', 'bobout', 'loadbob', 'lower', 'out', NULL, 'ready', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (7, '2026-11-19 08:10:10.006365+00', 'bobin', 'hand', 'word', 'OUT', NULL, 'ARCHIVED', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (8, '2026-11-19 08:10:10.006367+00', 'bobin', 'hand', 'line
break é 日本', 'OUT', NULL, 'READY', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (9, '2026-11-19 08:10:10.006369+00', 'bobin', 'loadbob', 'done', 'IN', NULL, 'DONE', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (10, '2026-11-19 08:10:10.00637+00', 'bobin', 'hand', 'done', 'OUT', NULL, 'READY', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (11, '2026-11-19 08:10:10.006372+00', 'bobin', 'loadbob', 'gone', 'IN', NULL, 'RUNNING', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (12, '2026-11-19 08:10:10.006374+00', 'bobin', 'loadbob', 'orphan', 'IN', NULL, 'RUNNING', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (13, '2026-11-19 08:10:10.006375+00', 'bobin', 'hand', 'orphan', 'OUT', NULL, 'READY', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (14, '2026-11-19 08:10:10.006377+00', 'bobout', 'loadbob', 'orphan', 'OUT', NULL, 'RUNNING', NULL, 'postgres (psql)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (15, '2026-11-19 08:10:10.1112+00', 'bobin', 'external', '1', 'OUT', NULL, 'READY', 1, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (16, '2026-11-19 08:10:10.11122+00', 'bobin', 'external', '2', 'OUT', NULL, 'READY', 2, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (17, '2026-11-19 08:10:10.111223+00', 'bobin', 'external', '3', 'OUT', NULL, 'READY', 3, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (18, '2026-11-19 08:10:10.111225+00', 'bobin', 'external', '4', 'OUT', NULL, 'READY', 4, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (19, '2026-11-19 08:10:10.111227+00', 'bobin', 'external', '5', 'OUT', NULL, 'READY', 5, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (20, '2026-11-19 08:10:10.111228+00', 'bobin', 'external', '6', 'OUT', NULL, 'READY', 6, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (21, '2026-11-19 08:10:10.11123+00', 'bobin', 'external', '7', 'OUT', NULL, 'READY', 7, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (22, '2026-11-19 08:10:10.111231+00', 'bobin', 'external', '8', 'OUT', NULL, 'READY', 8, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (23, '2026-11-19 08:10:10.111233+00', 'bobin', 'external', '9', 'OUT', NULL, 'READY', 9, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (24, '2026-11-19 08:10:10.111234+00', 'bobin', 'external', '11', 'OUT', NULL, 'READY', 10, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (25, '2026-11-19 08:10:10.111236+00', 'bobin', 'external', '12', 'OUT', NULL, 'READY', 11, 'hand', 'a load', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (26, '2026-11-19 08:10:10.147649+00', 'bobin', 'loadbob', '1', 'IN', NULL, 'RUNNING', 1, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (27, '2026-11-19 08:10:10.147663+00', 'bobout', 'loadbob', '1', 'OUT', NULL, 'RUNNING', 12, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (28, '2026-11-19 08:10:10.147666+00', 'bobin', 'loadbob', '2', 'IN', NULL, 'RUNNING', 2, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (29, '2026-11-19 08:10:10.147668+00', 'bobout', 'loadbob', '2', 'OUT', NULL, 'RUNNING', 13, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (30, '2026-11-19 08:10:10.147669+00', 'bobin', 'loadbob', '3', 'IN', NULL, 'RUNNING', 3, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (31, '2026-11-19 08:10:10.147671+00', 'bobout', 'loadbob', '3', 'OUT', NULL, 'RUNNING', 14, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (32, '2026-11-19 08:10:10.147673+00', 'bobin', 'loadbob', '4', 'IN', NULL, 'RUNNING', 4, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (33, '2026-11-19 08:10:10.147674+00', 'bobout', 'loadbob', '4', 'OUT', NULL, 'RUNNING', 15, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (34, '2026-11-19 08:10:10.147676+00', 'bobin', 'loadbob', '5', 'IN', NULL, 'RUNNING', 5, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (35, '2026-11-19 08:10:10.147678+00', 'bobout', 'loadbob', '5', 'OUT', NULL, 'RUNNING', 16, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (36, '2026-11-19 08:10:10.17443+00', 'bobout', 'loadbob', '1', 'OUT', 'RUNNING', 'READY', 12, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (37, '2026-11-19 08:10:10.175354+00', 'bobin', 'loadbob', '1', 'IN', 'RUNNING', NULL, 1, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (38, '2026-11-19 08:10:10.19265+00', 'bobout', 'loadbob', '2', 'OUT', 'RUNNING', 'READY', 13, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (39, '2026-11-19 08:10:10.193022+00', 'bobin', 'loadbob', '2', 'IN', 'RUNNING', NULL, 2, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (40, '2026-11-19 08:10:10.199481+00', 'bobout', 'loadbob', '3', 'OUT', 'RUNNING', 'FAILED', 14, 'worker of 3', 'it failed, and is tried later', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (41, '2026-11-19 08:10:10.199827+00', 'bobin', 'loadbob', '3', 'IN', 'RUNNING', NULL, 3, 'worker of 3', 'it failed, and is tried later', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (42, '2026-11-19 08:10:10.212081+00', 'bobout', 'loadbob', '4', 'OUT', 'RUNNING', 'FAILED', 15, 'worker of 3', 'it failed for good', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (43, '2026-11-19 08:10:10.212299+00', 'bobin', 'loadbob', '4', 'IN', 'RUNNING', NULL, 4, 'worker of 3', 'it failed for good', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (44, '2026-11-19 08:10:10.233237+00', 'bobin', 'loadbob', '9', 'IN', NULL, 'RUNNING', 9, 'forced of 3', 'forced', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (45, '2026-11-19 08:10:10.233245+00', 'bobout', 'loadbob', '9', 'OUT', NULL, 'RUNNING', 17, 'forced of 3', 'forced', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (46, '2026-11-19 08:10:10.246531+00', 'bobout', 'sums', '1', 'IN', NULL, 'RUNNING', 12, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (47, '2026-11-19 08:10:10.246539+00', 'sums', 'sums', '1', 'OUT', NULL, 'RUNNING', 18, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (48, '2026-11-19 08:10:10.246542+00', 'packed', 'sums', '1', 'OUT', NULL, 'RUNNING', 18, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (49, '2026-11-19 08:10:10.24656+00', 'bobout', 'sums', '2', 'IN', NULL, 'RUNNING', 13, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (50, '2026-11-19 08:10:10.246562+00', 'sums', 'sums', '2', 'OUT', NULL, 'RUNNING', 19, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (51, '2026-11-19 08:10:10.246564+00', 'packed', 'sums', '2', 'OUT', NULL, 'RUNNING', 19, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (52, '2026-11-19 08:10:10.255355+00', 'packed', 'sums', '1', 'OUT', 'RUNNING', 'READY', 18, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (53, '2026-11-19 08:10:10.255363+00', 'sums', 'sums', '1', 'OUT', 'RUNNING', 'READY', 18, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (54, '2026-11-19 08:10:10.255366+00', 'packed', 'sums', '2', 'OUT', 'RUNNING', 'READY', 19, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (55, '2026-11-19 08:10:10.255368+00', 'sums', 'sums', '2', 'OUT', 'RUNNING', 'READY', 19, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (56, '2026-11-19 08:10:10.255403+00', 'bobout', 'sums', '1', 'IN', 'RUNNING', NULL, 12, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (57, '2026-11-19 08:10:10.255407+00', 'bobout', 'sums', '2', 'IN', 'RUNNING', NULL, 13, 'worker of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (58, '2026-11-19 08:10:10.267466+00', 'bobout', 'loadbob', '11', 'OUT', NULL, 'HOLD', NULL, 'hand', 'wait', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (59, '2026-11-19 08:10:10.280235+00', 'packed', 'sums', '1', 'OUT', 'READY', 'RESUBMIT', 18, 'hand', 'odf resubmit', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (60, '2026-11-19 08:10:10.280247+00', 'sums', 'sums', '1', 'OUT', 'READY', 'RESUBMIT', 18, 'hand', 'odf resubmit', '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (61, '2026-11-19 08:10:10.310941+00', 'runs', 'items', '20', 'OUT', NULL, 'PENDING', 20, 'odf serve', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (62, '2026-11-19 08:10:10.31095+00', 'runs', 'items', '21', 'OUT', NULL, 'PENDING', 21, 'odf serve', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (63, '2026-11-19 08:10:10.310953+00', 'runs', 'items', '22', 'OUT', NULL, 'PENDING', 22, 'odf serve', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (64, '2026-11-19 08:10:10.326984+00', 'runs', 'items', '20', 'OUT', 'PENDING', 'RUNNING', 23, 'items of 3', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (65, '2026-11-19 08:10:10.340681+00', 'runs', 'items', '2026-11-19T081010.340Z', 'OUT', NULL, 'PENDING', NULL, 'odf pipeline run', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (66, '2026-11-19 08:10:10.423191+00', 'bobin', 'loadbob', '', 'IN', NULL, 'RUNNING', NULL, 'postgres (java)', NULL, '3');
INSERT INTO dataflow.dataevent OVERRIDING SYSTEM VALUE VALUES (67, '2026-11-19 08:10:10.447362+00', 'bobout', 'loadbob', '', 'OUT', NULL, 'RUNNING', NULL, 'postgres (java)', NULL, '3');
INSERT INTO dataflow.dataflow_meta VALUES ('schema', '3');
INSERT INTO dataflow.dataset VALUES ('bobin', 'h', NULL, NULL, NULL, NULL, NULL, NULL, 'day', 'd', NULL);
INSERT INTO dataflow.dataset VALUES ('bobout', NULL, NULL, NULL, NULL, NULL, NULL, 'parquet', NULL, NULL, 'append');
INSERT INTO dataflow.dataset VALUES ('sums', NULL, NULL, NULL, NULL, NULL, NULL, 'parquet', NULL, NULL, 'append');
INSERT INTO dataflow.dataset VALUES ('packed', NULL, NULL, NULL, NULL, NULL, NULL, 'parquet', NULL, NULL, 'append');
INSERT INTO dataflow.dataset VALUES ('runs', NULL, NULL, NULL, NULL, NULL, NULL, 'parquet', NULL, NULL, 'append');
INSERT INTO dataflow.dataset VALUES ('bobin', 'again', NULL, NULL, NULL, NULL, 'ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj', NULL, NULL, NULL, NULL);
INSERT INTO dataflow.dataset VALUES (NULL, 'x', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dataflow.dataset VALUES ('', '', NULL, NULL, NULL, NULL, '', NULL, NULL, NULL, NULL);
INSERT INTO dataflow.dataset VALUES ('"quoted" ''twice'' %s :jobid; --', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'other', '10', 'OUT', 'READY', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('', '', '', '', '', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', '', 'OUT', 'READY', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', 'odd', NULL, NULL, NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', 'none', 'OUT', NULL, NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', 'lower', 'out', 'ready', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', 'word', 'OUT', 'ARCHIVED', '1969-01-01 00:00:00', NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', 'line
break é 日本', 'OUT', 'READY', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'loadbob', 'done', 'IN', 'DONE', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', 'done', 'OUT', 'READY', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'loadbob', 'gone', 'IN', 'RUNNING', '2020-01-01 00:00:00', NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'loadbob', 'orphan', 'IN', 'RUNNING', '2020-01-01 00:00:00', NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'hand', 'orphan', 'OUT', 'READY', NULL, NULL);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', 'orphan', 'OUT', 'RUNNING', '2020-01-01 00:00:00', NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '1', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 1);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '2', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 2);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '3', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 3);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '4', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 4);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '5', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 5);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '6', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 6);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '7', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 7);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '8', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 8);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '9', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 9);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '11', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 10);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'external', '12', 'OUT', 'READY', '2026-11-19 08:10:10.105901', 11);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'loadbob', '5', 'IN', 'RUNNING', '2026-11-19 08:10:10.146058', 5);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '5', 'OUT', 'RUNNING', '2026-11-19 08:10:10.146058', 16);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '1', 'OUT', 'READY', '2026-11-19 08:10:10.173504', 12);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '2', 'OUT', 'READY', '2026-11-19 08:10:10.192052', 13);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '3', 'OUT', 'FAILED', '2026-11-19 08:10:10.198925', 14);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '4', 'OUT', 'FAILED', '2026-11-19 08:10:10.211635', 15);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'loadbob', '9', 'IN', 'RUNNING', '2026-11-19 08:10:10.219009', 9);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '9', 'OUT', 'RUNNING', '2026-11-19 08:10:10.219009', 17);
INSERT INTO dataflow.datastatus VALUES ('packed', 'sums', '2', 'OUT', 'READY', '2026-11-19 08:10:10.254766', 19);
INSERT INTO dataflow.datastatus VALUES ('sums', 'sums', '2', 'OUT', 'READY', '2026-11-19 08:10:10.254766', 19);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '11', 'OUT', 'HOLD', '2026-11-19 08:10:10.263958', NULL);
INSERT INTO dataflow.datastatus VALUES ('packed', 'sums', '1', 'OUT', 'RESUBMIT', '2026-11-19 08:10:10.279415', NULL);
INSERT INTO dataflow.datastatus VALUES ('sums', 'sums', '1', 'OUT', 'RESUBMIT', '2026-11-19 08:10:10.279415', NULL);
INSERT INTO dataflow.datastatus VALUES ('runs', 'items', '21', 'OUT', 'PENDING', '2026-11-19 08:10:10.301829', 21);
INSERT INTO dataflow.datastatus VALUES ('runs', 'items', '22', 'OUT', 'PENDING', '2026-11-19 08:10:10.301829', 22);
INSERT INTO dataflow.datastatus VALUES ('runs', 'items', '20', 'OUT', 'RUNNING', '2026-11-19 08:10:10.326242', 23);
INSERT INTO dataflow.datastatus VALUES ('runs', 'items', '2026-11-19T081010.340Z', 'OUT', 'PENDING', '2026-11-19 08:10:10.331782', NULL);
INSERT INTO dataflow.datastatus VALUES ('bobin', 'loadbob', '', 'IN', 'RUNNING', '2026-11-19 08:10:10.400663', NULL);
INSERT INTO dataflow.datastatus VALUES ('bobout', 'loadbob', '', 'OUT', 'RUNNING', '2026-11-19 08:10:10.400663', NULL);
INSERT INTO dataflow.job VALUES ('loadbob', 'IN', 'bobin', NULL, '2026-11-19 08:10:09.963774');
INSERT INTO dataflow.job VALUES ('loadbob', 'OUT', 'bobout', NULL, '2026-11-19 08:10:09.963774');
INSERT INTO dataflow.job VALUES ('loadbob', 'MODE', NULL, 'full', '2026-11-19 08:10:09.963774');
INSERT INTO dataflow.job VALUES ('sums', 'IN', 'bobout', NULL, '2026-11-19 08:10:09.982337');
INSERT INTO dataflow.job VALUES ('sums', 'OUT', 'sums', NULL, '2026-11-19 08:10:09.982337');
INSERT INTO dataflow.job VALUES ('sums', 'OUT', 'packed', NULL, '2026-11-19 08:10:09.982337');
INSERT INTO dataflow.job VALUES ('items', 'OUT', 'runs', NULL, '2026-11-19 08:10:09.985699');
INSERT INTO dataflow.job VALUES ('loadbob', 'IN', 'bobin', NULL, '2019-05-05 00:00:00');
INSERT INTO dataflow.job VALUES (NULL, 'IN', 'bobin', NULL, NULL);
INSERT INTO dataflow.job VALUES ('half', 'OUT', NULL, NULL, NULL);
INSERT INTO dataflow.job VALUES ('half', NULL, 'bobin', NULL, NULL);
INSERT INTO dataflow.job VALUES ('half', 'in', 'bobin', NULL, NULL);
INSERT INTO dataflow.jobpolicy VALUES ('loadbob', 9, 3, 1000000000, 1000000000, NULL, NULL, NULL, NULL, '2026-11-19 08:10:10.082965+00');
INSERT INTO dataflow.jobpolicy VALUES ('items', NULL, NULL, NULL, 1000000000, NULL, NULL, NULL, 60, '2026-11-19 08:10:10.094838+00');
INSERT INTO dataflow.pending VALUES ('loadbob', '10', 1, '00210');
INSERT INTO dataflow.pending VALUES ('loadbob', 'line
break é 日本', 1, 'line
break é 日本');
INSERT INTO dataflow.pending VALUES ('loadbob', '12', 1, '00212');
INSERT INTO dataflow.pending VALUES ('loadbob', '6', 1, '0016');
INSERT INTO dataflow.pending VALUES ('loadbob', '7', 1, '0017');
INSERT INTO dataflow.pending VALUES ('loadbob', '8', 1, '0018');
INSERT INTO dataflow.pending VALUES ('sums', '1', 0, '0011');
INSERT INTO dataflow.pending VALUES ('items', '21', 1, '00221');
INSERT INTO dataflow.pending VALUES ('items', '22', 1, '00222');
INSERT INTO dataflow.pending VALUES ('items', '2026-11-19T081010.340Z', 1, '0042026-00211-00219T00581010.003340Z');
INSERT INTO dataflow.pipelinestep VALUES ('items', '20', 23, 0, 'tidy', 'READY', NULL, NULL, 1, 'printed
', NULL, NULL);
INSERT INTO dataflow.streamitem VALUES ('items', '20', '{"n": 1}', 'key-1', '2026-11-19 08:10:10.303455+00');
INSERT INTO dataflow.streamitem VALUES ('items', '21', '{"n": 2}', 'key-1', '2026-11-19 08:10:10.303613+00');
INSERT INTO dataflow.streamitem VALUES ('items', '22', '{"n": 3}', NULL, '2026-11-19 08:10:10.303619+00');
INSERT INTO dataflow.streamkey VALUES ('items', 'key-1', '8ff0410a92775b36c260d9dc47e40f41bb74ce3c859fe3bc57bd63bf474e6ff9', '["20", "21"]', '2026-11-19 08:10:10.303175+00');
INSERT INTO dataflow.streamtoken VALUES ('items', '0f5827554c1cfc84e556158e1cdca739b2669f88ae3efd8e9b714b0871665235', '2026-11-19 08:10:10.342723+00');
INSERT INTO dataflow.worker VALUES ('worker of 3', 'run-1', 'loadbob', '2024-01-01 00:00:00+00', '2024-01-01 00:00:00+00', '2099-01-01 00:00:00+00');
SELECT pg_catalog.setval('dataflow.dataevent_seq_seq', 67, true);
SELECT pg_catalog.setval('dataflow.generation', 23, true);
ALTER TABLE ONLY dataflow.chunkfact
    ADD CONSTRAINT chunkfact_pkey PRIMARY KEY (datasetid, dataid, generation);
ALTER TABLE ONLY dataflow.chunkrange
    ADD CONSTRAINT chunkrange_pkey PRIMARY KEY (datasetid, dataid);
ALTER TABLE ONLY dataflow.claim
    ADD CONSTRAINT claim_pkey PRIMARY KEY (jobid, dataid);
ALTER TABLE ONLY dataflow.dataflow_meta
    ADD CONSTRAINT dataflow_meta_pkey PRIMARY KEY (name);
ALTER TABLE ONLY dataflow.datastatus
    ADD CONSTRAINT datastatus_pkey PRIMARY KEY (datasetid, jobid, dataid);
ALTER TABLE ONLY dataflow.jobpolicy
    ADD CONSTRAINT jobpolicy_pkey PRIMARY KEY (jobid);
ALTER TABLE ONLY dataflow.pending
    ADD CONSTRAINT pending_pkey PRIMARY KEY (jobid, dataid);
ALTER TABLE ONLY dataflow.pipelinestep
    ADD CONSTRAINT pipelinestep_pkey PRIMARY KEY (jobid, dataid, generation, step);
ALTER TABLE ONLY dataflow.streamitem
    ADD CONSTRAINT streamitem_pkey PRIMARY KEY (jobid, dataid);
ALTER TABLE ONLY dataflow.streamkey
    ADD CONSTRAINT streamkey_pkey PRIMARY KEY (jobid, idempotency);
ALTER TABLE ONLY dataflow.streamtoken
    ADD CONSTRAINT streamtoken_pkey PRIMARY KEY (jobid);
ALTER TABLE ONLY dataflow.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (owner);
CREATE INDEX dataevent_by_chunk ON dataflow.dataevent USING btree (dataid, datasetid);
CREATE UNIQUE INDEX dataevent_in_order ON dataflow.dataevent USING btree (xid, seq);
CREATE INDEX dataevent_of_failures ON dataflow.dataevent USING btree (jobid, dataid) WHERE (status_after = 'FAILED'::text);
CREATE INDEX datastatus_by_chunk ON dataflow.datastatus USING btree (dataid, datasetid, jobid);
CREATE INDEX job_by_datasetid ON dataflow.job USING btree (datasetid);
CREATE INDEX job_by_jobid ON dataflow.job USING btree (jobid);
CREATE INDEX pending_in_order ON dataflow.pending USING btree (jobid, rank, sortkey, dataid COLLATE "C");
CREATE INDEX pipelinestep_by_run ON dataflow.pipelinestep USING btree (jobid, generation, dataid);
CREATE INDEX streamitem_by_key ON dataflow.streamitem USING btree (jobid, idempotency) WHERE (idempotency IS NOT NULL);
CREATE INDEX streamitem_kept ON dataflow.streamitem USING btree (jobid, dataid) WHERE (payload IS NOT NULL);
CREATE INDEX x_dataset ON dataflow.dataset USING btree (datasetid);
CREATE TRIGGER datastatus_deleted AFTER DELETE ON dataflow.datastatus REFERENCING OLD TABLE AS oldrows FOR EACH STATEMENT EXECUTE FUNCTION dataflow.datastatus_deleted();
CREATE TRIGGER datastatus_inserted AFTER INSERT ON dataflow.datastatus REFERENCING NEW TABLE AS newrows FOR EACH STATEMENT EXECUTE FUNCTION dataflow.datastatus_inserted();
CREATE TRIGGER datastatus_truncated BEFORE TRUNCATE ON dataflow.datastatus FOR EACH STATEMENT EXECUTE FUNCTION dataflow.datastatus_truncated();
CREATE TRIGGER datastatus_updated AFTER UPDATE ON dataflow.datastatus REFERENCING OLD TABLE AS oldrows NEW TABLE AS newrows FOR EACH STATEMENT EXECUTE FUNCTION dataflow.datastatus_updated();
CREATE TRIGGER job_deleted AFTER DELETE ON dataflow.job REFERENCING OLD TABLE AS oldrows FOR EACH STATEMENT EXECUTE FUNCTION dataflow.job_changed();
CREATE TRIGGER job_inserted AFTER INSERT ON dataflow.job REFERENCING NEW TABLE AS newrows FOR EACH STATEMENT EXECUTE FUNCTION dataflow.job_changed();
CREATE TRIGGER job_truncated BEFORE TRUNCATE ON dataflow.job FOR EACH STATEMENT EXECUTE FUNCTION dataflow.job_truncated();
CREATE TRIGGER job_updated AFTER UPDATE ON dataflow.job REFERENCING OLD TABLE AS oldrows NEW TABLE AS newrows FOR EACH STATEMENT EXECUTE FUNCTION dataflow.job_changed();
