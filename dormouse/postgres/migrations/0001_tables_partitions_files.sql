-- Instances, tables, partitions, files and file references.

create table instance (
    singleton boolean primary key default true constraint instance_is_one check (singleton),
    instance_id uuid not null default gen_random_uuid(),
    created_at timestamptz not null default now()
);
insert into instance default values;

create table tables (
    table_id integer generated always as identity constraint tables_pkey primary key,
    name text collate "C" not null constraint tables_name_unique unique,
    schema jsonb not null,
    properties jsonb not null,
    -- how references and counts are stored
    layout text not null constraint tables_layout_known check (layout in ('file_table')),
    -- the version of the set of leaf partitions
    epoch bigint not null default 0 constraint tables_epoch_counts check (epoch >= 0),
    -- removals visible in it have been looked at by garbage collection's first stage
    collected_till pg_snapshot not null default pg_current_snapshot(),
    created_at timestamptz not null default now()
);

create table partition (
    table_id integer not null references tables on delete cascade,
    partition_id text collate "C" not null,
    parent_id text collate "C",
    -- a leaf at epoch e: created_epoch <= e < sealed_epoch; null: still a leaf
    created_epoch bigint not null,
    sealed_epoch bigint,
    -- one element a row key, as model.keys.encode_value gives it; null: unbounded
    min_keys bytea[] not null,
    max_keys bytea[] not null,
    -- how it was divided: rows whose key lies below the point went left
    split_key smallint,
    split_point bytea,
    left_id text collate "C",
    right_id text collate "C",
    constraint partition_pkey primary key (table_id, partition_id),
    constraint partition_sealed_when_split check ((sealed_epoch is null) = (left_id is null)),
    constraint partition_split_whole
        check (num_nulls(split_key, split_point, left_id, right_id) in (0, 4)),
    constraint partition_sealed_after_created check (sealed_epoch >= created_epoch)
);
-- the leaves of a table
create index partition_leaves on partition (table_id) where sealed_epoch is null;

create table epoch (
    table_id integer not null references tables on delete cascade,
    epoch bigint not null,
    created_at timestamptz not null,
    sealed text[] not null,
    created text[] not null,
    constraint epoch_pkey primary key (table_id, epoch)
);
-- the epoch at a time
create unique index epoch_created_at on epoch (table_id, created_at);

-- One partition of these a Dormouse table, made with the table, so that vacuum, locks and drops never meet.
create table file_reference (
    table_id integer not null,
    partition_id text collate "C" not null,
    -- a hash of the filename: narrow, and known without a look-up (docs/decisions)
    file_id uuid not null,
    filename text collate "C" not null,
    row_count bigint not null constraint file_reference_rows_count check (row_count >= 0),
    count_approximate boolean not null,
    only_contains_data_for_this_partition boolean not null,
    -- the job that has claimed it; null: unassigned
    job_id text collate "C",
    last_updated timestamptz not null default clock_timestamp(),
    added_xid xid8 not null default pg_current_xact_id(),
    constraint file_reference_pkey primary key (partition_id, file_id, table_id)
) partition by list (table_id);
-- whether anything refers to a file
create index file_reference_file on file_reference (file_id);

create table file (
    table_id integer not null,
    file_id uuid not null,
    filename text collate "C" not null,
    byte_count bigint,
    row_count bigint,
    -- the smallest and largest row key, as model.keys.encode_key gives them
    min_key bytea,
    max_key bytea,
    added_at timestamptz not null default clock_timestamp(),
    -- when its last reference went, as far as garbage collection has seen; infinity: never
    unreferenced_at timestamptz not null default 'infinity',
    constraint file_pkey primary key (file_id, table_id)
) partition by list (table_id);
-- what can be collected
create index file_unreferenced on file (unreferenced_at, file_id) where unreferenced_at < 'infinity';

-- The log of removed references, dropped by day: time travel, incremental reads and collection read it.
create table removed_reference (
    table_id integer not null,
    partition_id text collate "C" not null,
    file_id uuid not null,
    row_count bigint not null,
    count_approximate boolean not null,
    only_contains_data_for_this_partition boolean not null,
    added_xid xid8 not null,
    removed_xid xid8 not null default pg_current_xact_id(),
    removed_at timestamptz not null default clock_timestamp()
) partition by range (removed_at);
-- a table's removals since a snapshot
create index removed_reference_since on removed_reference (table_id, removed_xid);
-- takes what no day's partition was made for in time, so that no removal ever fails
create table removed_reference_default partition of removed_reference default;

create table applied_commit (
    table_id integer not null references tables on delete cascade,
    -- a hash of the commit id: narrow, whatever the caller's ids are
    commit_key uuid not null,
    commit_id text collate "C" not null,
    applied_at timestamptz not null default clock_timestamp(),
    -- when nobody asks for it any more; null: never, as the same commit may be sent again at any time
    expires_at timestamptz,
    constraint applied_commit_pkey primary key (table_id, commit_key)
);
-- what can be forgotten
create index applied_commit_expired on applied_commit (table_id, expires_at) where expires_at is not null;

-- Writers announce themselves before they write, so that the objects of those that die are found again.
create table write_attempt (
    table_id integer not null,
    attempt_id uuid not null,
    -- all objects of the attempt have this prefix
    object_prefix text not null,
    started_at timestamptz not null default clock_timestamp(),
    -- set when its objects are about to be deleted: it can commit nothing any more
    abandoned_at timestamptz,
    -- set by a commit whose tasks may still write what nobody wants, until what they wrote is collected
    finished_at timestamptz,
    constraint write_attempt_pkey primary key (table_id, attempt_id),
    constraint write_attempt_ends_once check (num_nulls(abandoned_at, finished_at) > 0)
);

create table compaction_job (
    table_id integer not null references tables on delete cascade,
    job_id text collate "C" not null,
    partition_id text collate "C" not null,
    created_at timestamptz not null default clock_timestamp(),
    attempts integer not null default 0,
    -- the runner that took it is taken for dead after this
    leased_until timestamptz not null default '-infinity',
    last_error text,
    constraint compaction_job_pkey primary key (table_id, job_id, partition_id)
);
-- jobs to run
create index compaction_job_due on compaction_job (table_id, leased_until);
