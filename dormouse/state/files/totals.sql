-- name: count_all
-- The totals of a table, counted in full, with the snapshot in which they are counted.
select r.count as references, r.row_count, r.approximate, f.count as files, f.byte_count, u.count as unreferenced_files,
    p.count as partitions, p.leaves, pg_current_snapshot()::text as till,
    (select epoch from tables where table_id = %(table_id)s) as epoch,
    (select version from watermark where table_id = %(table_id)s and purpose = 'totals') as version,
    statement_timestamp() as looked_at
from (
    select count(*), coalesce(sum(row_count), 0) as row_count,
        count(*) filter (where count_approximate) as approximate
    from {file_reference} r
    where {live}
) r, (
    select count(*), coalesce(sum(byte_count), 0) as byte_count
    from ({file_facts}) f
    where exists (
        select from {file_reference} r
        where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id and {live}
        offset 0
    )
) f, (
    {count_unreferenced}
) u, (
    select count(*), count(*) filter (where sealed_epoch is null) as leaves
    from partition
    where table_id = %(table_id)s and merged_epoch is null
) p;

-- name: count_since
-- The stored totals with the changes since: plus what was added, minus what was there and was removed. A file counts while
-- it is referenced. No row if no totals are stored. `unknown` counts files whose sizes are lost: their records were deleted,
-- and perhaps added again under the same names.
with base as materialized (
    select till, epoch, facts, version, looked_at, whole_at > clock_timestamp() - interval '1 day' as is_fresh
    from watermark
    where table_id = %(table_id)s and purpose = 'totals' and whole_at is not null
), added as materialized (
    select r.*
    from base b
    cross join lateral (
        select file_id, row_count, count_approximate
        from {file_reference} r
        where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(b.till)
            and not pg_visible_in_snapshot(r.added_xid, b.till)
    ) r
), removed as materialized (
    select r.*
    from base b
    cross join lateral (
        select file_id, row_count, count_approximate
        from removal g
        cross join lateral unnest(g.file_ids, g.row_counts, g.counts_approximate, g.added_xids)
            as f (file_id, row_count, count_approximate, added_xid)
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(b.till)
            and not pg_visible_in_snapshot(g.removed_xid, b.till) and pg_visible_in_snapshot(f.added_xid, b.till)
    ) r
), file_change as materialized (
    select l.file_id, -1 as files
    from (select distinct file_id from removed) l
    where not exists (
        select from {file_reference} r
        where uuid_hash(r.file_id) = uuid_hash(l.file_id) and r.file_id = l.file_id and {live}
        offset 0
    )
    union all
    -- files that lost and got references: most of them were moved to other partitions
    select file_id, 0 from (select file_id from added intersect select file_id from removed) m
    union all
    select g.file_id, 1
    from base b, (select file_id from added except select file_id from removed) g
    where not exists (
        select from {file_reference} r
        where uuid_hash(r.file_id) = uuid_hash(g.file_id) and r.file_id = g.file_id and {live}
            and pg_visible_in_snapshot(r.added_xid, b.till)
        offset 0
    )
), file_sum as (
    select coalesce(sum(c.files), 0) as files, coalesce(sum(c.files * f.byte_count), 0) as byte_count,
        count(*) filter (where f.file_id is null or c.files <= 0 and f.added_at > b.looked_at) as unknown
    from base b, file_change c
    -- "offset 0" forces a look-up by key, whatever the statistics say
    left join lateral (
        select f.file_id, f.byte_count, f.added_at from ({file_facts}) f where f.file_id = c.file_id offset 0
    ) f on true
), reference_sum as (
    select coalesce(sum(sign), 0) as count, coalesce(sum(sign * row_count), 0) as row_count,
        coalesce(sum(sign) filter (where count_approximate), 0) as approximate, count(*) as changes
    from (
        select 1 as sign, row_count, count_approximate from added
        union all
        select -1, row_count, count_approximate from removed
    ) changed
), epoch_sum as (
    select coalesce(sum(cardinality(e.created)), 0) as created, coalesce(sum(cardinality(e.sealed)), 0) as sealed
    from base b, epoch e
    where e.table_id = %(table_id)s and e.epoch > b.epoch
)
select ((b.facts ->> 'references')::bigint + r.count)::bigint as references,
    (b.facts ->> 'row_count')::numeric + r.row_count as row_count,
    ((b.facts ->> 'approximate')::bigint + r.approximate)::bigint as approximate,
    ((b.facts ->> 'files')::bigint + f.files)::bigint as files,
    (b.facts ->> 'byte_count')::numeric + f.byte_count as byte_count,
    u.count as unreferenced_files,
    -- each partition but the leaves has two halves
    ((b.facts ->> 'partitions')::bigint + 2 * (e.created - e.sealed))::bigint as partitions,
    ((b.facts ->> 'leaves')::bigint + e.created - e.sealed)::bigint as leaves,
    pg_current_snapshot()::text as till, t.epoch, b.version, b.is_fresh, f.unknown, r.changes + e.created as changes,
    statement_timestamp() as looked_at, b.looked_at as counted_at
from base b, reference_sum r, file_sum f, epoch_sum e, tables t, (
    {count_unreferenced}
) u
where t.table_id = %(table_id)s;

