-- name: page
-- Where two moments are, told by the first row; and the next references that came with their files from outside, added after
-- one and up to the other, whether they are still there or were removed since; by transaction, file and partition, each with
-- what is known of its file. The bounds of its partition where the file has other rows, too. The file of one that was
-- collected is not known any more, nor a partition that was forgotten.
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
        -- what was added after a snapshot was removed after it
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin((select snapshot from after))
            and g.partition_id <> '' and r.ingested
            and not pg_visible_in_snapshot(r.added_xid, (select snapshot from after))
            and pg_visible_in_snapshot(r.added_xid, (select snapshot from till))
            and (r.added_xid, r.file_id, g.partition_id) > (%(from_xid)s::xid8, %(from_file)s::uuid, %(from_partition)s)
        order by r.added_xid, r.file_id, g.partition_id
        limit %(limit)s
    )
) r on true
-- looked up by key, whatever the statistics say
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
-- Whether a file is not known any more of those that came after one snapshot and up to another and were removed since.
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
-- Where a moment is, told by the first row; and the next references that it had, by partition and file: those of now that it
-- saw, and those that were removed since. The file of one that was collected is not known any more.
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
