-- Small files whose bytes are in the database until they are compacted.

-- One partition of it a Dormouse table, as of file_reference. A row is written by the statement that adds its file, never
-- updated, and deleted together with the row of the file.
create table file_content (
    table_id integer not null,
    file_id uuid not null,
    -- a Parquet file
    content bytea not null,
    added_at timestamptz not null default clock_timestamp(),
    constraint file_content_pkey primary key (file_id, table_id)
) partition by list (table_id);
alter table file_content alter column content set storage external;

do $$
declare
    known integer;
    own text;
begin
    for known in select table_id from tables loop
        own := concat('file_content_', known);
        execute format('create table %I (like file_content including all) with (toast_tuple_target = 8160)', own);
        execute format('alter table file_content attach partition %I for values in (%s)', own, known);
    end loop;
end
$$;
