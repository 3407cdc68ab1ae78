-- name: runs_of_chunk
-- The newest runs of one chunk: those with steps, and the one that left it FAILED.
select dataid, generation from pipelinestep where jobid = :jobid and dataid = :dataid
union
select dataid, generation from datastatus
where jobid = :jobid and dataid = :dataid and locktype = 'OUT' and status = 'FAILED' and generation is not null
order by generation desc limit :limit;

-- name: runs_of_job
-- The newest runs of a pipeline: those with steps, and those that left chunks FAILED.
select * from (
    select dataid, generation from pipelinestep where jobid = :jobid
    group by generation, dataid order by generation desc, dataid desc limit :limit) as begun
union
select * from (
    select s.dataid, s.generation
    from (select distinct dataid from dataevent where jobid = :jobid and status_after = 'FAILED') as once
        join datastatus s on s.dataid = once.dataid and s.jobid = :jobid
    where s.locktype = 'OUT' and s.status = 'FAILED' and s.generation is not null
    order by s.generation desc, s.dataid desc limit :limit) as failed
order by generation desc, dataid desc limit :limit;

-- name: of_run
-- The steps of one run.
select * from pipelinestep
where jobid = :jobid and dataid = :dataid and generation = :generation order by step;

-- name: end_of_run
-- The end of a run whose chunk didn't become READY, and why.
select status_after as status, at as ended, why as reason from dataevent
where dataid = :dataid and jobid = :jobid and locktype = 'OUT' and generation = :generation
  and status_before = 'RUNNING' and status_after <> 'READY'
order by seq desc limit 1;

-- name: page_of_steps
-- The end of the next page of steps, in the order of runs; none if the page isn't full.
select jobid, generation, dataid from pipelinestep
where (jobid, generation, dataid) > (:first_job, :first_number, :first)
  and (cast(:jobid as text) is null or jobid = :jobid)
order by jobid, generation, dataid limit 1 offset :size;

-- name: count_steps
-- How many steps to delete: of ended runs whose steps are all old enough.
select count(*) from pipelinestep p
where (cast(:jobid as text) is null or p.jobid = :jobid)
  and not exists (
      select 1 from pipelinestep n
      where n.jobid = p.jobid and n.dataid = p.dataid and n.generation = p.generation
        and coalesce(n.ended, n.started) >= :before)
  and not exists (
      select 1 from datastatus s
      where s.dataid = p.dataid and s.jobid = p.jobid and s.generation = p.generation and s.status = 'RUNNING');

-- name: remove_steps
-- Delete a page of them.
delete from pipelinestep as p
where (p.jobid, p.generation, p.dataid) > (:first_job, :first_number, :first)
  and (:last_page or (p.jobid, p.generation, p.dataid) <= (:last_job, :last_number, :last))
  and (cast(:jobid as text) is null or p.jobid = :jobid)
  and not exists (
      select 1 from pipelinestep n
      where n.jobid = p.jobid and n.dataid = p.dataid and n.generation = p.generation
        and coalesce(n.ended, n.started) >= :before)
  and not exists (
      select 1 from datastatus s
      where s.dataid = p.dataid and s.jobid = p.jobid and s.generation = p.generation and s.status = 'RUNNING');

-- name: page_of_items
-- The end of the next page of items with a payload, in the order of their key; none if the page isn't full.
select jobid, dataid from streamitem
where payload is not null and (jobid, dataid) > (:first_job, :first)
  and (cast(:jobid as text) is null or jobid = :jobid)
order by jobid, dataid limit 1 offset :size;

-- name: count_items
-- How many payloads to delete: of items that are READY or not known any more.
select count(*) from streamitem i
where i.payload is not null and i.received < :before and (cast(:jobid as text) is null or i.jobid = :jobid)
  and not exists (
      select 1 from datastatus s
      where s.dataid = i.dataid and s.jobid = i.jobid and coalesce(s.status, '') <> 'READY');

-- name: remove_items
-- Delete the payloads of a page of them.
update streamitem as i set payload = null
where i.payload is not null and (i.jobid, i.dataid) > (:first_job, :first)
  and (:last_page or (i.jobid, i.dataid) <= (:last_job, :last))
  and i.received < :before and (cast(:jobid as text) is null or i.jobid = :jobid)
  and not exists (
      select 1 from datastatus s
      where s.dataid = i.dataid and s.jobid = i.jobid and coalesce(s.status, '') <> 'READY');

-- name: page_of_keys
-- The end of the next page of keys; none if the page isn't full.
select jobid, idempotency from streamkey
where (jobid, idempotency) > (:first_job, :first)
  and (cast(:jobid as text) is null or jobid = :jobid)
order by jobid, idempotency limit 1 offset :size;

-- name: count_keys
-- How many keys to delete: old ones, none of whose items will have a payload after this cleaning.
select count(*) from streamkey k
where k.received < :forgotten and (cast(:jobid as text) is null or k.jobid = :jobid)
  and not exists (
      select 1 from streamitem i
      where i.jobid = k.jobid and i.idempotency = k.idempotency and i.idempotency is not null
        and i.payload is not null
        and (i.received >= :before or exists (
            select 1 from datastatus s
            where s.dataid = i.dataid and s.jobid = i.jobid and coalesce(s.status, '') <> 'READY')));

-- name: remove_keys
-- Delete a page of them.
delete from streamkey as k
where (k.jobid, k.idempotency) > (:first_job, :first)
  and (:last_page or (k.jobid, k.idempotency) <= (:last_job, :last))
  and k.received < :forgotten and (cast(:jobid as text) is null or k.jobid = :jobid)
  and not exists (
      select 1 from streamitem i
      where i.jobid = k.jobid and i.idempotency = k.idempotency and i.idempotency is not null
        and i.payload is not null);
