-- name: between
-- The rows and bytes of what came with its files from outside, after one snapshot and up to another (null: now), each file
-- once, by its own counts, as those of its references may be estimates; and whether some may not be known any more: after a
-- moment that is held all are.
with came as materialized (
    select r.file_id, r.row_count
    from {file_reference} r
    where r.partition_id <> '' and r.ingested and r.added_xid >= pg_snapshot_xmin(%(after)s::pg_snapshot)
        and not pg_visible_in_snapshot(r.added_xid, %(after)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot) is not false
    union all
    select r.file_id, r.row_count
    from removal g
    cross join lateral unnest(g.file_ids, g.row_counts, g.added_xids, g.ingested)
        as r (file_id, row_count, added_xid, ingested)
    where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(after)s::pg_snapshot)
        and g.partition_id <> '' and r.ingested
        and not pg_visible_in_snapshot(r.added_xid, %(after)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot) is not false
)
select coalesce(sum(coalesce(f.row_count, c.row_count)), 0), coalesce(sum(f.byte_count), 0),
    count(*) > count(f.file_id)
        or exists (
            select from tables t where t.table_id = %(table_id)s and t.log_since > %(at)s and t.history_since > %(at)s
        )
from (select file_id, sum(row_count) as row_count from came group by file_id) c
left join lateral (select f.* from ({file_facts}) f where f.file_id = c.file_id offset 0) f on true;

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

-- name: of_cuts
-- The first cut from a time on and the last up to another, if they are in this order and all between was counted: what was
-- ingested till them.
select first.epoch, first.snapshot::text, first.recorded_at, last.epoch, last.snapshot::text, last.recorded_at,
    last.rows_till - first.rows_till, last.bytes_till - first.bytes_till
from (
    select * from cut c
    where c.table_id = %(table_id)s and c.snapshot is not null and c.recorded_at >= %(after)s
    order by c.recorded_at
    limit 1
) first
cross join (
    select * from cut c
    where c.table_id = %(table_id)s and c.snapshot is not null and c.recorded_at <= %(till)s
    order by c.recorded_at desc
    limit 1
) last
where first.cut_id <= last.cut_id and coalesce(last.counted_from, last.cut_id) <= first.cut_id;
