-- What was found to be lost when a table was counted again: told until somebody accepts it.

create table difference (
    table_id integer not null references tables on delete cascade,
    -- '' where it is not known
    partition_id text collate "C" not null,
    filename text collate "C" not null,
    detail text not null,
    found_at timestamptz not null default clock_timestamp(),
    -- when somebody said that what is there is right; null: nobody has
    accepted_at timestamptz,
    constraint difference_pkey primary key (table_id, partition_id, filename, detail)
);

-- days of the log of removals that had any were dropped up to then
alter table instance add column removals_since timestamptz not null default clock_timestamp();

-- removals that are deleted by hand are to be missed: what clears a table makes its totals void by itself
drop trigger removal_cleared on removal;
