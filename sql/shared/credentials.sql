-- name: values
-- Every encrypted password, once per dataset id and value: the table may have an id twice.
select distinct datasetid, encryptedpass from dataset
where encryptedpass is not null and encryptedpass <> ''
order by datasetid, encryptedpass;

-- name: replace
-- Replace an encrypted password, unless it has changed since it was read.
update dataset set encryptedpass = :new
where encryptedpass = :old and (datasetid = :datasetid or (datasetid is null and cast(:datasetid as text) is null));
