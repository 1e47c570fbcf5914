-- Streams of Spark that write into a table: the last batch of each that was committed, so that each is committed once.

create table write_stream (
    table_id integer not null references tables on delete cascade,
    name text collate "C" not null,
    -- Spark's id of the query, which is its checkpoint's
    query_id text not null,
    batch_id bigint not null,
    committed_at timestamptz not null default clock_timestamp(),
    constraint write_stream_pkey primary key (table_id, name)
);
