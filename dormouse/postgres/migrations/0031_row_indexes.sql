-- Where the indexes of row tables are, and what signs the tokens of their pages.

-- an index of a row table: a copy of its current rows in some other database
create table row_index (
    table_id integer constraint row_index_pkey primary key references row_table on delete cascade,
    -- the name of the database, as the settings give it; null: not placed yet
    database text,
    -- which of that database's; null: not built yet
    build_id bigint,
    -- when it was last asked for something; one that is idle is dropped
    used_at timestamptz not null default clock_timestamp(),
    -- the seconds that queries took, of which half are forgotten each hour, as of when it was last used
    load double precision not null default 0,
    -- why the last attempt to work on it failed, if it did
    failure text,
    failed_at timestamptz
) with (fillfactor = 70);

create table row_page_key (
    is_the_only boolean constraint row_page_key_pkey primary key default true check (is_the_only),
    key bytea not null
);
