-- name: row_counts
-- The rows of each leaf, summed over its references: all, and those counted exactly.
select r.partition_id, sum(r.row_count) as row_count,
    coalesce(sum(r.row_count) filter (where not r.count_approximate), 0) as exact_row_count
from {file_reference} r
join partition p on p.table_id = %(table_id)s and p.partition_id = r.partition_id and p.sealed_epoch is null
group by r.partition_id
order by r.partition_id;

-- name: row_counts_in
-- The same for some partitions.
select r.partition_id, sum(r.row_count) as row_count,
    coalesce(sum(r.row_count) filter (where not r.count_approximate), 0) as exact_row_count
from {file_reference} r
where r.partition_id = any(%(partition_ids)s)
group by r.partition_id
order by r.partition_id;

-- name: partitions_in
-- Some partitions, as they are now.
select partition_id, parent_id, min_keys, max_keys, split_key, split_point, left_id, right_id
from partition
where table_id = %(table_id)s and partition_id = any(%(partition_ids)s);

-- name: look_for_full_leaves
-- Marks the leaves with at least row_count_min rows, among those to look at; returns how many.
with {changed}, due as materialized (
    select p.partition_id
    from changed c
    {its_partition}
    cross join lateral (
        select sum(r.row_count) as row_count from {file_reference} r where r.partition_id = p.partition_id offset 0
    ) r
    where p.sealed_epoch is null and r.row_count >= %(row_count_min)s
), {remembered}
select count(*) from due;

-- name: full_leaves
-- A page of the leaves that are marked as full, with their marks and rows. Rows are null if it is no longer a leaf.
select d.partition_id, d.marks, s.row_count
from (
    select partition_id, array_agg(mark_id) as marks
    from dirty_partition
    where table_id = %(table_id)s and purpose = 'splits' and partition_id > %(after)s
    group by partition_id
    order by partition_id
    limit %(limit)s
) d
left join lateral (
    select * from partition p where p.table_id = %(table_id)s and p.partition_id = d.partition_id offset 0
) p on p.sealed_epoch is null
left join lateral (
    select sum(r.row_count) as row_count from {file_reference} r where r.partition_id = p.partition_id offset 0
) s on true
order by d.partition_id;

-- name: look_for_small_pairs
-- Marks the partitions whose halves are leaves with fewer than row_count_max rows together, among those to look at and
-- their parents; returns how many.
with {changed}, above as materialized (
    select distinct case when p.sealed_epoch is null then p.parent_id else p.partition_id end as partition_id
    from changed c
    {its_partition}
    where p.merged_epoch is null
), due as materialized (
    select n.partition_id
    from above a
    {its_halves}
    where s.row_count < %(row_count_max)s
), {remembered}
select count(*) from due;

-- name: its_halves
-- Part of a query: for each a, its partition n if both halves of it are leaves, and the rows s of all three.
cross join lateral (
    select * from partition p where p.table_id = %(table_id)s and p.partition_id = a.partition_id offset 0
) n
cross join lateral (
    select count(*) as leaves, max(p.created_epoch) as created_epoch
    from partition p
    where p.table_id = %(table_id)s and p.partition_id = any(array[n.left_id, n.right_id]) and p.sealed_epoch is null
    having count(*) = 2
    offset 0
) h
cross join lateral (
    select coalesce(sum(r.row_count), 0) as row_count
    from {file_reference} r
    where r.partition_id = any(array[n.partition_id, n.left_id, n.right_id])
    offset 0
) s

-- name: found_pairs
-- Part of a query: for each a, the pair of small leaves, or nulls if it has none. The last row has the last a, which
-- the next page follows.
select a.partition_id, f.*, a.marks
from a
left join lateral (
    select n.partition_id, n.left_id, n.right_id, s.row_count,
        extract(epoch from clock_timestamp() - e.created_at)::float8 as rested_seconds
    from (select a.partition_id) a
    {its_halves}
    left join epoch e on e.table_id = %(table_id)s and e.epoch = h.created_epoch
    where s.row_count < %(row_count_max)s
    offset 0
) f on true
order by a.partition_id

