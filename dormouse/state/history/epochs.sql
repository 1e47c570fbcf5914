-- name: leaves_then
-- Part of a query: the partitions of the table t that were leaves at the epoch e.epoch, found by the interval tree.
select p.*
from partition p
where p.table_id = t.table_id and p.sealed_epoch is null and p.created_epoch <= e.epoch
union all
-- partitions stored at a node at or below the epoch, if they ended after it
select p.*
from (select 0 as node where e.epoch = 0 union all
      select ((e.epoch >> bit) | 1) << bit from generate_series(0, 61) as bit where (e.epoch >> bit) & 1 = 1) f
cross join lateral (
    select * from partition p where p.table_id = t.table_id and p.fork = f.node and p.sealed_epoch > e.epoch offset 0
) p
union all
-- partitions stored at a node above it, if they began at or before it
select p.*
from (select ((e.epoch >> bit) | 1) << bit as node from generate_series(0, 61) as bit where (e.epoch >> bit) & 1 = 0) f
cross join lateral (
    select * from partition p where p.table_id = t.table_id and p.fork = f.node and p.created_epoch <= e.epoch offset 0
) p
where f.node <= t.epoch

-- name: epoch_then
-- Part of a query: the last epoch of the table t made at or before the time w.time; before the first, 0.
coalesce(
    (select n.epoch from epoch n where n.table_id = t.table_id and n.created_at <= w.time
     order by n.created_at desc limit 1),
    0
)

-- name: active
-- Returns the leaves of an epoch that is not truncated, or of now, by their bounds.
select p.partition_id, p.parent_id, p.min_keys, p.max_keys
from tables t
left join truncation c on c.table_id = t.table_id
cross join lateral (select coalesce(%(epoch)s::bigint, t.epoch) as epoch) e
cross join lateral ({leaves_then}) p
where t.table_id = %(table_id)s and e.epoch between coalesce(c.epoch, 0) and t.epoch
order by array_replace(p.min_keys, null, '');

-- name: active_at
-- Returns the leaves at a time, by their bounds, or a row of nulls. For a time before the truncation: the leaves of the
-- truncation that were made by then.
select p.partition_id, p.parent_id, p.min_keys, p.max_keys
from tables t
left join truncation c on c.table_id = t.table_id
cross join (values (%(time)s::timestamptz)) as w (time)
cross join lateral (select {epoch_then} as epoch) w_epoch
cross join lateral (select greatest(w_epoch.epoch, c.epoch) as epoch) e
left join lateral ({leaves_then}) p on w_epoch.epoch = e.epoch or p.created_epoch = 0 or exists (
    select from epoch n
    where n.table_id = t.table_id and n.epoch = p.created_epoch and n.created_at <= w.time
    offset 0
)
where t.table_id = %(table_id)s
order by array_replace(p.min_keys, null, '');

-- name: epoch_at
-- Returns the epoch at a time, and the first that is not truncated.
select {epoch_then}, coalesce(c.epoch, 0)
from tables t
left join truncation c on c.table_id = t.table_id
cross join (values (%(time)s::timestamptz)) as w (time)
where t.table_id = %(table_id)s;

-- name: ends
-- Returns the table's first epoch that is not truncated, and its last.
select coalesce(c.epoch, 0), t.epoch from tables t left join truncation c on c.table_id = t.table_id where t.table_id = %(table_id)s;

-- name: page
-- Returns the table's first epoch that is not truncated, its last, and a page of its epochs from one (or the first) to another.
select coalesce(c.epoch, 0), t.epoch, e.epoch, e.created_at, e.sealed, e.created, e.splits, e.merges, e.sealed_rows,
    e.sealed_bytes
from tables t
left join truncation c on c.table_id = t.table_id
left join lateral (
    select * from epoch e
    where e.table_id = t.table_id and e.epoch between coalesce(%(first)s::bigint, c.epoch, 0) and %(last)s
    order by e.epoch
    limit %(limit)s
) e on true
where t.table_id = %(table_id)s
order by e.epoch;

-- name: scales
-- Returns the epochs at two times; the sums of the epochs after the former up to the latter, from the nearest running totals;
-- and the first epoch that is not truncated.
select min(x.epoch), max(x.epoch), sum(x.sign * (coalesce(c.splits, 0) + s.sign * s.splits)),
    sum(x.sign * (coalesce(c.merges, 0) + s.sign * s.merges)),
    sum(x.sign * (coalesce(c.sealed_rows, 0) + s.sign * s.sealed_rows)),
    sum(x.sign * (coalesce(c.sealed_bytes, 0) + s.sign * s.sealed_bytes)),
    coalesce((select epoch from truncation where table_id = %(table_id)s), 0)
