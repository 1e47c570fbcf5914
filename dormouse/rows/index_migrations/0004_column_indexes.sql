-- The use of the indexes that columns of builds have, so that those without use are dropped.

create unlogged table column_index (
    build_id bigint not null references build on delete cascade,
    column_id integer not null,
    -- how often PostgreSQL had scanned the index when an upkeep looked last
    scan_count bigint not null,
    -- when an upkeep first saw that count
    scanned_at timestamptz not null default clock_timestamp(),
    constraint column_index_pkey primary key (build_id, column_id)
);
