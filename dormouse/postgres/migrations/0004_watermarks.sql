-- Up to where rounds of maintenance have looked, so that the next one looks only at what has changed since.

-- references that were added since a snapshot; markers (layout dummy_reference) are none
create index file_reference_added on file_reference (added_xid) where partition_id <> '';

create table watermark (
    table_id integer not null references tables on delete cascade,
    -- jobs: which leaves get compaction jobs; splits: which leaves are full; pushes: which references are above the
    -- leaves; totals: what the table consists of
    purpose text collate "C" not null
        constraint watermark_purpose_known check (purpose in ('jobs', 'splits', 'pushes', 'totals')),
    -- what is visible in it has been looked at
    till pg_snapshot not null default pg_current_snapshot(),
    -- likewise, of the table's epochs
    epoch bigint not null default 0,
    -- when everything was looked at last, whether it had changed or not; null: never, or what was found is void
    whole_at timestamptz,
    -- when it was looked at last
    looked_at timestamptz not null default clock_timestamp(),
    -- how it was looked at, such as the strategy of compaction; with totals, what there is
    facts jsonb not null default '{}',
    -- counts the looks
    version bigint not null default 0,
    constraint watermark_pkey primary key (table_id, purpose)
);
alter table watermark set (fillfactor = 50);

-- Partitions to be looked at whether they have changed or not. Rows are only added and removed, never shared: who
-- removes what it has seen cannot remove what another adds meanwhile for the same partition.
create table dirty_partition (
    mark_id bigint generated always as identity constraint dirty_partition_pkey primary key,
    table_id integer not null,
    -- as of watermark
    purpose text collate "C" not null,
    partition_id text collate "C" not null
);
-- what is to be looked at, in order
create index dirty_partition_of on dirty_partition (table_id, purpose, partition_id);

-- jobs to run, those that nobody has had before those whose runner died, oldest first
create index compaction_job_next on compaction_job (table_id, leased_until, created_at);
drop index compaction_job_due;

-- what can be collected, in the order in which it is read, a page at a time
create index file_collectable on file (file_id) where unreferenced_at < 'infinity';
drop index file_unreferenced;

-- Removals leave the log a day at a time; they are deleted from it only with all files of a table, also by a Dormouse
-- that knows of no totals. What was counted is void then, and what is being counted is not remembered.
create function void_totals() returns trigger language plpgsql as $$
begin
    insert into dormouse.watermark as w (table_id, purpose)
    select table_id, 'totals' from dormouse.tables order by table_id for key share
    on conflict (table_id, purpose) do update set whole_at = null, version = w.version + 1;
    return null;
end
$$;
create trigger removed_reference_cleared after delete on removed_reference
    for each statement execute function void_totals();

-- Rows know the transaction and the table that they were written in: when these are others, all was copied into another
-- cluster, whose transaction ids are others.
alter table migration add column written_xid xid8, add column written_in oid;