-- name: small_pairs
-- A page of the marked partitions, with their halves, rows, seconds of rest and marks. Nulls if no longer to be merged.
with a as materialized (
    select partition_id, array_agg(mark_id) as marks
    from dirty_partition
    where table_id = %(table_id)s and purpose = 'merges' and partition_id > %(after)s
    group by partition_id
    order by partition_id
    limit %(limit)s
)
{found_pairs};

-- name: all_small_pairs
-- The same for all partitions that were divided.
with a as materialized (
    select partition_id, '{}'::bigint[] as marks
    from partition
    where table_id = %(table_id)s and partition_id > %(after)s and merged_epoch is null and sealed_epoch is not null
    order by partition_id
    limit %(limit)s
)
{found_pairs};

-- name: settle
-- Removes marks of work that is done.
delete from dirty_partition where mark_id = any(%(marks)s);

-- name: note_one_key
-- Records whether all rows of a full leaf have one key. Replaces its earlier record, and deletes those of partitions that
-- are no longer leaves.
with forgotten as (
    delete from dirty_partition d
    where d.table_id = %(table_id)s and d.purpose = 'one_key' and (
        d.partition_id = %(partition_id)s or not exists (
            select from partition p
            where p.table_id = d.table_id and p.partition_id = d.partition_id and p.sealed_epoch is null
        )
    )
)
insert into dirty_partition (table_id, purpose, partition_id)
select %(table_id)s, 'one_key', %(partition_id)s
where %(is_one_key)s;

-- name: one_key_leaves
-- The leaves recorded as having one key that still have at least row_count_min rows.
select p.partition_id
from (select distinct partition_id from dirty_partition where table_id = %(table_id)s and purpose = 'one_key') c
{its_partition}
cross join lateral (
    select sum(r.row_count) as row_count from {file_reference} r where r.partition_id = p.partition_id offset 0
) r
where p.sealed_epoch is null and r.row_count >= %(row_count_min)s
order by p.partition_id
limit %(limit)s;

-- name: look_for_references_above
-- Marks the divided partitions with unassigned references, among those to look at; returns the snapshot.
with {changed}, due as materialized (
    select p.partition_id
    from changed c
    {its_partition}
    where p.sealed_epoch is not null and exists (
        select from {file_reference} r where r.partition_id = p.partition_id and r.job_id is null offset 0
    )
), {remembered}
select pg_current_snapshot()::text;

-- name: references_above
-- A page of the unassigned references of marked partitions, with the partitions' children, to push down one level. Leaves
-- out references that a snapshot did not see.
select r.file_id, p.left_id, p.right_id, r.filename, r.partition_id, r.row_count, r.job_id, r.last_updated,
    r.count_approximate, r.only_contains_data_for_this_partition
from {above} c
{its_partition}
cross join lateral (select * from {file_reference} r where r.partition_id = p.partition_id offset 0) r
where c.partition_id >= %(after_partition)s and (c.partition_id, r.file_id) > (%(after_partition)s, %(after_file)s)
    and p.sealed_epoch is not null and r.job_id is null
    and pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot)
order by c.partition_id, r.file_id
limit %(limit)s;

-- name: above
-- Part of a query: the partitions that are marked as having references to push down.
(select distinct partition_id from dirty_partition where table_id = %(table_id)s and purpose = 'pushes')

-- name: count_above
-- The number of references of divided partitions that wait to be pushed down.
select count(*)
from {above} c
{its_partition}
cross join lateral (
    select from {file_reference} r where r.partition_id = p.partition_id and r.job_id is null offset 0
) r
where p.sealed_epoch is not null;

-- name: partition_page
-- A page of the partitions after one, sorted by id: all, or the leaves alone.
select partition_id, parent_id, min_keys, max_keys, split_key, split_point, left_id, right_id
from partition
where table_id = %(table_id)s and partition_id > %(after)s and merged_epoch is null and (sealed_epoch is null or not %(leaves)s)
order by partition_id
limit %(limit)s;
