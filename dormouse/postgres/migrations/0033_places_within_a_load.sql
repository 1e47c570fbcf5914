-- A load has places for its tasks, so that of rows of one key that of the later task is the newer one. And from when on a
-- database that was restored, copied or adopted goes its own way.

alter sequence load_sequence increment by 1048576;

-- transactions up to this one are those of the databases before
alter table incarnation add column added_xid xid8;
alter table incarnation alter column added_xid set default pg_current_xact_id();
