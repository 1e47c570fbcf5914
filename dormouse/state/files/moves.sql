-- name: sealed_sizes
-- The rows of some partitions, summed over their references, and their bytes, by their shares of each file's rows.
select l.partition_id, least(coalesce(s.row_count, 0), 9223372036854775807)::bigint,
    least(coalesce(s.byte_count, 0), 9223372036854775807)::bigint
from unnest(%(partition_ids)s::text[]) as l (partition_id)
cross join lateral (
    select sum(r.row_count) as row_count, round(sum(r.row_count::numeric * f.byte_count / nullif(f.row_count, 0))) as byte_count
    from {file_reference} r
    left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
    where r.partition_id = l.partition_id
    offset 0
) s;

-- name: first_that_stays
-- One reference of some partitions that cannot be moved: a job holds it, or its file has rows of other partitions.
select r.partition_id, r.filename, r.job_id
from {file_reference} r
where r.partition_id = any(%(partition_ids)s)
    and (r.job_id is not null or not r.only_contains_data_for_this_partition and r.partition_id <> %(same_region)s)
order by r.job_id is null, r.partition_id, r.filename
limit 1;

-- name: move
-- Moves all references of some partitions to the partition that takes their place.
with removed as (
    delete from {file_reference} r
    where r.partition_id = any(%(partition_ids)s)
    returning {removed_columns}, r.filename
), {logged}, added as (
    {into_references}
    select %(table_id)s, %(place)s, file_id, filename, least(sum(row_count), 9223372036854775807)::bigint,
        bool_or(count_approximate), bool_and(only_contains_data_for_this_partition) and count(*) = 1, false
    from removed
    group by file_id, filename
    returning partition_id, file_id
), {counts_changed}
select count(*) from removed;

-- name: places
-- For some partitions that left the tree, the partitions that took their places.
with recursive taken as (
    select partition_id, merged_id
    from partition
    where table_id = %(table_id)s and partition_id = any(%(partition_ids)s) and merged_epoch is not null
    union all
    select t.partition_id, p.merged_id
    from taken t
    cross join lateral (
        select merged_id
        from partition p
        where p.table_id = %(table_id)s and p.partition_id = t.merged_id and p.merged_epoch is not null
        offset 0
    ) p
)
-- only the last one of each chain is in the tree
select t.partition_id, t.merged_id
from taken t
where not exists (
    select from partition p
    where p.table_id = %(table_id)s and p.partition_id = t.merged_id and p.merged_epoch is not null
    offset 0
);

-- name: restore_remove
-- Part of a restore, while writers are kept out: removes the references that were added since a snapshot.
with removed as (
    delete from {file_reference} r
    where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
        and not pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
    returning {removed_columns}
), {logged}, added as (
    select partition_id, file_id from removed where false
), {counts_changed}
select count(*) from removed;

-- name: restore_add
-- Part of a restore: adds references from before, not counted as ingested; releases references that jobs hold, and deletes
-- the jobs.
with added as (
    {into_references}
    select %(table_id)s, *, false
    from unnest(
        %(ref_partition_ids)s::text[], %(ref_file_ids)s::uuid[], %(ref_filenames)s::text[],
        %(ref_row_counts)s::bigint[], %(ref_approximate)s::boolean[], %(ref_only)s::boolean[]
    )
    returning partition_id, file_id
), {counts_added}, freed as (
    update {file_reference} r set job_id = null, last_updated = clock_timestamp()
    where r.job_id is not null
    returning r.partition_id
), {mark_freed}, jobs_gone as (
    delete from compaction_job where table_id = %(table_id)s
), referenced as (
    {mark_referenced}
)
insert into restored (table_id, restored_xid, moment, number, deletion_id, epoch, snapshot)
select t.table_id, pg_current_xact_id(), %(at)s,
    1 + coalesce((select max(number) from restored where table_id = %(table_id)s), 0),
    coalesce((select max(deletion_id) from deletion where table_id = %(table_id)s), 0), t.epoch, pg_current_snapshot()
from tables t where t.table_id = %(table_id)s;