-- name: remember_totals
-- Stores the totals of a snapshot and the differences found, unless another transaction has stored or invalidated the totals
-- meanwhile.
with remembered as (
    insert into watermark (table_id, purpose, till, epoch, facts, whole_at, looked_at)
    values (%(table_id)s, 'totals', %(till)s::pg_snapshot, %(epoch)s, %(facts)s, clock_timestamp(), %(looked_at)s)
    on conflict (table_id, purpose) do update
    set till = excluded.till, epoch = excluded.epoch, facts = excluded.facts, looked_at = excluded.looked_at,
        whole_at = case when %(whole)s then excluded.whole_at else watermark.whole_at end,
        version = watermark.version + 1
    where watermark.version = %(version)s
    returning table_id
)
insert into difference (table_id, partition_id, filename, detail)
select r.table_id, d.*
from remembered r
cross join lateral unnest(%(partition_ids)s::text[], %(filenames)s::text[], %(details)s::text[]) as d
on conflict do nothing;

-- name: remembered_differences
-- The differences that full counts of the table found, and that were not accepted since.
select nullif(partition_id, '') as partition_id, nullif(filename, '') as filename, detail, found_at
from difference
where table_id = %(table_id)s and accepted_at is null
order by filename = '', partition_id, filename, detail
limit %(limit)s;

-- name: accept_differences
-- Accepts the open differences, so that the current state counts as right; returns them.
update difference
set accepted_at = clock_timestamp()
where table_id = %(table_id)s and accepted_at is null
returning detail;

-- name: let_go
-- Logs unreferenced files as removed, so that garbage collection finds them. The log entry has no partition and no rows, so
-- that it does not change the totals.
insert into removal (
    table_id, partition_id, file_ids, row_counts, counts_approximate, only_contain_data_for_this_partition,
    added_xids, ingested
)
select %(table_id)s, '', array_agg(f.file_id), array_agg(0::bigint), array_agg(true), array_agg(true),
    array_agg(pg_current_xact_id()), array_agg(true)
from unnest(%(file_ids)s::uuid[]) as f (file_id);

-- name: lost_references
-- Lost references of files that were added since the log of removals is complete. Either the partitions to which a file was
-- added never had all of its rows, or one half of a partition never had a reference to a file that the other half got. Leaves
-- out files with names chosen by callers, as these may have rows that are in no partition. Groups instead of joins, so that
-- the plan does not depend on statistics.
with known as materialized (
    select r.file_id, r.partition_id, r.row_count, r.count_approximate, r.only_contains_data_for_this_partition as is_whole,
        r.ingested
    from {file_reference} r
    where {live}
    union all
    select r.file_id, g.partition_id, r.row_count, r.count_approximate, r.is_whole, r.ingested
    from removal g
    cross join lateral unnest(
        g.file_ids, g.row_counts, g.counts_approximate, g.only_contain_data_for_this_partition, g.ingested
    ) as r (file_id, row_count, count_approximate, is_whole, ingested)
    where g.table_id = %(table_id)s
), short as (
    select file_id, sum(row_count) as row_count
    from (
        select file_id, row_count, count_approximate, null::bigint as wanted from known where ingested
        union all
        select f.file_id, 0, false, f.row_count
        from ({file_facts}) f, instance i
        where f.added_at > i.removals_since
    ) k
    group by file_id
    -- a file without any reference is reported as unreferenced instead
    having sum(row_count) < max(wanted) and count(*) > count(wanted) and not bool_or(count_approximate)
), half as (
    select file_id, divided, min(half) as half
    from (
        select file_id, partition_id as divided, true as was_there, null as half from known
        union all
        select k.file_id, c.parent_id, false, k.partition_id
        from known k
        cross join lateral (
            select parent_id from partition p where p.table_id = %(table_id)s and p.partition_id = k.partition_id offset 0
        ) c
        where not k.ingested and not k.is_whole
    ) k
    group by file_id, divided
    having bool_or(was_there) and count(distinct half) = 1
), lost as (
    select null::text as partition_id, f.filename,
        format('the partitions that it was given to have %s of its %s rows: a reference is lost, and its rows are missing '
            'from queries', s.row_count, f.row_count) as detail
    from short s
    cross join lateral (select f.* from ({file_facts}) f where f.file_id = s.file_id offset 0) f
    where f.filename ^@ any(%(prefixes)s::text[])
    union all
    select case p.left_id when h.half then p.right_id else p.left_id end, f.filename,
        format('%s was divided, and the reference of this half is lost: its rows are missing from queries', h.divided)
    from half h
    cross join instance i
    cross join lateral (select f.* from ({file_facts}) f where f.file_id = h.file_id offset 0) f
    cross join lateral (
        select left_id, right_id from partition p where p.table_id = %(table_id)s and p.partition_id = h.divided offset 0
    ) p
    where f.added_at > i.removals_since and f.filename ^@ any(%(prefixes)s::text[])
)
select *
from lost l
where not exists (
    select from difference d
    where d.table_id = %(table_id)s and d.partition_id = coalesce(l.partition_id, '') and d.filename = l.filename
        and d.detail = l.detail and d.accepted_at is not null
)
limit %(limit)s;

-- name: current_rows
-- The current number of rows of a row table; deleted rows have no later version.
select next_id - 1 - deleted from row_table where table_id = %(table_id)s;
