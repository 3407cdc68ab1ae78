-- name: values
-- Every encrypted password, once for each dataset id and value: a table may have an id twice.
select distinct datasetid, encryptedpass from dataset
where encryptedpass is not null and encryptedpass <> ''
order by datasetid, encryptedpass;

-- name: replace
-- Change an encrypted password that is still what was read.
update dataset set encryptedpass = :new
where encryptedpass = :old and (datasetid = :datasetid or (datasetid is null and cast(:datasetid as text) is null));
