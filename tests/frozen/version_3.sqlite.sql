BEGIN TRANSACTION;
CREATE TABLE chunkfact (
    datasetid text not null, dataid text not null, generation integer not null,
    location text, rows integer, bytes integer, fingerprint text, validated integer, checks text,
    at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), jobid text, inputs text, schema text,
    primary key (datasetid, dataid, generation)
) without rowid;
INSERT INTO "chunkfact" VALUES('bobin','1',1,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','11',10,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','12',11,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','2',2,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','3',3,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','4',4,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','5',5,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','6',6,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','7',7,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','8',8,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobin','9',9,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.695','external',NULL,NULL);
INSERT INTO "chunkfact" VALUES('bobout','1',12,NULL,3,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.737','loadbob','{"bobin":1}','n:bigint');
INSERT INTO "chunkfact" VALUES('bobout','2',13,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.748','loadbob','{"bobin":2}',NULL);
INSERT INTO "chunkfact" VALUES('packed','1',18,'/data/packed/_packs/pack-0123abcd.parquet#dataid=1',1,9,NULL,NULL,NULL,'2026-11-19 08:10:06.787','sums','{"bobout":12}',NULL);
INSERT INTO "chunkfact" VALUES('packed','2',19,'/data/packed/_packs/pack-0123abcd.parquet#dataid=2',1,9,NULL,NULL,NULL,'2026-11-19 08:10:06.787','sums','{"bobout":13}',NULL);
INSERT INTO "chunkfact" VALUES('sums','1',18,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.787','sums','{"bobout":12}',NULL);
INSERT INTO "chunkfact" VALUES('sums','2',19,NULL,NULL,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06.787','sums','{"bobout":13}',NULL);
CREATE TABLE chunkrange (
    datasetid text not null, dataid text not null, lower_bound text, upper_bound text, modulus integer,
    primary key (datasetid, dataid)
);
INSERT INTO "chunkrange" VALUES('bobin','1','2024-01-01','2024-02-01',NULL);
INSERT INTO "chunkrange" VALUES('bobin','2','0',NULL,7);
CREATE TABLE claim (
    jobid text not null, dataid text not null, generation integer not null,
    owner text, runid text, started text, heartbeat text, lease_end text,
    attempts integer not null default 1, losses integer not null default 0, retry_at text,
    primary key (jobid, dataid)
);
INSERT INTO "claim" VALUES('loadbob','3',14,NULL,'run-1','2026-11-19 08:10:06.708',NULL,NULL,1,0,'2058-07-28 09:56:46.750');
INSERT INTO "claim" VALUES('loadbob','5',16,'worker of 3','run-1','2026-11-19 08:10:06.709','2026-11-19 08:10:06.709','2058-07-28 09:56:46.709',1,0,NULL);
INSERT INTO "claim" VALUES('loadbob','9',17,'forced of 3',NULL,'2026-11-19 08:10:06.765','2026-11-19 08:10:06.765','2058-07-28 09:56:46.765',1,0,NULL);
INSERT INTO "claim" VALUES('items','20',23,'items of 3',NULL,'2026-11-19 08:10:06.839','2026-11-19 08:10:06.839','2058-07-28 09:56:46.839',1,0,NULL);
INSERT INTO "claim" VALUES('gone','x',1,NULL,NULL,NULL,NULL,NULL,2,0,NULL);
CREATE TABLE dataevent (
    seq integer primary key autoincrement,
    at text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    datasetid text, jobid text, dataid text, locktype text,
    status_before text, status_after text, generation integer, who text, why text
);
INSERT INTO "dataevent" VALUES(1,'2026-11-19 08:10:06.662','bobin','other','10','OUT',NULL,'READY',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(2,'2026-11-19 08:10:06.662','','','','',NULL,'',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(3,'2026-11-19 08:10:06.662','bobin','hand','','OUT',NULL,'READY',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(4,'2026-11-19 08:10:06.662','bobin','hand','odd',NULL,NULL,NULL,NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(5,'2026-11-19 08:10:06.662','bobin','hand','none','OUT',NULL,NULL,NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(6,'2026-11-19 08:10:06.662','bobout','loadbob','lower','out',NULL,'ready',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(7,'2026-11-19 08:10:06.662','bobin','hand','word','OUT',NULL,'ARCHIVED',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(8,'2026-11-19 08:10:06.662','bobin','hand','line
break é 日本','OUT',NULL,'READY',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(9,'2026-11-19 08:10:06.662','bobin','loadbob','done','IN',NULL,'DONE',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(10,'2026-11-19 08:10:06.662','bobin','hand','done','OUT',NULL,'READY',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(11,'2026-11-19 08:10:06.662','bobin','loadbob','gone','IN',NULL,'RUNNING',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(12,'2026-11-19 08:10:06.662','bobin','loadbob','orphan','IN',NULL,'RUNNING',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(13,'2026-11-19 08:10:06.662','bobin','hand','orphan','OUT',NULL,'READY',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(14,'2026-11-19 08:10:06.662','bobout','loadbob','orphan','OUT',NULL,'RUNNING',NULL,'sql',NULL);
INSERT INTO "dataevent" VALUES(15,'2026-11-19 08:10:06.695','bobin','external','1','OUT',NULL,'READY',1,'hand','a load');
INSERT INTO "dataevent" VALUES(16,'2026-11-19 08:10:06.695','bobin','external','2','OUT',NULL,'READY',2,'hand','a load');
INSERT INTO "dataevent" VALUES(17,'2026-11-19 08:10:06.695','bobin','external','3','OUT',NULL,'READY',3,'hand','a load');
INSERT INTO "dataevent" VALUES(18,'2026-11-19 08:10:06.695','bobin','external','4','OUT',NULL,'READY',4,'hand','a load');
INSERT INTO "dataevent" VALUES(19,'2026-11-19 08:10:06.695','bobin','external','5','OUT',NULL,'READY',5,'hand','a load');
INSERT INTO "dataevent" VALUES(20,'2026-11-19 08:10:06.695','bobin','external','6','OUT',NULL,'READY',6,'hand','a load');
INSERT INTO "dataevent" VALUES(21,'2026-11-19 08:10:06.695','bobin','external','7','OUT',NULL,'READY',7,'hand','a load');
INSERT INTO "dataevent" VALUES(22,'2026-11-19 08:10:06.695','bobin','external','8','OUT',NULL,'READY',8,'hand','a load');
INSERT INTO "dataevent" VALUES(23,'2026-11-19 08:10:06.695','bobin','external','9','OUT',NULL,'READY',9,'hand','a load');
INSERT INTO "dataevent" VALUES(24,'2026-11-19 08:10:06.695','bobin','external','11','OUT',NULL,'READY',10,'hand','a load');
INSERT INTO "dataevent" VALUES(25,'2026-11-19 08:10:06.695','bobin','external','12','OUT',NULL,'READY',11,'hand','a load');
INSERT INTO "dataevent" VALUES(26,'2026-11-19 08:10:06.708','bobin','loadbob','1','IN',NULL,'RUNNING',1,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(27,'2026-11-19 08:10:06.708','bobout','loadbob','1','OUT',NULL,'RUNNING',12,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(28,'2026-11-19 08:10:06.708','bobin','loadbob','2','IN',NULL,'RUNNING',2,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(29,'2026-11-19 08:10:06.708','bobout','loadbob','2','OUT',NULL,'RUNNING',13,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(30,'2026-11-19 08:10:06.708','bobin','loadbob','3','IN',NULL,'RUNNING',3,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(31,'2026-11-19 08:10:06.708','bobout','loadbob','3','OUT',NULL,'RUNNING',14,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(32,'2026-11-19 08:10:06.709','bobin','loadbob','4','IN',NULL,'RUNNING',4,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(33,'2026-11-19 08:10:06.709','bobout','loadbob','4','OUT',NULL,'RUNNING',15,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(34,'2026-11-19 08:10:06.709','bobin','loadbob','5','IN',NULL,'RUNNING',5,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(35,'2026-11-19 08:10:06.709','bobout','loadbob','5','OUT',NULL,'RUNNING',16,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(36,'2026-11-19 08:10:06.736','bobin','loadbob','1','IN','RUNNING',NULL,1,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(37,'2026-11-19 08:10:06.737','bobout','loadbob','1','OUT','RUNNING','READY',12,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(38,'2026-11-19 08:10:06.748','bobin','loadbob','2','IN','RUNNING',NULL,2,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(39,'2026-11-19 08:10:06.748','bobout','loadbob','2','OUT','RUNNING','READY',13,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(40,'2026-11-19 08:10:06.750','bobin','loadbob','3','IN','RUNNING',NULL,3,'worker of 3','it failed, and is tried later');
INSERT INTO "dataevent" VALUES(41,'2026-11-19 08:10:06.751','bobout','loadbob','3','OUT','RUNNING','FAILED',14,'worker of 3','it failed, and is tried later');
INSERT INTO "dataevent" VALUES(42,'2026-11-19 08:10:06.756','bobin','loadbob','4','IN','RUNNING',NULL,4,'worker of 3','it failed for good');
INSERT INTO "dataevent" VALUES(43,'2026-11-19 08:10:06.756','bobout','loadbob','4','OUT','RUNNING','FAILED',15,'worker of 3','it failed for good');
INSERT INTO "dataevent" VALUES(44,'2026-11-19 08:10:06.765','bobin','loadbob','9','IN',NULL,'RUNNING',9,'forced of 3','forced');
INSERT INTO "dataevent" VALUES(45,'2026-11-19 08:10:06.765','bobout','loadbob','9','OUT',NULL,'RUNNING',17,'forced of 3','forced');
INSERT INTO "dataevent" VALUES(46,'2026-11-19 08:10:06.776','bobout','sums','1','IN',NULL,'RUNNING',12,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(47,'2026-11-19 08:10:06.776','packed','sums','1','OUT',NULL,'RUNNING',18,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(48,'2026-11-19 08:10:06.776','sums','sums','1','OUT',NULL,'RUNNING',18,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(49,'2026-11-19 08:10:06.776','bobout','sums','2','IN',NULL,'RUNNING',13,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(50,'2026-11-19 08:10:06.776','packed','sums','2','OUT',NULL,'RUNNING',19,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(51,'2026-11-19 08:10:06.776','sums','sums','2','OUT',NULL,'RUNNING',19,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(52,'2026-11-19 08:10:06.787','bobout','sums','1','IN','RUNNING',NULL,12,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(53,'2026-11-19 08:10:06.787','packed','sums','1','OUT','RUNNING','READY',18,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(54,'2026-11-19 08:10:06.787','sums','sums','1','OUT','RUNNING','READY',18,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(55,'2026-11-19 08:10:06.787','bobout','sums','2','IN','RUNNING',NULL,13,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(56,'2026-11-19 08:10:06.787','packed','sums','2','OUT','RUNNING','READY',19,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(57,'2026-11-19 08:10:06.787','sums','sums','2','OUT','RUNNING','READY',19,'worker of 3',NULL);
INSERT INTO "dataevent" VALUES(58,'2026-11-19 08:10:06.795','bobout','loadbob','11','OUT',NULL,'HOLD',NULL,'hand','wait');
INSERT INTO "dataevent" VALUES(59,'2026-11-19 08:10:06.811','sums','sums','1','OUT','READY','RESUBMIT',18,'hand','odf resubmit');
INSERT INTO "dataevent" VALUES(60,'2026-11-19 08:10:06.811','packed','sums','1','OUT','READY','RESUBMIT',18,'hand','odf resubmit');
INSERT INTO "dataevent" VALUES(61,'2026-11-19 08:10:06.826','runs','items','20','OUT',NULL,'PENDING',20,'odf serve',NULL);
INSERT INTO "dataevent" VALUES(62,'2026-11-19 08:10:06.826','runs','items','21','OUT',NULL,'PENDING',21,'odf serve',NULL);
INSERT INTO "dataevent" VALUES(63,'2026-11-19 08:10:06.826','runs','items','22','OUT',NULL,'PENDING',22,'odf serve',NULL);
INSERT INTO "dataevent" VALUES(64,'2026-11-19 08:10:06.839','runs','items','20','OUT','PENDING','RUNNING',23,'items of 3',NULL);
INSERT INTO "dataevent" VALUES(65,'2026-11-19 08:10:06.850','runs','items','2026-11-19T081006.849Z','OUT',NULL,'PENDING',NULL,'odf pipeline run',NULL);
CREATE TABLE dataflow_context (act text not null, who text, why text);
INSERT INTO "dataflow_context" VALUES('',NULL,NULL);
CREATE TABLE dataflow_meta (name text primary key, value text not null);
INSERT INTO "dataflow_meta" VALUES('schema','3');
CREATE TABLE dataset (
    datasetid text, hostname text, database text, schemaname text, tablename text, username text,
    encryptedpass text, format text, chunkcolumn text, domain text, writemode text
);
INSERT INTO "dataset" VALUES('bobin','h',NULL,NULL,NULL,NULL,NULL,NULL,'day','d',NULL);
INSERT INTO "dataset" VALUES('bobout',NULL,NULL,NULL,NULL,NULL,NULL,'parquet',NULL,NULL,'append');
INSERT INTO "dataset" VALUES('sums',NULL,NULL,NULL,NULL,NULL,NULL,'parquet',NULL,NULL,'append');
INSERT INTO "dataset" VALUES('packed',NULL,NULL,NULL,NULL,NULL,NULL,'parquet',NULL,NULL,'append');
INSERT INTO "dataset" VALUES('runs',NULL,NULL,NULL,NULL,NULL,NULL,'parquet',NULL,NULL,'append');
INSERT INTO "dataset" VALUES('bobin','again',NULL,NULL,NULL,NULL,'ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj',NULL,NULL,NULL,NULL);
INSERT INTO "dataset" VALUES(NULL,'x',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "dataset" VALUES('','',NULL,NULL,NULL,NULL,'',NULL,NULL,NULL,NULL);
INSERT INTO "dataset" VALUES('"quoted" ''twice'' %s :jobid; --',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE datastatus (
    datasetid text, jobid text, dataid text, locktype text, status text, modified text, generation integer,
    primary key (datasetid, jobid, dataid)
);
INSERT INTO "datastatus" VALUES('bobin','other','10','OUT','READY',NULL,NULL);
INSERT INTO "datastatus" VALUES('','','','','',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','','OUT','READY',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','odd',NULL,NULL,NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','none','OUT',NULL,NULL,NULL);
INSERT INTO "datastatus" VALUES('bobout','loadbob','lower','out','ready',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','word','OUT','ARCHIVED','1969-01-01 00:00:00',NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','line
break é 日本','OUT','READY',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','loadbob','done','IN','DONE',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','done','OUT','READY',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobin','loadbob','gone','IN','RUNNING','2020-01-01 00:00:00',NULL);
INSERT INTO "datastatus" VALUES('bobin','loadbob','orphan','IN','RUNNING','2020-01-01 00:00:00',NULL);
INSERT INTO "datastatus" VALUES('bobin','hand','orphan','OUT','READY',NULL,NULL);
INSERT INTO "datastatus" VALUES('bobout','loadbob','orphan','OUT','RUNNING','2020-01-01 00:00:00',NULL);
INSERT INTO "datastatus" VALUES('bobin','external','1','OUT','READY','2026-11-19 08:10:06.695',1);
INSERT INTO "datastatus" VALUES('bobin','external','2','OUT','READY','2026-11-19 08:10:06.695',2);
INSERT INTO "datastatus" VALUES('bobin','external','3','OUT','READY','2026-11-19 08:10:06.695',3);
INSERT INTO "datastatus" VALUES('bobin','external','4','OUT','READY','2026-11-19 08:10:06.695',4);
INSERT INTO "datastatus" VALUES('bobin','external','5','OUT','READY','2026-11-19 08:10:06.695',5);
INSERT INTO "datastatus" VALUES('bobin','external','6','OUT','READY','2026-11-19 08:10:06.695',6);
INSERT INTO "datastatus" VALUES('bobin','external','7','OUT','READY','2026-11-19 08:10:06.695',7);
INSERT INTO "datastatus" VALUES('bobin','external','8','OUT','READY','2026-11-19 08:10:06.695',8);
INSERT INTO "datastatus" VALUES('bobin','external','9','OUT','READY','2026-11-19 08:10:06.695',9);
INSERT INTO "datastatus" VALUES('bobin','external','11','OUT','READY','2026-11-19 08:10:06.695',10);
INSERT INTO "datastatus" VALUES('bobin','external','12','OUT','READY','2026-11-19 08:10:06.695',11);
INSERT INTO "datastatus" VALUES('bobout','loadbob','1','OUT','READY','2026-11-19 08:10:06.737',12);
INSERT INTO "datastatus" VALUES('bobout','loadbob','2','OUT','READY','2026-11-19 08:10:06.748',13);
INSERT INTO "datastatus" VALUES('bobout','loadbob','3','OUT','FAILED','2026-11-19 08:10:06.751',14);
INSERT INTO "datastatus" VALUES('bobout','loadbob','4','OUT','FAILED','2026-11-19 08:10:06.756',15);
INSERT INTO "datastatus" VALUES('bobin','loadbob','5','IN','RUNNING','2026-11-19 08:10:06.709',5);
INSERT INTO "datastatus" VALUES('bobout','loadbob','5','OUT','RUNNING','2026-11-19 08:10:06.709',16);
INSERT INTO "datastatus" VALUES('bobin','loadbob','9','IN','RUNNING','2026-11-19 08:10:06.765',9);
INSERT INTO "datastatus" VALUES('bobout','loadbob','9','OUT','RUNNING','2026-11-19 08:10:06.765',17);
INSERT INTO "datastatus" VALUES('packed','sums','1','OUT','RESUBMIT','2026-11-19 08:10:06.811',NULL);
INSERT INTO "datastatus" VALUES('sums','sums','1','OUT','RESUBMIT','2026-11-19 08:10:06.811',18);
INSERT INTO "datastatus" VALUES('packed','sums','2','OUT','READY','2026-11-19 08:10:06.787',19);
INSERT INTO "datastatus" VALUES('sums','sums','2','OUT','READY','2026-11-19 08:10:06.787',19);
INSERT INTO "datastatus" VALUES('bobout','loadbob','11','OUT','HOLD','2026-11-19 08:10:06.795',NULL);
INSERT INTO "datastatus" VALUES('runs','items','20','OUT','RUNNING','2026-11-19 08:10:06.839',23);
INSERT INTO "datastatus" VALUES('runs','items','21','OUT','PENDING','2026-11-19 08:10:06.826',21);
INSERT INTO "datastatus" VALUES('runs','items','22','OUT','PENDING','2026-11-19 08:10:06.826',22);
INSERT INTO "datastatus" VALUES('runs','items','2026-11-19T081006.849Z','OUT','PENDING','2026-11-19 08:10:06.850',NULL);
CREATE TABLE generation (last integer not null);
INSERT INTO "generation" VALUES(23);
CREATE TABLE job (jobid text, itemtype text, datasetid text, itemvalue text, modified text);
INSERT INTO "job" VALUES('loadbob','IN','bobin',NULL,'2026-11-19 08:10:06.606');
INSERT INTO "job" VALUES('loadbob','OUT','bobout',NULL,'2026-11-19 08:10:06.606');
INSERT INTO "job" VALUES('loadbob','MODE',NULL,'full','2026-11-19 08:10:06.606');
INSERT INTO "job" VALUES('sums','IN','bobout',NULL,'2026-11-19 08:10:06.619');
INSERT INTO "job" VALUES('sums','OUT','sums',NULL,'2026-11-19 08:10:06.619');
INSERT INTO "job" VALUES('sums','OUT','packed',NULL,'2026-11-19 08:10:06.619');
INSERT INTO "job" VALUES('items','OUT','runs',NULL,'2026-11-19 08:10:06.626');
INSERT INTO "job" VALUES('loadbob','IN','bobin',NULL,'2019-05-05 00:00:00');
INSERT INTO "job" VALUES(NULL,'IN','bobin',NULL,NULL);
INSERT INTO "job" VALUES('half','OUT',NULL,NULL,NULL);
INSERT INTO "job" VALUES('half',NULL,'bobin',NULL,NULL);
INSERT INTO "job" VALUES('half','in','bobin',NULL,NULL);
CREATE TABLE jobpolicy (
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
INSERT INTO "jobpolicy" VALUES('loadbob',9,3,1000000000,1000000000,NULL,NULL,NULL,NULL,'2026-11-19 08:10:06');
INSERT INTO "jobpolicy" VALUES('items',NULL,NULL,NULL,1000000000,NULL,NULL,NULL,60,'2026-11-19 08:10:06');
CREATE TABLE pending (
    jobid text not null, dataid text not null, rank integer not null, sortkey text,
    primary key (jobid, dataid)
) without rowid;
INSERT INTO "pending" VALUES('items','2026-11-19T081006.849Z',1,NULL);
INSERT INTO "pending" VALUES('items','21',1,'00221');
INSERT INTO "pending" VALUES('items','22',1,'00222');
INSERT INTO "pending" VALUES('loadbob','6',1,'0016');
INSERT INTO "pending" VALUES('loadbob','7',1,'0017');
INSERT INTO "pending" VALUES('loadbob','8',1,'0018');
INSERT INTO "pending" VALUES('loadbob','10',1,'00210');
INSERT INTO "pending" VALUES('loadbob','12',1,'00212');
INSERT INTO "pending" VALUES('loadbob','line
break é 日本',1,'line
break é 日本');
INSERT INTO "pending" VALUES('sums','1',0,NULL);
CREATE TABLE pipelinestep (
    jobid text not null, dataid text not null, generation integer not null, step integer not null,
    transformation text not null, status text not null, started text, ended text, rows integer,
    stdout text, traceback text, reason text,
    primary key (jobid, dataid, generation, step)
);
INSERT INTO "pipelinestep" VALUES('items','20',23,0,'tidy','READY',NULL,NULL,1,'printed
',NULL,NULL);
CREATE TABLE streamitem (
    jobid text not null, dataid text not null, payload text, idempotency text,
    received text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    primary key (jobid, dataid)
);
INSERT INTO "streamitem" VALUES('items','20','{"n": 1}','key-1','2026-11-19 08:10:06.826');
INSERT INTO "streamitem" VALUES('items','21','{"n": 2}','key-1','2026-11-19 08:10:06.826');
INSERT INTO "streamitem" VALUES('items','22','{"n": 3}',NULL,'2026-11-19 08:10:06.826');
CREATE TABLE streamkey (
    jobid text not null, idempotency text not null, digest text not null, dataids text not null,
    received text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
    primary key (jobid, idempotency)
) without rowid;
INSERT INTO "streamkey" VALUES('items','key-1','8ff0410a92775b36c260d9dc47e40f41bb74ce3c859fe3bc57bd63bf474e6ff9','["20", "21"]','2026-11-19 08:10:06.826');
CREATE TABLE streamtoken (
    jobid text primary key, hash text not null,
    created text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))
);
INSERT INTO "streamtoken" VALUES('items','bcccaee099496d6d4c76bb59faade840584339bddbe8fee46e12ae86fac31774','2026-11-19 08:10:06.859');
CREATE TABLE worker (
    owner text primary key, runid text not null, jobid text not null,
    started text not null, heartbeat text not null, lease_end text not null
);
INSERT INTO "worker" VALUES('worker of 3','run-1','loadbob','2024-01-01','2024-01-01','2099-01-01 00:00:00');
CREATE INDEX x_dataset on dataset (datasetid);
CREATE INDEX job_by_jobid on job (jobid);
CREATE INDEX job_by_datasetid on job (datasetid);
CREATE INDEX datastatus_by_chunk on datastatus (dataid, datasetid, jobid);
CREATE INDEX pending_in_order on pending (jobid, rank, sortkey, dataid);
CREATE INDEX dataevent_by_chunk on dataevent (dataid, datasetid);
CREATE INDEX dataevent_of_failures on dataevent (jobid, dataid) where status_after = 'FAILED';
CREATE INDEX pipelinestep_by_run on pipelinestep (jobid, generation, dataid);
CREATE INDEX streamitem_kept on streamitem (jobid, dataid) where payload is not null;
CREATE INDEX streamitem_by_key on streamitem (jobid, idempotency) where idempotency is not null;
CREATE VIEW judge as select null as jobid, null as dataid where false;
CREATE TRIGGER judge_pair instead of insert on judge begin
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
CREATE VIEW rebuild as select null as jobid where false;
CREATE TRIGGER rebuild_job instead of insert on rebuild begin
    delete from pending where jobid = new.jobid;
    insert into judge (jobid, dataid)
    select distinct new.jobid, s.dataid from job j join datastatus s on s.datasetid = j.datasetid
    where j.jobid = new.jobid and s.locktype = 'OUT' and s.dataid <> ''
      and ((j.itemtype = 'IN' and s.status = 'READY')
           or (j.itemtype = 'OUT' and s.jobid = j.jobid and s.status in ('PENDING', 'RESUBMIT', 'RERUN')));
end;
CREATE TRIGGER event_for_readers after insert on dataevent
when new.locktype = 'OUT'
    and ((new.status_before is 'READY') <> (new.status_after is 'READY')
         or ((new.status_before is 'RUNNING' or new.status_after is 'RUNNING')
             and (select act from dataflow_context) <> 'claim'))
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job where datasetid = new.datasetid and itemtype = 'IN';
end;
CREATE TRIGGER event_for_producers after insert on dataevent
when new.locktype = 'OUT'
    and not (coalesce(new.status_before, '') in ('RUNNING', 'READY', 'FAILED')
             and coalesce(new.status_after, '') in ('RUNNING', 'READY', 'FAILED'))
begin
    insert into judge (jobid, dataid)
    select distinct jobid, new.dataid from job where datasetid = new.datasetid and itemtype = 'OUT';
end;
CREATE TRIGGER event_for_consumer after insert on dataevent
when (new.locktype = 'IN' and (select act from dataflow_context) not in ('claim', 'finish'))
    or ((select act from dataflow_context) = '' and exists (
        select 1 from job where jobid = new.jobid and datasetid = new.datasetid
          and itemtype in ('IN', 'OUT') and itemtype is not new.locktype))
begin
    insert into judge (jobid, dataid) values (new.jobid, new.dataid);
end;
CREATE TRIGGER datastatus_inserted after insert on datastatus begin
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
CREATE TRIGGER datastatus_deleted after delete on datastatus begin
    insert into dataevent (datasetid, jobid, dataid, locktype, status_before, generation, who, why)
    select old.datasetid, old.jobid, old.dataid, old.locktype, old.status, old.generation,
           coalesce(who, 'sql'), why from dataflow_context;
end;
CREATE TRIGGER datastatus_updated after update on datastatus
when new.status is not old.status and new.datasetid is old.datasetid and new.jobid is old.jobid
    and new.dataid is old.dataid and new.locktype is old.locktype
begin
    insert into dataevent
        (datasetid, jobid, dataid, locktype, status_before, status_after, generation, who, why)
    select new.datasetid, new.jobid, new.dataid, new.locktype, old.status, new.status,
           coalesce(new.generation, old.generation), coalesce(who, 'sql'), why from dataflow_context;
end;
CREATE TRIGGER datastatus_rekeyed after update on datastatus
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
CREATE VIEW sent_back as select null as jobid, null as dataid, null as again where false;
CREATE TRIGGER sent_back_chunk instead of insert on sent_back begin
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
CREATE TRIGGER datastatus_sent_back after update on datastatus
when (select act from dataflow_context) = '' and new.locktype = 'OUT'
    and ((new.status in ('RESUBMIT', 'RERUN') and (old.status is null or old.status not in ('RESUBMIT', 'RERUN')
                                                   or old.locktype is not 'OUT' or new.jobid is not old.jobid
                                                   or new.dataid is not old.dataid))
         or (new.status = 'PENDING' and old.status <> 'PENDING'))
begin
    insert into sent_back values (new.jobid, new.dataid, new.status <> 'PENDING');
end;
CREATE TRIGGER datastatus_inserted_back after insert on datastatus
when (select act from dataflow_context) = '' and new.locktype = 'OUT' and new.status in ('RESUBMIT', 'RERUN')
begin
    insert into sent_back values (new.jobid, new.dataid, true);
end;
CREATE TRIGGER datastatus_taken_away after delete on datastatus
when (select act from dataflow_context) = '' and old.locktype = 'OUT' and old.status = 'RUNNING'
begin
    insert into sent_back values (old.jobid, old.dataid, false);
end;
CREATE TRIGGER datastatus_refreshed after update of status on datastatus
when (select act from dataflow_context) = '' and new.status is not old.status
begin
    update datastatus
    set modified = case when new.modified is not old.modified then new.modified
                        else strftime('%Y-%m-%d %H:%M:%f', 'now') end,
        generation = case when new.status in ('RESUBMIT', 'RERUN', 'PENDING') then null
                          else new.generation end
    where datasetid = new.datasetid and jobid = new.jobid and dataid = new.dataid;
end;
CREATE TRIGGER job_inserted after insert on job
when new.itemtype in ('IN', 'OUT') and new.jobid is not null
begin
    insert into rebuild (jobid) values (new.jobid);
end;
CREATE TRIGGER job_deleted after delete on job
when old.itemtype in ('IN', 'OUT') and old.jobid is not null
begin
    insert into rebuild (jobid) values (old.jobid);
end;
CREATE TRIGGER job_updated after update on job
when old.itemtype in ('IN', 'OUT') or new.itemtype in ('IN', 'OUT')
begin
    insert into rebuild (jobid) select old.jobid where old.jobid is not null;
    insert into rebuild (jobid) select new.jobid where new.jobid is not null and new.jobid is not old.jobid;
end;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('dataevent',65);
COMMIT;
