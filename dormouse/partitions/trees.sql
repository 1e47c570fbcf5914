-- name: epoch
-- The table's current epoch, and when it was made, in microseconds; null: its row is lost.
select t.epoch, (extract(epoch from e.created_at) * 1000000)::bigint
from tables t
left join epoch e on e.table_id = t.table_id and e.epoch = t.epoch
where t.table_id = %(table_id)s;

-- name: partition_columns
-- A page of the partitions of an epoch, by id, as columns of bytes; all of its aggregates go in one order.
select max(partition_id), string_agg(int4send(octet_length(partition_id)), ''),
    string_agg(convert_to(partition_id, 'UTF8'), ''), string_agg(int8send(created_epoch), ''),
    string_agg(int8send(case when divided then sealed_epoch else -1 end), ''),
    string_agg(int2send(case when divided then split_key else -1::smallint end), ''),
    string_agg(int4send(case when divided then octet_length(split_point) else 0 end), ''),
    coalesce(string_agg(split_point, '') filter (where divided), ''),
    coalesce(string_agg(int4send(octet_length(left_id)), '') filter (where divided), ''),
    coalesce(string_agg(convert_to(left_id, 'UTF8'), '') filter (where divided), ''),
    coalesce(string_agg(int4send(octet_length(right_id)), '') filter (where divided), ''),
    coalesce(string_agg(convert_to(right_id, 'UTF8'), '') filter (where divided), '')
from (
    select *, coalesce(sealed_epoch <= %(epoch)s, false) as divided
    from partition
    where table_id = %(table_id)s and partition_id > %(after)s and created_epoch <= %(epoch)s
    order by partition_id
    limit %(limit)s
) page;

-- name: changed_partitions
-- The partitions that came, or were divided, after an epoch and up to another; and when the former was made.
select p.partition_id, p.created_epoch, p.sealed_epoch, p.split_key, p.split_point, p.left_id, p.right_id,
    (select (extract(epoch from e.created_at) * 1000000)::bigint from epoch e where e.table_id = %(table_id)s and e.epoch = %(after)s)
from epoch e
cross join lateral unnest(e.sealed || e.created) as changed (partition_id)
join partition p on p.table_id = %(table_id)s and p.partition_id = changed.partition_id
where e.table_id = %(table_id)s and e.epoch > %(after)s and e.epoch <= %(epoch)s;

-- name: walk
-- The partitions, from the root down, that overlap a range of each row key; and the current epoch.
with recursive walk as (
    select partition_id, created_epoch, sealed_epoch, split_key, split_point, left_id, right_id
    from partition
    where table_id = %(table_id)s and partition_id = %(root)s
    union all
    select p.partition_id, p.created_epoch, p.sealed_epoch, p.split_key, p.split_point, p.left_id, p.right_id
    from walk w
    cross join lateral (
        values
        (w.left_id, (%(mins)s::bytea[])[w.split_key + 1] < w.split_point),
        (w.right_id, (%(maxs)s::bytea[])[w.split_key + 1] > w.split_point
            or ((%(maxs)s::bytea[])[w.split_key + 1] = w.split_point
                and (%(maxs_inclusive)s::boolean[])[w.split_key + 1]))
    ) as child (partition_id, wanted)
    join partition p on p.table_id = %(table_id)s and p.partition_id = child.partition_id
    -- an open end overlaps: null
    where child.wanted is not false and child.partition_id is not null
)
select w.*, (select epoch from tables where table_id = %(table_id)s)
from walk w
limit %(limit)s;
