-- Deletions: a row says which rows are gone of the files that came before it, until compaction leaves them out.

create table deletion (
    table_id integer not null references tables on delete cascade,
    -- counts those of the table, in the order in which they and the files come after each other
    deletion_id bigint not null,
    -- what `where` said, as JSON; as text, since jsonb has neither NUL nor -0.0
    condition text not null constraint deletion_condition_bytes check (octet_length(condition) <= 65536),
    -- around what it wants of each row key, as model.keys.encode_value gives it; null: unbounded
    min_keys bytea[] not null,
    max_keys bytea[] not null,
    -- the keys, or beginnings of keys, that no key of its rows is below, or above, as model.keys.encode_key gives them
    min_key bytea not null,
    max_key bytea not null,
    -- whether it names columns that are no keys
    by_values boolean not null,
    deleted_at timestamptz not null default clock_timestamp(),
    -- the moment just before it, to read what it deleted
    epoch bigint not null,
    -- null: of another cluster, whose transaction ids are others
    snapshot pg_snapshot default pg_current_snapshot(),
    added_xid xid8 not null default pg_current_xact_id(),
    -- since when no file needs it, or a restore to a moment before it has undone it
    retired_xid xid8,
    retired_at timestamptz,
    -- a restore to a moment makes those of then pending again
    constraint deletion_pkey primary key (table_id, deletion_id, added_xid),
    constraint deletion_retired_whole check (num_nulls(retired_xid, retired_at) in (0, 2))
);
-- those that readers apply
create index deletion_pending on deletion (table_id, deletion_id) where retired_xid is null;

-- A deletion is of the rows of a file when its number is larger: those up to it came before the rows, or the file was
-- written without the rows that they match.
alter table file add column deletions_till bigint not null default 0;
-- of the file itself, of salt -1; null: 0
alter table file_count add column deletions_till bigint;
-- on a file's marker alone (layout dummy_reference); null: 0
alter table file_reference add column file_deletions_till bigint;
