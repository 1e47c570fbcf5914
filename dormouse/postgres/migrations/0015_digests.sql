-- What a file's bytes were when it was written: their XXH3-128, which is as wide as a UUID. Files of before have none.

alter table file add column digest uuid;
alter table file_count add column digest uuid;
-- on a file's marker alone (layout dummy_reference)
alter table file_reference add column file_digest uuid;
