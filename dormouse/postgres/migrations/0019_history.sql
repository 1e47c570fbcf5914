-- The history of a table: partitions that are merged, epochs with what they did, cuts, consumers, truncations.

-- In the tree at epoch e: created_epoch <= e < merged_epoch; a leaf at e: created_epoch <= e < sealed_epoch.
alter table partition
    drop constraint partition_sealed_when_split,
    -- of its parent's halves the upper; null: the root
    add column is_upper boolean,
    -- when it left the tree, as a leaf took the place of it and all around it; null: it is in the tree
    add column merged_epoch bigint,
    -- that leaf
    add column merged_id text collate "C",
    -- what it held when it was sealed; null: not known
    add column sealed_rows bigint,
    add column sealed_bytes bigint,
    add constraint partition_merged_whole check (num_nulls(merged_epoch, merged_id) in (0, 2)),
    add constraint partition_sealed_when_split_or_merged
        check ((sealed_epoch is null) = (left_id is null and merged_epoch is null)),
    add constraint partition_merged_after_sealed check (merged_epoch >= sealed_epoch);

update partition c
set is_upper = c.partition_id = p.right_id
from partition p
where p.table_id = c.table_id and p.partition_id = c.parent_id;

-- the partitions of the tree as it is
create index partition_in_tree on partition (table_id, partition_id) where merged_epoch is null;
-- the leaves, and those that were there at an epoch
drop index partition_leaves;
create index partition_leaves on partition (table_id, created_epoch) where sealed_epoch is null;
-- those that left it since an epoch
create index partition_merged on partition (table_id, merged_epoch) where merged_epoch is not null;
-- whether one left it: hardly any did, and this is asked with each commit
create index partition_merged_by_id on partition (table_id, partition_id) where merged_epoch is not null;
-- the halves of a partition, one after another; and the roots. Both of some partitions alone, so that no look-up of one by its
-- id is planned on them: where there are no statistics, any index of the table's looks as good.
create index partition_halves on partition (table_id, parent_id, is_upper, created_epoch) where is_upper is not null;
create index partition_roots on partition (table_id, created_epoch) where parent_id is null;

-- Where an interval of epochs is kept in the virtual tree over them, so that those which hold an epoch are found by one
-- look-up for each bit of it: Kriegel, Pötke, Seidl, "Managing Intervals Efficiently in Object-Relational Databases",
-- VLDB 2000. Of [first, last]: its node that is divided most seldom; null: the interval is empty.
create function interval_fork(first bigint, last bigint) returns bigint
language sql immutable parallel safe as $$
select case
    when last < first then null
    -- the bits of last down to the first in which both differ
    else last & ~((d5 | (d5 >> 32)) >> 1)
end
from (select d4 | (d4 >> 16) as d5 from (select d3 | (d3 >> 8) as d4 from (select d2 | (d2 >> 4) as d3 from (
    select d1 | (d1 >> 2) as d2 from (select (first # last) | ((first # last) >> 1) as d1) a
) b) c) d) e
$$;
alter table partition
    add column fork bigint generated always as (interval_fork(created_epoch, sealed_epoch - 1)) stored;
-- the partitions that were leaves at an epoch
create index partition_by_end on partition (table_id, fork, sealed_epoch) where fork is not null;
create index partition_by_start on partition (table_id, fork, created_epoch) where fork is not null;

-- 3: visible in every snapshot
alter table epoch
    add column added_xid xid8 not null default '3',
    add column splits integer not null default 0,
    add column merges integer not null default 0,
    -- what was sealed
    add column sealed_rows bigint not null default 0,
    add column sealed_bytes bigint not null default 0,
    -- of the request that asked for it; null: it had none
    add column request_id text collate "C";
alter table epoch alter column added_xid set default pg_current_xact_id();
update epoch set splits = cardinality(sealed) where epoch > 0;
create unique index epoch_by_request on epoch (table_id, request_id) where request_id is not null;

-- Running totals of a table's epochs up to and with the last of a thousand: no sum walks the history.
create table history_chunk (
    table_id integer not null references tables on delete cascade,
    -- epochs chunk * 1000 - 999 to chunk * 1000
    chunk bigint not null,
    splits bigint not null,
    merges bigint not null,
    sealed_rows numeric not null,
    sealed_bytes numeric not null,
    constraint history_chunk_pkey primary key (table_id, chunk)
);

-- Exact positions in a table's life; those of one table are totally ordered, by id.
create table cut (
    table_id integer not null references tables on delete cascade,
    cut_id bigint generated always as identity,
    -- kept until it is dropped; null: kept for as long as the table's history
    name text collate "C",
    recorded_at timestamptz not null default clock_timestamp(),
    epoch bigint not null,
    -- null: it was of another cluster, whose transaction ids are others
    snapshot pg_snapshot,
    -- what was ingested till then since the table's first cut
    rows_till numeric not null,
    bytes_till numeric not null,
    -- the first cut from which on all of that was counted; null: it itself, as the log did not reach back to the one before
    counted_from bigint,
    constraint cut_pkey primary key (table_id, cut_id),
    constraint cut_name_unique unique (table_id, name)
);
-- the last cut at a time
create index cut_recorded_at on cut (table_id, recorded_at);

-- Readers' positions, each moved only by who knows where it stands.
create table consumer (
    table_id integer not null references tables on delete cascade,
    name text collate "C" not null,
    -- counts the moves
    version bigint not null default 0,
    created_at timestamptz not null default clock_timestamp(),
    acknowledged_at timestamptz not null default clock_timestamp(),
    -- when the position was the present
    position_at timestamptz not null,
    epoch bigint not null,
    -- null: it was of another cluster
    snapshot pg_snapshot,
    constraint consumer_pkey primary key (table_id, name)
);

-- What lies wholly before it is not readable any more.
create table truncation (
    table_id integer not null references tables on delete cascade,
    cut_id bigint not null,
    epoch bigint not null,
    snapshot pg_snapshot,
    recorded_at timestamptz not null,
    truncated_at timestamptz not null default clock_timestamp(),
    constraint truncation_pkey primary key (table_id)
);

-- When a table's rows were put back to what they were at a moment: they are not what was ingested since.
create table restored (
    table_id integer not null references tables on delete cascade,
    restored_xid xid8 not null,
    moment timestamptz not null,
    restored_at timestamptz not null default clock_timestamp(),
    constraint restored_pkey primary key (table_id, restored_xid)
);

-- Merges are looked for, and have rounds, as splits do.
alter table watermark
    drop constraint watermark_purpose_known,
    add constraint watermark_purpose_known check (purpose in ('jobs', 'splits', 'pushes', 'totals', 'merges'));
alter table last_round
    drop constraint last_round_kind_known,
    add constraint last_round_kind_known check (kind in ('compaction', 'split', 'merge', 'collection'));

-- A hold of one table's files; null: of all tables'.
alter table hold add column table_id integer references tables on delete cascade;

alter table tables
    -- no moment before it can be read: removals that are not in the log any more, and files that are collected, went then
    add column history_since timestamptz,
    -- removals of before it are not in the log any more; null: none was dropped
    add column log_since timestamptz,
    -- all that is visible in it was committed by the time that the table was made here, or came here
    add column history_from pg_snapshot not null default pg_current_snapshot();
-- after the snapshot
update tables set history_since = clock_timestamp();
alter table tables
    alter column history_since set default clock_timestamp(),
    alter column history_since set not null;
