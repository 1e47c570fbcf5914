-- Who needs the files of a moment: collection leaves what was referred to since.

create table hold (
    holder text collate "C" constraint hold_pkey primary key,
    -- what lost its last reference before is not held
    since timestamptz not null,
    snapshot pg_snapshot not null default pg_current_snapshot(),
    -- the holder is taken for dead after this
    until timestamptz not null
);
