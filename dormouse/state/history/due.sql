-- name: due
-- Returns the kinds of maintenance that may have work in some tables: pairs of a table's id and a kind. A table without a pair
-- has none. Conditions that need the table's own PostgreSQL tables are in own.
with given as materialized (
    select g.*, b.before
    from unnest(
        %(table_id)s::integer[], %(criteria)s::jsonb[], %(retention_seconds)s::float8[], %(kept_seconds)s::float8[],
        %(delay_seconds)s::float8[], %(expiry_seconds)s::float8[], %(files_min)s::bigint[], %(old_seconds)s::float8[],
        %(bytes_max)s::bigint[]
    ) as g (
        table_id, criteria, retention_seconds, kept_seconds, delay_seconds, expiry_seconds, files_min, old_seconds, bytes_max
    )
    cross join lateral ({deletable}) b
), look as materialized (
    -- the looks of a round, with the snapshot of the last one, which is null if the next has more to read than the changes
    select t.table_id, c.purpose, case
            when {is_fresh} and m.epoch = t.epoch and not exists (
                select from dirty_partition d where d.table_id = t.table_id and d.purpose = c.purpose
            ) then m.till
        end as till
    from given g
    join tables t using (table_id)
    cross join lateral jsonb_each(g.criteria) as c (purpose, criteria)
    left join watermark m on m.table_id = t.table_id and m.purpose = c.purpose
    union all
    select t.table_id, 'cut', case when l.epoch = t.epoch then l.snapshot end
    from given g
    join tables t using (table_id)
    left join lateral (
        select recorded_at, snapshot, epoch from cut c where c.table_id = t.table_id order by c.cut_id desc limit 1
    ) l on true
    where {is_old}
), own as materialized (
    {own}
)
select distinct f.table_id, f.kind
from (
    select l.table_id, case l.purpose
            when 'jobs' then 'compaction' when 'merges' then 'merge' when 'totals' then 'collection' when 'cut' then 'cut'
            else 'split'
        end as kind
    from look l
    join own o using (table_id)
    where l.till is null or l.purpose = any(o.changed) or exists (
        select from removal r
        where r.table_id = l.table_id and r.removed_xid >= pg_snapshot_xmin(l.till)
            and not pg_visible_in_snapshot(r.removed_xid, l.till)
        offset 0
    )
    union all
    select table_id, 'compaction' from own where has_inlined
    union all
    select table_id, 'collection' from own where has_garbage
    union all
    -- a round that failed is tried again
    select r.table_id, r.kind
    from given g
    join last_round r using (table_id)
    where r.error is not null and (r.kind <> 'merge' or g.criteria ? 'merges')
    union all
    select g.table_id, 'compaction'
    from given g
    where exists (select from deletion d where d.table_id = g.table_id and d.retired_xid is null)
        or exists (
            select from compaction_job j
            where j.table_id = g.table_id and j.leased_until < clock_timestamp() and {is_open}
        )
    union all
    select g.table_id, 'collection'
    from given g
    where exists (select from ({candidates}) c where c.is_free) or exists ({gone_since})
        or exists (select from difference d where d.table_id = g.table_id and d.accepted_at is null)
        or exists (
            select from write_attempt a
            where a.table_id = g.table_id and (
                a.abandoned_at is not null
                or coalesce(a.finished_at, a.started_at) < clock_timestamp() - make_interval(secs => g.expiry_seconds)
            )
        )
        or exists (select from applied_commit a where a.table_id = g.table_id and a.expires_at < clock_timestamp())
        or exists (select from truncation u where u.table_id = g.table_id and u.forgotten_epoch < u.epoch)
        -- pending ones may be retired, and retired ones forgotten, except the last
        or exists (
            select from deletion d
            where d.table_id = g.table_id and (
                d.retired_at is null
                or d.retired_at < clock_timestamp() - make_interval(secs => g.retention_seconds)
                    and d.deletion_id < (select max(deletion_id) from deletion where table_id = g.table_id)
            )
        )
) f;

-- name: own
-- Part of a query: the looks for which references of a table were added, and whether it has inlined files to compact, or files
-- to delete.
select g.table_id, array(
        select l.purpose
        from look l
        where l.table_id = g.table_id and exists (
            select from {file_reference} r
            where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(l.till)
                and not pg_visible_in_snapshot(r.added_xid, l.till)
            offset 0
        )
    ) as changed, (
        -- as if all were in one leaf
        select count(*) >= g.files_min or min(c.added_at) < clock_timestamp() - make_interval(secs => g.old_seconds)
            or sum(octet_length(c.content)) >= g.bytes_max
        from {file_content} c
        cross join lateral (
            select from {file_reference} r
            where uuid_hash(r.file_id) = uuid_hash(c.file_id) and r.file_id = c.file_id and r.partition_id <> ''
                and r.job_id is null
            offset 0
        ) r
    ) as has_inlined, exists ({ready_for_gc}) as has_garbage
from given g
where g.table_id = {table_id}
