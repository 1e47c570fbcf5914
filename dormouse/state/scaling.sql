-- name: hold
-- Locks the table's row, so that other changes of its leaves wait. Returns the current epoch, and the epoch before the wait.
with began as materialized (select epoch from tables where table_id = %(table_id)s)
select t.epoch, b.epoch from tables t, began b where t.table_id = %(table_id)s for no key update of t;

-- name: answered
-- The epoch of a request that was applied before, and the partitions that it sealed and created.
select epoch, sealed, created from epoch where table_id = %(table_id)s and request_id = %(request_id)s;

-- name: stored
-- Some partitions, as they are now.
select {partition_and_state}
from partition p
where table_id = %(table_id)s and partition_id = any(%(partition_ids)s::text[]);

-- name: above
-- The partitions above one, nearest first, up to a number of levels.
with recursive above as (
    select p.*, 0 as level from partition p where table_id = %(table_id)s and partition_id = %(partition_id)s
    union all
    select p.*, a.level + 1
    from above a
    cross join lateral (
        select * from partition p where p.table_id = %(table_id)s and p.partition_id = a.parent_id offset 0
    ) p
    where a.level < %(levels)s
)
select {partition_and_state} from above p where level > 0 order by level;

-- name: below
-- A partition and those below it, at most so many.
with recursive below as (
    select p.* from partition p where table_id = %(table_id)s and partition_id = %(partition_id)s
    union all
    select p.*
    from below b
    cross join lateral (values (b.left_id), (b.right_id)) as half (partition_id)
    cross join lateral (
        select * from partition p where p.table_id = %(table_id)s and p.partition_id = half.partition_id offset 0
    ) p
)
select {partition_and_state} from below p limit %(limit)s;

-- name: partition_and_state
-- Part of a query: the columns of a partition p, whether it is the upper half of its parent, and when it was sealed.
p.partition_id, p.parent_id, p.min_keys, p.max_keys, p.split_key, p.split_point, p.left_id, p.right_id, p.is_upper,
p.sealed_epoch

-- name: seal
-- Seals leaves at an epoch: one that is divided in two, or some that are merged.
update partition p
set sealed_epoch = %(epoch)s, sealed_rows = s.row_count, sealed_bytes = s.byte_count, split_key = %(split_key)s,
    split_point = %(split_point)s, left_id = %(left_id)s, right_id = %(right_id)s, merged_epoch = %(merged_epoch)s,
    merged_id = %(merged_id)s
from unnest(%(partition_ids)s::text[], %(row_counts)s::bigint[], %(byte_counts)s::bigint[])
    as s (partition_id, row_count, byte_count)
where p.table_id = %(table_id)s and p.partition_id = s.partition_id collate "C";

-- name: leave
-- Removes divided partitions from the tree at an epoch, as the leaves below them are merged.
update partition
set merged_epoch = %(merged_epoch)s, merged_id = %(merged_id)s
where table_id = %(table_id)s and partition_id = any(%(partition_ids)s::text[]);

-- name: take_place
-- Replaces one half of a partition by another partition.
update partition
set left_id = case left_id when %(before)s then %(after)s else left_id end,
    right_id = case right_id when %(before)s then %(after)s else right_id end
where table_id = %(table_id)s and partition_id = %(partition_id)s;

-- name: add_partitions
-- Adds partitions of an epoch.
insert into partition (
    table_id, partition_id, parent_id, is_upper, created_epoch, sealed_epoch, min_keys, max_keys, split_key,
    split_point, left_id, right_id
)
values (
    %(table_id)s, %(partition_id)s, %(parent_id)s, %(is_upper)s, %(created_epoch)s, %(sealed_epoch)s, %(min_keys)s::bytea[],
    %(max_keys)s::bytea[], %(split_key)s, %(split_point)s, %(left_id)s, %(right_id)s
);

-- name: add_epoch
-- Records the table's next epoch. Times of epochs strictly increase; when the clock was set back, clock_at keeps its time.
with now as (
    update tables set epoch = %(epoch)s where table_id = %(table_id)s
)
insert into epoch (
    table_id, epoch, created_at, sealed, created, splits, merges, sealed_rows, sealed_bytes, request_id,
    clock_at
)
select %(table_id)s, %(epoch)s::bigint, greatest(e.now, e.last), %(sealed)s::text[], %(created)s::text[], %(splits)s,
    %(merges)s, %(sealed_rows)s, %(sealed_bytes)s, %(request_id)s::text, case when e.now < e.last then e.now end
from (
    select clock_timestamp() as now, (
            select created_at from epoch where table_id = %(table_id)s order by created_at desc limit 1
        ) + interval '1 microsecond' as last
    offset 0
) e;

-- name: add_chunk
-- Records the running totals up to a chunk: those of the last chunk, plus the epochs since.
insert into history_chunk (table_id, chunk, splits, merges, sealed_rows, sealed_bytes)
select %(table_id)s, %(chunk)s, coalesce(c.splits, 0) + e.splits, coalesce(c.merges, 0) + e.merges,
    coalesce(c.sealed_rows, 0) + e.sealed_rows, coalesce(c.sealed_bytes, 0) + e.sealed_bytes
from (select) one
left join lateral (
    select * from history_chunk where table_id = %(table_id)s order by chunk desc limit 1
) c on true
cross join lateral (
    select coalesce(sum(splits), 0) as splits, coalesce(sum(merges), 0) as merges,
        coalesce(sum(sealed_rows), 0) as sealed_rows, coalesce(sum(sealed_bytes), 0) as sealed_bytes
    from epoch
    where table_id = %(table_id)s and epoch > 1000 * coalesce(c.chunk, 0) and epoch <= 1000 * %(chunk)s::bigint
) e;
