-- Versions of a table's schema: each change of its columns is a row, and rewrites no file.

-- that of `schema`, which has in itself what its columns were before; the first is 1
alter table tables add column schema_version integer not null default 1;
-- by which the attempt's files are written; those of before are of the first
alter table write_attempt add column schema_version integer not null default 1;

create table schema_change (
    table_id integer not null references tables on delete cascade,
    -- the version that it made
    version integer not null constraint schema_change_version check (version > 1),
    -- the schema of before, as moments of before have it
    was jsonb not null,
    -- what was done, to be read by people
    change text not null,
    changed_at timestamptz not null default clock_timestamp(),
    added_xid xid8 not null default pg_current_xact_id(),
    constraint schema_change_pkey primary key (table_id, version)
);
