-- The indexes that a database has of row tables of one instance, or of several.
-- All of it can be made again from the tables' files, so nothing is logged: after a crash there is none.

create unlogged table build (
    build_id bigint generated always as identity constraint build_pkey primary key,
    -- of which table, and in which life of its database
    table_uuid uuid not null,
    instance_id uuid not null,
    incarnation_id uuid not null,
    -- its rows are those of this version
    version bigint not null,
    -- rows that were superseded by this version or an older one are gone
    purged_version bigint not null,
    -- the columns that it has, by their ids
    column_ids integer[] not null,
    -- and those of them that have an index of their own
    indexed_ids integer[] not null default '{}',
    row_count bigint not null,
    built_at timestamptz not null default clock_timestamp(),
    -- another took its place: it serves pages that began on it for a while
    retired_at timestamptz
) with (fillfactor = 50);

-- the versions that it was brought to, and when: what they superseded is kept for a while
create unlogged table applied (
    build_id bigint not null references build on delete cascade,
    version bigint not null,
    applied_at timestamptz not null default clock_timestamp(),
    constraint applied_pkey primary key (build_id, version)
);
