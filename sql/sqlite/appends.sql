-- name: parts
-- The bytes that were appended to a file for some chunks, the newest last.
select p.dataid, p.generation, p.start, p.length, p.digest
from json_each(:dataids) as asked cross join csvpart p on p.dataid = asked.value and p.journal = :journal
order by p.generation;

-- name: add
-- Record where the bytes of chunks are.
insert into csvpart (dataid, journal, generation, jobid, start, length, digest)
select value ->> 'dataid', :journal, value ->> 'generation', :jobid, value ->> 'start', value ->> 'length',
       value ->> 'digest'
from json_each(:parts) where true
on conflict (dataid, journal, generation) do update
    set start = excluded.start, length = excluded.length, digest = excluded.digest;

-- name: forget_older
-- Delete records that newer bytes of the same chunks have replaced.
delete from csvpart
where dataid in (select value ->> 'dataid' from json_each(:parts)) and journal = :journal
  and generation < (
      select max(n.value ->> 'generation') from json_each(:parts) n where n.value ->> 'dataid' = csvpart.dataid);
