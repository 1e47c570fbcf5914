-- name: add_table
-- Adds the row of a table, without a partition tree.
insert into tables (name, schema, properties, layout)
values (%(name)s, %(schema)s, %(properties)s, %(layout)s)
returning table_id, table_uuid

-- name: copy_partitions
-- Copies all partitions of a table.
copy partition (
    table_id, partition_id, parent_id, created_epoch, sealed_epoch, min_keys, max_keys, split_key, split_point,
    left_id, right_id, is_upper
) from stdin

-- name: add_epoch
-- Adds the first epoch, in which all leaves were made.
insert into epoch (table_id, epoch, created_at, sealed, created)
values (%(table_id)s, 0, clock_timestamp(), '{}', %(created)s)

-- name: make_stock
-- Creates a table for the references of one table at a time, with the facts of their files.
create temp table stock (
    partition_id text, file_id uuid, filename text, byte_count bigint, row_count bigint, min_key bytea,
    max_key bytea, job_id text
)

-- name: make_facts
-- Shows the files of the stock, if each has one reference.
create temp view fact as
select file_id, filename, byte_count, row_count, min_key, max_key, null::uuid as digest,
    0::bigint as deletions_till, null::bigint[] as deletions_left, now() as added_at, null::timestamptz as unreferenced_at
from stock

-- name: make_shared_facts
-- Shows the files of the stock, if several leaves refer to each.
create temp view fact as
select distinct file_id, filename, byte_count, row_count, min_key, max_key, null::uuid as digest,
    0::bigint as deletions_till, null::bigint[] as deletions_left, now() as added_at, null::timestamptz as unreferenced_at
from stock

-- name: copy_stock
-- Copies the references of a table.
copy stock from stdin

-- name: add_references
-- Adds the copied references to the relation that belongs to the table.
insert into {file_reference} (
    table_id, partition_id, file_id, filename, row_count, count_approximate,
    only_contains_data_for_this_partition, job_id
)
select %(table_id)s, partition_id, file_id, filename, row_count, false, true, job_id
from stock
order by partition_id collate "C"

-- name: copy_jobs
-- Copies the jobs that have claimed files.
copy compaction_job (table_id, job_id, partition_id) from stdin
