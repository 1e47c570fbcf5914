-- Restores have a place among deletions and files, so that changes across them can be told.

alter table restored
    -- counts those of the table
    add column number bigint,
    -- the last deletion of before
    add column deletion_id bigint,
    add column epoch bigint,
    -- the moment of it, while nothing else changes the table; null: by an older Dormouse, or in another cluster
    add column snapshot pg_snapshot;
