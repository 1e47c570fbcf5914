-- The rows that deletions list.

-- A row is written by the statement that records its deletion, never updated, and deleted together with the last row of the
-- deletion.
create table deletion_content (
    table_id integer not null references tables on delete cascade,
    -- as narrow_id gives it of the name in the deletion's condition, which has a digest of the content
    content_id uuid not null,
    deletion_id bigint not null,
    -- a Parquet file
    content bytea not null,
    constraint deletion_content_pkey primary key (table_id, content_id, deletion_id)
);
-- the content is compressed
alter table deletion_content alter column content set storage external;
