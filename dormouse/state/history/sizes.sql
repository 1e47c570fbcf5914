-- name: ingested
-- Part of a query: the rows and bytes of what came with its files from outside in some parts of a table's life, each after one
-- snapshot and up to another (null: now): each file once in a part, by its own counts, as those of its references may be
-- estimates. And whether some may not be known any more: after a moment that is held all are.
select coalesce(sum(coalesce(f.row_count, c.row_count)), 0) as row_count, coalesce(sum(f.byte_count), 0) as byte_count,
    count(*) > count(f.file_id)
        or exists (
            select from tables t, part p
            where t.table_id = %(table_id)s and t.log_since > p.at and t.history_since > p.at
        ) as is_unknown
from (
    select p.number, r.file_id, sum(r.row_count) as row_count
    from part p
    cross join lateral (
        select r.file_id, r.row_count
        from {file_reference} r
        where r.partition_id <> '' and r.ingested and r.added_xid >= pg_snapshot_xmin(p.after)
            and not pg_visible_in_snapshot(r.added_xid, p.after)
            and pg_visible_in_snapshot(r.added_xid, p.till) is not false
        union all
        select r.file_id, r.row_count
        from removal g
        cross join lateral unnest(g.file_ids, g.row_counts, g.added_xids, g.ingested)
            as r (file_id, row_count, added_xid, ingested)
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(p.after)
            and g.partition_id <> '' and r.ingested
            and not pg_visible_in_snapshot(r.added_xid, p.after)
            and pg_visible_in_snapshot(r.added_xid, p.till) is not false
        offset 0
    ) r
    group by p.number, r.file_id
) c
left join lateral (select f.* from ({file_facts}) f where f.file_id = c.file_id offset 0) f on true

-- name: since
-- What came after one snapshot and up to another (null: now).
with part as materialized (
    select 1 as number, %(at)s::timestamptz as at, %(after)s::pg_snapshot as after, %(till)s::pg_snapshot as till
)
{ingested};

-- name: between
-- Where two moments are, and what came between them. What came between the first cut from the one on and the last up to the
-- other is known, if they are in this order and all between was counted; what came beside them, or else between the two, is told
-- by its files.
with e as materialized ({ends}), w as materialized (
    select n.number, (e.ends->n.index->>'at')::timestamptz as at, (e.ends->n.index->>'snapshot')::pg_snapshot as snapshot
    from e
    cross join (values (1, 0), (2, 1)) as n (number, index)
), counted as materialized (
    select first.recorded_at as first_at, first.snapshot as first, last.recorded_at as last_at, last.snapshot as last,
        last.rows_till - first.rows_till as row_count, last.bytes_till - first.bytes_till as byte_count
    from (
        select c.*
        from w a
        cross join lateral (
            select * from cut c
            where c.table_id = %(table_id)s and c.snapshot is not null and c.recorded_at >= a.at
            order by c.recorded_at
            limit 1
        ) c
        -- what was committed while it was recorded may be of a time before it
        where a.number = 1 and pg_snapshot_xmax(a.snapshot) <= pg_snapshot_xmax(c.snapshot)
            and not exists (select from pg_snapshot_xip(c.snapshot) x where pg_visible_in_snapshot(x, a.snapshot))
    ) first
    cross join (
        select * from cut c
        where c.table_id = %(table_id)s and c.snapshot is not null and c.recorded_at <= (select at from w where number = 2)
        order by c.recorded_at desc
        limit 1
    ) last
    where first.cut_id <= last.cut_id and coalesce(last.counted_from, last.cut_id) <= first.cut_id
), part as materialized (
    -- a cut is where it is
    select a.number, a.at, a.snapshot as after, coalesce(c.first, b.snapshot) as till
    from w a
    join w b on b.number = 2 and b.at >= a.at
    left join counted c on true
    where a.number = 1 and (c.first::text = a.snapshot::text) is not true
    union all
    select b.number, c.last_at, c.last, b.snapshot
    from w b
    cross join counted c
    where b.number = 2 and c.last::text <> b.snapshot::text
)
select e.ends, i.row_count + coalesce(c.row_count, 0), i.byte_count + coalesce(c.byte_count, 0), i.is_unknown
from e
cross join ({ingested}) i
left join counted c on true;

-- name: portion
-- Of the rows that came with their files from outside, after one snapshot and up to another: whether the times of all their
-- commits are known, whether they are no more than a limit, and until when no more came, or else the first.
with came as materialized (
    select r.added_xid, r.row_count
    from {file_reference} r
    where r.partition_id <> '' and r.ingested and r.added_xid >= pg_snapshot_xmin(%(after)s::pg_snapshot)
        and not pg_visible_in_snapshot(r.added_xid, %(after)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot)
    union all
    select r.added_xid, r.row_count
    from removal g
    cross join lateral unnest(g.row_counts, g.added_xids, g.ingested) as r (row_count, added_xid, ingested)
    where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(after)s::pg_snapshot)
        and g.partition_id <> '' and r.ingested
        and not pg_visible_in_snapshot(r.added_xid, %(after)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot)
), timed as (
    select h.row_count, c.committed_at, sum(h.row_count) over (order by c.committed_at) as rows_till
    from (select added_xid, sum(row_count) as row_count from came group by added_xid) h
    cross join lateral ({committed_at}) c
)
select count(*) = count(committed_at), coalesce(sum(row_count), 0) <= %(limit)s,
    coalesce(max(committed_at) filter (where rows_till <= %(limit)s), min(committed_at))
from timed;
