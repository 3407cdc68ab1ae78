-- name: of_chunk
-- The steps of the newest runs of one chunk, the newest run first.
with run as (
    select distinct generation from pipelinestep where jobid = :jobid and dataid = :dataid
    order by generation desc limit :limit
)
select p.* from run cross join pipelinestep p
where p.jobid = :jobid and p.dataid = :dataid and p.generation = run.generation
order by p.generation desc, p.step;

-- name: of_job
-- The steps of the newest runs of a pipeline, the newest run first.
with run as (
    select generation, dataid from pipelinestep where jobid = :jobid
    group by generation, dataid order by generation desc, dataid desc limit :limit
)
select p.* from run cross join pipelinestep p
where p.jobid = :jobid and p.dataid = run.dataid and p.generation = run.generation
order by p.generation desc, p.dataid desc, p.step;

-- name: page_of_steps
-- Where the next so many steps end, in the order of runs; none if there are fewer.
select jobid, generation, dataid from pipelinestep
where (jobid, generation, dataid) > (:first_job, :first_number, :first)
  and (cast(:jobid as text) is null or jobid = :jobid)
order by jobid, generation, dataid limit 1 offset :size;

-- name: count_steps
-- How many steps are to go: of runs that are over, and all of whose steps are old enough.
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
-- Remove a page of them.
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
-- Where the next so many items that have a payload end, in the order of their key; none if there are fewer.
select jobid, dataid from streamitem
where payload is not null and (jobid, dataid) > (:first_job, :first)
  and (cast(:jobid as text) is null or jobid = :jobid)
order by jobid, dataid limit 1 offset :size;

-- name: count_items
-- How many payloads are to go: of items that are READY, or of which nothing is known any more.
select count(*) from streamitem i
where i.payload is not null and i.received < :before and (cast(:jobid as text) is null or i.jobid = :jobid)
  and not exists (
      select 1 from datastatus s
      where s.dataid = i.dataid and s.jobid = i.jobid and coalesce(s.status, '') <> 'READY');

-- name: remove_items
-- Remove the payloads of a page of them.
update streamitem as i set payload = null
where i.payload is not null and (i.jobid, i.dataid) > (:first_job, :first)
  and (:last_page or (i.jobid, i.dataid) <= (:last_job, :last))
  and i.received < :before and (cast(:jobid as text) is null or i.jobid = :jobid)
  and not exists (
      select 1 from datastatus s
      where s.dataid = i.dataid and s.jobid = i.jobid and coalesce(s.status, '') <> 'READY');

-- name: page_of_keys
-- Where the next so many keys end; none if there are fewer.
select jobid, idempotency from streamkey
where (jobid, idempotency) > (:first_job, :first)
  and (cast(:jobid as text) is null or jobid = :jobid)
order by jobid, idempotency limit 1 offset :size;

-- name: count_keys
-- How many keys are to go: old ones, none of whose items will have a payload after this cleaning.
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
-- Forget a page of them.
delete from streamkey as k
where (k.jobid, k.idempotency) > (:first_job, :first)
  and (:last_page or (k.jobid, k.idempotency) <= (:last_job, :last))
  and k.received < :forgotten and (cast(:jobid as text) is null or k.jobid = :jobid)
  and not exists (
      select 1 from streamitem i
      where i.jobid = k.jobid and i.idempotency = k.idempotency and i.idempotency is not null
        and i.payload is not null);
