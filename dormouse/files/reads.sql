-- name: referenced_files
-- Every referenced file with its facts and references, by filename and partition.
select f.filename as f_filename, f.byte_count, f.row_count as f_row_count, f.min_key, f.max_key,
    f.added_at, {reference_columns}
from {file_reference} r
-- a snapshot from before a conversion has the references, but not the facts: that must show
left join ({file_facts}) f using (file_id)
where {live}
order by f.filename, r.partition_id;

-- name: files_in
-- The files of some partitions with their facts and their references there, by filename and partition.
select f.filename as f_filename, f.byte_count, f.row_count as f_row_count, f.min_key, f.max_key,
    f.added_at, {reference_columns}
from {file_reference} r
left join ({file_facts}) f using (file_id)
where r.partition_id = any(%(partition_ids)s) and {live}
order by f.filename, r.partition_id;

-- name: plan
-- What a query is planned on, of one moment: first the table's epoch, the snapshot, and for bytes when the epoch was
-- made, in microseconds; then the references of some partitions with what is known of their files.
select t.epoch, pg_current_snapshot()::text as snapshot, null as partition_id, null as filename,
    null::boolean as only_contains_data, (extract(epoch from e.created_at) * 1000000)::bigint as byte_count,
    null::bytea as min_key, null::bytea as max_key, true as is_known
from tables t
left join epoch e on e.table_id = t.table_id and e.epoch = t.epoch
where t.table_id = %(table_id)s
union all
select null, null, r.partition_id, r.filename, r.only_contains_data_for_this_partition, f.byte_count, f.min_key,
    f.max_key, f.file_id is not null
from {file_reference} r
left join ({file_facts}) f using (file_id)
where r.partition_id = any(%(partition_ids)s) and {live};

-- name: count_files
-- How many files some partitions refer to, of the first so many references.
select count(distinct file_id)
from (
    select r.file_id from {file_reference} r where r.partition_id = any(%(partition_ids)s) and {live} limit %(limit)s
) first;

-- name: plan_at
-- The references of some partitions as a snapshot had them: those of now that it saw, and those that were removed
-- since. The file of one that was collected is not known any more: its id stands for its name.
select r.partition_id, r.filename, r.only_contains_data_for_this_partition, f.byte_count, f.min_key, f.max_key,
    f.file_id is not null
from {file_reference} r
left join ({file_facts}) f using (file_id)
where r.partition_id = any(%(partition_ids)s) and {live}
    and pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
union all
select g.partition_id, coalesce(f.filename, g.file_id::text), g.only_contains_data_for_this_partition, f.byte_count,
    f.min_key, f.max_key, f.file_id is not null
from removed_reference g
left join ({file_facts}) f using (file_id)
where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
    and not pg_visible_in_snapshot(g.removed_xid, %(snapshot)s::pg_snapshot)
    and pg_visible_in_snapshot(g.added_xid, %(snapshot)s::pg_snapshot)
    and g.partition_id = any(%(partition_ids)s);

-- name: unreferenced_files
-- The first files by name that nothing refers to.
select f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.unreferenced_at
from ({file_facts}) f
where not exists (select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id and {live})
order by f.filename
limit %(limit)s;

-- name: has_files
-- Whether any file is tracked.
select exists ({file_facts});

-- name: reference_columns
-- Part of a query: the columns of a reference r.
r.filename, r.partition_id, r.row_count, r.job_id, r.last_updated, r.count_approximate,
r.only_contains_data_for_this_partition

-- name: reference_states
-- What is known of some references: their number, whether the file is tracked, the reference is there, its job.
select exists ({is_tracked}) as tracked, r.file_id is not null as found, r.job_id
from unnest(%(partition_ids)s::text[], %(file_ids)s::uuid[]) with ordinality o (partition_id, file_id, number)
left join {file_reference} r on r.partition_id = o.partition_id and r.file_id = o.file_id
order by o.number;

-- name: references
-- All references, by partition and filename.
select {reference_columns} from {file_reference} r where {live} order by partition_id, filename;

-- name: unassigned_references
-- The references that no job holds, by partition and filename.
select {reference_columns} from {file_reference} r where job_id is null and {live} order by partition_id, filename;

-- name: references_in
-- The references of some partitions, by partition and filename.
select {reference_columns}
from {file_reference} r
where partition_id = any(%(partition_ids)s) and {live}
order by partition_id, filename;

-- name: partition_to_filenames
-- The files of every partition that has some.
select partition_id, array_agg(filename order by filename)
from {file_reference} r
where {live}
group by partition_id;

-- name: file_page
-- The files after one with their facts, by id, which is a hash of the name.
select f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.added_at, f.unreferenced_at
from ({file_facts}) f
where f.file_id > %(after)s
order by f.file_id
limit %(limit)s;
