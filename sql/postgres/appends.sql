-- name: parts
-- The bytes that were appended to a file for some chunks, the newest last.
select p.dataid, p.generation, p.start, p.length, p.digest
from json_array_elements_text(cast(:dataids as json)) as asked(dataid)
    join csvpart p on p.dataid = asked.dataid and p.journal = :journal
order by p.generation;

-- name: add
-- Record where the bytes of chunks are.
insert into csvpart (dataid, journal, generation, jobid, start, length, digest)
select dataid, :journal, generation, :jobid, start, length, digest
from json_to_recordset(cast(:parts as json))
    as n(dataid text, generation bigint, start bigint, length bigint, digest text)
on conflict (dataid, journal, generation) do update
    set start = excluded.start, length = excluded.length, digest = excluded.digest;

-- name: forget_older
-- Delete records that newer bytes of the same chunks have replaced.
delete from csvpart p
using json_to_recordset(cast(:parts as json)) as n(dataid text, generation bigint)
where p.dataid = n.dataid and p.journal = :journal and p.generation < n.generation;