from (
    select {epoch_then} as epoch, w.sign
    from tables t
    cross join (values (%(from_time)s::timestamptz, -1), (%(to_time)s::timestamptz, 1)) as w (time, sign)
    where t.table_id = %(table_id)s
) x
left join lateral (
    select * from history_chunk c
    where c.table_id = %(table_id)s and c.chunk <= (x.epoch + 500) / 1000
    order by c.chunk desc
    limit 1
) c on true
cross join lateral (select coalesce(c.chunk, 0) * 1000 as epoch) n
cross join lateral (
    -- the epochs between the running total and x are added to it, or subtracted
    select sign(x.epoch - n.epoch) as sign, coalesce(sum(e.splits), 0) as splits, coalesce(sum(e.merges), 0) as merges,
        coalesce(sum(e.sealed_rows), 0) as sealed_rows, coalesce(sum(e.sealed_bytes), 0) as sealed_bytes
    from epoch e
    where e.table_id = %(table_id)s and e.epoch > least(n.epoch, x.epoch) and e.epoch <= greatest(n.epoch, x.epoch)
) s;

-- name: overlap
-- Part of a query: true if the regions of a and b have keys in common.
not exists (
    select from unnest(a.min_keys, a.max_keys, b.min_keys, b.max_keys) as k (a_min, a_max, b_min, b_max)
    where k.a_min >= k.b_max or k.b_min >= k.a_max
)

-- name: is_kept
-- Part of a query: true if the partition a was a leaf where the table was truncated, or later.
(a.sealed_epoch <= (select nullif(epoch, 0) from truncation where table_id = %(table_id)s)) is not true

-- name: related
-- Returns the successors or the predecessors of a partition that was a leaf where the table was truncated, or later: each with
-- its own predecessors. Also the epoch that made the partition, and the first epoch that is not truncated.
select n.partition_id, n.predecessors, a.created_epoch, coalesce(c.epoch, 0)
from partition a
left join truncation c on c.table_id = a.table_id
left join lateral (
    select b.partition_id, b.min_keys, p.predecessors
    from epoch e
    cross join lateral unnest(case when %(made_of_it)s then e.created else e.sealed end) as other (partition_id)
    cross join lateral (
        select * from partition b where b.table_id = e.table_id and b.partition_id = other.partition_id offset 0
    ) b
    cross join lateral ({predecessors_of}) p
    where e.table_id = a.table_id and e.epoch = case when %(made_of_it)s then a.sealed_epoch else a.created_epoch end
        and (a.sealed_epoch is null or a.sealed_epoch > a.created_epoch) and {overlap}
) n on true
where a.table_id = %(table_id)s and a.partition_id = %(partition_id)s and {is_kept}
order by array_replace(n.min_keys, null, '');

-- name: predecessors_of
-- Part of a query: the ids of the partitions of which b was made, by their bounds.
select coalesce(array_agg(a.partition_id order by array_replace(a.min_keys, null, '')), '{}') as predecessors
from epoch e
cross join lateral unnest(e.sealed) as ended (partition_id)
cross join lateral (
    select * from partition a where a.table_id = e.table_id and a.partition_id = ended.partition_id offset 0
) a
where e.table_id = b.table_id and e.epoch = b.created_epoch and {overlap}

-- name: lives
-- Returns the leaves of an epoch, if wanted, and the partitions that were made after it up to another, with the epochs in which
-- they were leaves. The epochs are given, or are those of two moments, at most a page of them; the first row has the moments.
with w as materialized ({ends})
select case when row_number() over (order by greatest(p.created_epoch, e.epoch), array_replace(p.min_keys, null, '')) = 1
    then w.ends end, coalesce(c.epoch, 0), t.epoch, p.partition_id, p.parent_id, p.min_keys, p.max_keys, p.created_epoch,
    p.sealed_epoch, p.sealed_rows, p.sealed_bytes
from tables t
left join truncation c on c.table_id = t.table_id
cross join w
cross join lateral (select coalesce(%(after)s::bigint, (w.ends->0->>'epoch')::bigint) as epoch) e
cross join lateral (
    select coalesce(%(till)s::bigint, least((w.ends->1->>'epoch')::bigint, e.epoch + %(limit)s::bigint)) as epoch
) l
left join lateral (
    select * from ({leaves_then}) p where %(with_leaves)s
    union all
    select p.*
    from epoch n
    cross join lateral unnest(n.created) as made (partition_id)
    cross join lateral (
        select * from partition p where p.table_id = n.table_id and p.partition_id = made.partition_id offset 0
    ) p
    where n.table_id = t.table_id and n.epoch > e.epoch and n.epoch <= l.epoch
) p on true
where t.table_id = %(table_id)s
order by greatest(p.created_epoch, e.epoch), array_replace(p.min_keys, null, '');

-- name: lives_of
-- Returns the epochs in which partitions were leaves, for those that were leaves where the table was truncated, or later.
select a.partition_id, a.parent_id, a.min_keys, a.max_keys, a.created_epoch, a.sealed_epoch, a.sealed_rows, a.sealed_bytes
from unnest(%(partition_ids)s::text[]) as wanted (partition_id)
cross join lateral (
    select * from partition p where p.table_id = %(table_id)s and p.partition_id = wanted.partition_id collate "C" offset 0
) a
where {is_kept};
