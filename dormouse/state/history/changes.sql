-- name: page
-- Returns a page of the references that were ingested after one moment and up to another, both those that are still there and
-- those that were removed since. The first row has the positions of the moments. Ordered by transaction, file and partition,
-- with the facts of the file. Has the bounds of the partition where the file has other rows, too. A collected file and a
-- forgotten partition have nulls.
with e as materialized ({ends}), after as materialized (
    select (ends->0->>'snapshot')::pg_snapshot as snapshot from e
), till as materialized (
    select (ends->1->>'snapshot')::pg_snapshot as snapshot from e
), least as materialized (
    select greatest(pg_snapshot_xmin(snapshot), %(from_xid)s::xid8) as xid from after
)
select case when row_number() over (order by r.added_xid, r.file_id, r.partition_id) = 1 then e.ends end,
    r.added_xid::text, r.file_id, r.partition_id, f.filename, r.row_count, r.count_approximate, r.only_contains_data,
    f.byte_count, f.row_count, f.file_id is not null and (r.only_contains_data or p.min_keys is not null), p.min_keys,
    p.max_keys
from e
left join (
    (
        select r.added_xid, r.file_id, r.partition_id, r.row_count, r.count_approximate,
            r.only_contains_data_for_this_partition as only_contains_data
        from {file_reference} r
        where r.partition_id <> '' and r.ingested
            and r.added_xid >= (select xid from least)
            and r.added_xid < pg_snapshot_xmax((select snapshot from till))
            and not pg_visible_in_snapshot(r.added_xid, (select snapshot from after))
            and pg_visible_in_snapshot(r.added_xid, (select snapshot from till))
            and (r.added_xid, r.file_id, r.partition_id) > (%(from_xid)s::xid8, %(from_file)s::uuid, %(from_partition)s)
        order by r.added_xid, r.file_id, r.partition_id
        limit %(limit)s
    )
    union all
    (
        select r.added_xid, r.file_id, g.partition_id, r.row_count, r.count_approximate, r.only_contains_data
        from removal g
        cross join lateral unnest(
            g.file_ids, g.row_counts, g.counts_approximate, g.only_contain_data_for_this_partition, g.added_xids, g.ingested
        ) as r (file_id, row_count, count_approximate, only_contains_data, added_xid, ingested)
        -- a reference that was added after a snapshot was also removed after it
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin((select snapshot from after))
            and g.partition_id <> '' and r.ingested
            and not pg_visible_in_snapshot(r.added_xid, (select snapshot from after))
            and pg_visible_in_snapshot(r.added_xid, (select snapshot from till))
            and (r.added_xid, r.file_id, g.partition_id) > (%(from_xid)s::xid8, %(from_file)s::uuid, %(from_partition)s)
        order by r.added_xid, r.file_id, g.partition_id
        limit %(limit)s
    )
) r on true
-- "offset 0" forces one look-up by key a row, whatever the statistics say
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
left join lateral (
    select p.min_keys, p.max_keys
    from partition p
    where p.table_id = %(table_id)s and p.partition_id = r.partition_id and not r.only_contains_data
    offset 0
) p on true
order by r.added_xid, r.file_id, r.partition_id
limit %(limit)s;

-- name: collected
-- Returns whether a file that was ingested after one snapshot and up to another, and removed since, was collected.
select exists (
    select from removal g
    cross join lateral unnest(g.file_ids, g.added_xids, g.ingested) as r (file_id, added_xid, ingested)
    where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(after)s::pg_snapshot)
        and g.partition_id <> '' and r.ingested
        and not pg_visible_in_snapshot(r.added_xid, %(after)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot)
        and not exists (select from ({file_facts}) f where f.file_id = r.file_id offset 0)
);

-- name: references_at
-- Returns a page of the references of a moment, by partition and file: those of now that its snapshot sees, and those that were
-- removed since. The first row has the position of the moment. The filename of a collected file is null.
with e as materialized ({ends}), w as materialized (
    select (ends->0->>'snapshot')::pg_snapshot as snapshot from e
)
select case when row_number() over (order by r.partition_id, r.file_id) = 1 then e.ends end,
    r.partition_id, r.file_id, f.filename, r.row_count, r.count_approximate, r.only_contains_data
from e
left join (
    (
        select r.partition_id, r.file_id, r.row_count, r.count_approximate,
            r.only_contains_data_for_this_partition as only_contains_data
        from {file_reference} r
        where r.partition_id <> '' and pg_visible_in_snapshot(r.added_xid, (select snapshot from w))
            and (r.partition_id, r.file_id) > (%(from_partition)s, %(from_file)s::uuid)
        order by r.partition_id, r.file_id
        limit %(limit)s
    )
    union all
    (
        select g.partition_id, r.file_id, r.row_count, r.count_approximate, r.only_contains_data
        from removal g
        cross join lateral unnest(
            g.file_ids, g.row_counts, g.counts_approximate, g.only_contain_data_for_this_partition, g.added_xids
        ) as r (file_id, row_count, count_approximate, only_contains_data, added_xid)
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin((select snapshot from w))
            and g.partition_id <> ''
            and not pg_visible_in_snapshot(g.removed_xid, (select snapshot from w))
            and pg_visible_in_snapshot(r.added_xid, (select snapshot from w))
            and (g.partition_id, r.file_id) > (%(from_partition)s, %(from_file)s::uuid)
        order by g.partition_id, r.file_id
        limit %(limit)s
    )
) r on true
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
order by r.partition_id, r.file_id
limit %(limit)s;

-- name: ingested
-- Part of a query: the rows and bytes that were ingested in some parts of a table's life, each after one snapshot and up to
-- another (null: now). Each file counts once in a part, by its own counts, as those of its references may be estimates. Also
-- whether some files may be unknown by now; none is if the start of the part is held.
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
-- Returns the rows and bytes that were ingested after a snapshot, up to now.
with part as materialized (
    select 1 as number, %(at)s::timestamptz as at, %(after)s::pg_snapshot as after, null::pg_snapshot as till
)
{ingested};

-- name: between
-- Returns the positions of two moments, and the rows and bytes that were ingested between them. Between the first cut after the
-- one and the last cut before the other, the running totals of the cuts are used, if they are complete. The rest, or else all, is
-- counted from the files.
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
        -- the snapshot of the cut must contain that of the moment: a commit beside the recording may have an earlier time
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
    -- no part before the first cut if that cut is the moment itself
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
-- Returns three facts of the rows that were ingested after one snapshot and up to another: are the times of all their commits
-- known, are there at most as many as a limit, and until when no more than the limit came (at least the first commit).
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
