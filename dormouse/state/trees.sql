-- name: epoch
-- The table's current epoch, and when it was made, in microseconds since 1970; null if the row of the epoch is lost.
select t.epoch, (extract(epoch from e.created_at) * 1000000)::bigint
from tables t
left join epoch e on e.table_id = t.table_id and e.epoch = t.epoch
where t.table_id = %(table_id)s;

-- name: columns
-- Part of a query: the partitions of a page as columns of bytes. All aggregates read the rows in the same order.
max(partition_id), string_agg(int4send(octet_length(partition_id)), ''),
string_agg(convert_to(partition_id, 'UTF8'), ''), string_agg(int8send(created_epoch), ''),
string_agg(int8send(case when divided then sealed_epoch else -1 end), ''),
string_agg(int2send(case when divided then split_key else -1::smallint end), ''),
string_agg(int4send(case when divided then octet_length(split_point) else 0 end), ''),
coalesce(string_agg(split_point, '') filter (where divided), ''),
string_agg(int4send(coalesce(octet_length(parent_id), 0)), ''),
coalesce(string_agg(convert_to(parent_id, 'UTF8'), ''), ''),
string_agg(case when is_upper then '\x01'::bytea else '\x00'::bytea end, '')

-- name: partition_columns
-- A page of the partitions that are in the tree and were there at an epoch, as they were then, sorted by id.
select {columns}
from (
    select *, coalesce(sealed_epoch <= %(epoch)s, false) as divided
    from partition
    where table_id = %(table_id)s and partition_id > %(after)s and created_epoch <= %(epoch)s and merged_epoch is null
    order by partition_id
    limit %(limit)s
) page;

-- name: last_merge
-- The last epoch in which partitions were merged or before which epochs were forgotten; 0 if there is none.
select greatest(
    (select max(merged_epoch) from partition where table_id = %(table_id)s and merged_epoch is not null),
    (select forgotten_epoch from truncation where table_id = %(table_id)s),
    0
);

-- name: leaves_at
-- Part of a query: the leaves of an epoch. Those that were sealed since are found with a relational interval tree (Kriegel,
-- Pötke, Seidl 2000): the interval of epochs of each sealed leaf is stored at a fork node, and an interval that contains the
-- epoch is stored at one of the nodes on the path from the root to it.
leaf_at as materialized (
    select l.*
    from tables t
    cross join lateral (
        select %(epoch)s::bigint >> bit + 1 << bit + 1 | (1::bigint << bit) as node
        from generate_series(0, 62) as bit
        where 1::bigint << bit <= t.epoch
        union
        select %(epoch)s::bigint
    ) n
    cross join lateral (
        select p.*
        from partition p
        where n.node <= %(epoch)s and p.table_id = %(table_id)s and p.fork = n.node and p.sealed_epoch > %(epoch)s
        union all
        select p.*
        from partition p
        where n.node > %(epoch)s and p.table_id = %(table_id)s and p.fork = n.node and p.created_epoch <= %(epoch)s
        offset 0
    ) l
    where t.table_id = %(table_id)s
    union all
    select * from partition where table_id = %(table_id)s and sealed_epoch is null and created_epoch <= %(epoch)s
)

-- name: is_forgotten
-- Part of a query: whether some partitions of an epoch were forgotten.
exists (select from truncation where table_id = %(table_id)s and forgotten_epoch > %(epoch)s)

-- name: forgotten
-- The oldest epoch of which all partitions are kept.
select forgotten_epoch from truncation where table_id = %(table_id)s;

-- name: columns_at
-- The tree of an epoch, in pages: its leaves and all partitions above them.
with recursive {leaves_at}, tree as (
    select partition_id, parent_id, is_upper, created_epoch, sealed_epoch, split_key, split_point from leaf_at
    union
    select p.partition_id, p.parent_id, p.is_upper, p.created_epoch, p.sealed_epoch, p.split_key, p.split_point
    from tree c
    cross join lateral (
        select * from partition p where p.table_id = %(table_id)s and p.partition_id = c.parent_id offset 0
    ) p
)
select {columns}
from (
    select *, coalesce(sealed_epoch <= %(epoch)s, false) as divided, (row_number() over () - 1) / %(limit)s as page
    from tree
    where not {is_forgotten}
) pages
group by page;

