-- What looking at files has found of deletions; erasures, and the files that they took out of the history.

-- Of the deletions up to deletions_till those that the file has rows of, pending or not; null: of none. The numbers up to
-- which it was looked at, and these, are facts of the file: they hold at every moment.
alter table file add column deletions_left bigint[];
-- of the file itself, of salt -1
alter table file_count add column deletions_left bigint[];
-- on a file's marker alone (layout dummy_reference)
alter table file_reference add column file_deletions_left bigint[];

-- when each file was found to be read for its rows, by itself or by a job; null: some may not be
alter table deletion add column read_at timestamptz;

-- whether it first looks how many rows deletions take of its file, and merges only where these are many
alter table compaction_job add column looks boolean not null default false;

-- A deletion that is made physical at once, in the history too.
create table erasure (
    table_id integer not null references tables on delete cascade,
    deletion_id bigint not null,
    began_at timestamptz not null default clock_timestamp(),
    finished_at timestamptz,
    -- files of the table, tracked or not, that were read for rows of it
    files_looked_at bigint not null default 0,
    -- what else its proof says, as JSON
    report text,
    constraint erasure_pkey primary key (table_id, deletion_id)
);

-- The files that had rows of an erasure: they are freed whatever the history keeps, and moments that need one are expired.
create table erased_file (
    table_id integer not null references tables on delete cascade,
    file_id uuid not null,
    deletion_id bigint not null,
    filename text collate "C" not null,
    row_count bigint not null,
    freed_at timestamptz,
    constraint erased_file_pkey primary key (table_id, file_id)
);

-- The backups that were taken of the instance, so that an erasure tells which hold what it erased; one that is not in its
-- place any more tells nothing.
create table backup_taken (
    place text collate "C" not null,
    name text collate "C" not null,
    taken_at timestamptz not null default clock_timestamp(),
    constraint backup_taken_pkey primary key (place, name)
);
