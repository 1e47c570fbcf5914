-- The layouts salted_counts and dummy_reference; the commit queue, and what became of requests.

alter table tables
    drop constraint tables_layout_known,
    add constraint tables_layout_known check (layout in ('file_table', 'salted_counts', 'dummy_reference'));

-- facts of a file, on its marker alone (layout dummy_reference)
alter table file_reference
    add column file_byte_count bigint,
    add column file_row_count bigint,
    add column file_min_key bytea,
    add column file_max_key bytea,
    add column file_added_at timestamptz,
    -- nothing refers to the file, as far as collection has seen; an index on the time alone, which every
    -- assignment changes, would make it write all indexes
    add column file_unreferenced boolean;

-- Whether anything refers to a file. Of a hash: it is narrow, and no look-up of a reference by its key can be
-- planned through it, where all jobs of a table would read the same pages, and conflict when serializable.
drop index file_reference_file;
create index file_reference_file on file_reference (uuid_hash(file_id));

-- Layout salted_counts: how many references a file has, split over rows so that commits rarely meet in one.
create table file_count (
    table_id integer not null,
    file_id uuid not null,
    -- a hash of the partition id; -1: the file itself, with its name and facts
    salt smallint not null,
    -- of the file itself: null, or 0 when it was added without references
    count integer,
    -- indexed in place of the count, so that a change of the count alone writes no index
    is_zero boolean generated always as (count <= 0) stored,
    changed_at timestamptz not null default clock_timestamp(),
    filename text collate "C",
    byte_count bigint,
    row_count bigint,
    min_key bytea,
    max_key bytea,
    constraint file_count_pkey primary key (file_id, salt, table_id),
    constraint file_count_file_is_named check ((salt = -1) = (filename is not null)),
    constraint file_count_salts_count check (salt = -1 or count is not null)
) partition by list (table_id);
-- what may be collectable
create index file_count_zero on file_count (file_id) where is_zero;

-- Every file of every table, whatever the layout.
create view tracked_file as
select table_id, file_id from file
union all
select table_id, file_id from file_count where salt = -1
union all
select table_id, file_id from file_reference where partition_id = '';

-- a foreign key's check locks the table's row, in which all its commits would meet
alter table applied_commit drop constraint applied_commit_table_id_fkey;
alter table compaction_job drop constraint compaction_job_table_id_fkey;
-- what the commit changes, as a hash: the same id with other content is a mistake
alter table applied_commit add column content uuid;

-- Requests that were refused for good, for their submitters to find.
create table rejected_commit (
    commit_key uuid not null constraint rejected_commit_pkey primary key,
    commit_id text collate "C" not null,
    -- null: no such table
    table_id integer,
    error_class text not null,
    error text not null,
    rejected_at timestamptz not null default clock_timestamp()
);
-- what can be forgotten
create index rejected_commit_at on rejected_commit (rejected_at);

-- The commit queue of instances that have no other.
create table commit_message (
    queue smallint not null,
    -- of the commit id; of the body itself when that names none
    commit_key uuid not null,
    message_id uuid not null default gen_random_uuid(),
    body text not null,
    sent_at timestamptz not null default clock_timestamp(),
    -- taken by a committer until then, or to be tried again then
    visible_at timestamptz not null default clock_timestamp(),
    receive_count integer not null default 0,
    -- also tells whether a commit is pending
    constraint commit_message_pkey primary key (commit_key, message_id)
);
alter table commit_message set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
-- what can be received, oldest first
create index commit_message_visible on commit_message (queue, visible_at);

-- Messages that could not be handled.
create table dead_commit_message (
    message_id uuid not null constraint dead_commit_message_pkey primary key,
    queue smallint not null,
    commit_key uuid,
    body text not null,
    sent_at timestamptz not null,
    receive_count integer not null,
    reason text not null,
    buried_at timestamptz not null default clock_timestamp()
);

-- Committers that sleep until they are notified; senders notify nobody while all are busy.
create unlogged table commit_waiter (
    queue smallint not null,
    waiter uuid not null,
    waits_until timestamptz not null,
    constraint commit_waiter_pkey primary key (queue, waiter)
);

-- Ends the transaction with a serialization failure, so that it is tried again whole.
create function lost_race(what text) returns boolean language plpgsql volatile as $$
begin
    raise serialization_failure using message = what;
end
$$;

-- Ends the transaction, as not all of a batch can be applied: its requests must be looked at one by one.
create function not_whole() returns boolean language plpgsql volatile as $$
begin
    raise exception using errcode = 'DM001', message = 'not all of the batch can be applied';
end
$$;