-- name: changed_partitions
-- The partitions that were added, divided or removed after an epoch and up to another; when the former was made, and
-- whether some of its partitions were forgotten.
with recursive listed as (
    select unnest(e.sealed || e.created) collate "C" as partition_id
    from epoch e
    where e.table_id = %(table_id)s and e.epoch > %(after)s and e.epoch <= %(epoch)s
    union
    select partition_id
    from partition
    where table_id = %(table_id)s and merged_epoch > %(after)s and merged_epoch <= %(epoch)s
), changed as (
    select p.*
    from listed l
    cross join lateral (
        select * from partition p where p.table_id = %(table_id)s and p.partition_id = l.partition_id offset 0
    ) p
    union
    -- a scale may divide partitions that it made itself: no epoch lists them
    select a.*
    from changed c
    cross join lateral (
        select * from partition p where p.table_id = %(table_id)s and p.partition_id = c.parent_id offset 0
    ) a
    where a.created_epoch > %(after)s and a.created_epoch = a.sealed_epoch
)
select partition_id, created_epoch, parent_id, is_upper, sealed_epoch, split_key, split_point, merged_epoch,
    (select (extract(epoch from e.created_at) * 1000000)::bigint from epoch e where e.table_id = %(table_id)s and e.epoch = %(after)s),
    exists (select from truncation where table_id = %(table_id)s and forgotten_epoch > %(after)s)
from changed;

-- name: walk
-- The partitions, from the root down, that overlap a range of each row key; and the current epoch.
with recursive walk as (
    select partition_id, created_epoch, parent_id, is_upper, sealed_epoch, split_key, split_point, merged_epoch, left_id, right_id
    from partition
    where table_id = %(table_id)s and parent_id is null and is_upper is null and merged_epoch is null
    union all
    select p.partition_id, p.created_epoch, p.parent_id, p.is_upper, p.sealed_epoch, p.split_key, p.split_point,
        p.merged_epoch, p.left_id, p.right_id
    from walk w
    {wanted_halves}
    join partition p on p.table_id = %(table_id)s and p.partition_id = case when child.is_upper then w.right_id else w.left_id end
    -- null means that the range has an open end there, which overlaps
    where child.wanted is not false and w.left_id is not null
)
select partition_id, created_epoch, parent_id, is_upper, sealed_epoch, split_key, split_point, merged_epoch,
    (select epoch from tables where table_id = %(table_id)s)
from walk
limit %(limit)s;

-- name: walk_at
-- The same at an older epoch. Merges give a partition several halves on one side, one after another: the last one made
-- by the epoch counts.
with recursive walk as (
    (
        select partition_id, created_epoch, parent_id, is_upper, sealed_epoch, split_key, split_point, merged_epoch
        from partition
        where table_id = %(table_id)s and parent_id is null and is_upper is null and created_epoch <= %(epoch)s
            and not {is_forgotten}
        order by created_epoch desc
        limit 1
    )
    union all
    select p.*
    from walk w
    {wanted_halves}
    cross join lateral (
        select p.partition_id, p.created_epoch, p.parent_id, p.is_upper, p.sealed_epoch, p.split_key, p.split_point,
            p.merged_epoch
        from partition p
        where p.table_id = %(table_id)s and p.parent_id = w.partition_id and p.is_upper = child.is_upper
            and p.created_epoch <= %(epoch)s
        order by p.created_epoch desc
        limit 1
    ) p
    where child.wanted is not false and w.sealed_epoch <= %(epoch)s
)
select w.*, %(epoch)s::bigint from walk w limit %(limit)s;

-- name: wanted_halves
-- Part of a walk: the halves of a partition w, and whether they overlap the ranges.
cross join lateral (
    values
    (false, (%(mins)s::bytea[])[w.split_key + 1] < w.split_point),
    (true, (%(maxs)s::bytea[])[w.split_key + 1] > w.split_point
        or ((%(maxs)s::bytea[])[w.split_key + 1] = w.split_point
            and (%(maxs_inclusive)s::boolean[])[w.split_key + 1]))
) as child (is_upper, wanted)
