-- name: now
-- Returns the position of a table's present.
select epoch, (case when pg_is_in_recovery() then replayed_snapshot(%(table_id)s) else pg_current_snapshot() end)::text, clock_timestamp() from tables where table_id = %(table_id)s;

-- name: range
-- Returns since when a table can be read, and whether all commits up to a time are visible. A transaction that writes to the
-- table may already have the time of its commit, up to this time, and not be visible yet: "unfinished". One that waits for its
-- client has no time yet. On a standby: the last commit replayed. While any transaction runs there, a commit with an earlier
-- time may follow, as commits are logged in another order than that of their times.
select t.created_at, greatest(t.history_since, u.recorded_at), clock_timestamp(),
    current_setting('track_commit_timestamp') = 'on',
    exists (
        select from pg_locks l
        left join pg_stat_activity a on a.pid = l.pid
        where l.locktype = 'relation' and l.relation in ('{file_reference}'::regclass, 'epoch'::regclass, 'schema_change'::regclass)
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.mode in ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            and l.granted and l.pid <> pg_backend_pid()
            and coalesce(a.xact_start <= %(at)s, true) and coalesce(a.state not like 'idle in transaction%', true)
    ) or pg_is_in_recovery() and pg_last_xact_replay_timestamp() < %(at)s + interval '10 seconds'
        and pg_snapshot_xmin(pg_current_snapshot()) < pg_snapshot_xmax(pg_current_snapshot()),
    pg_is_in_recovery(), pg_last_xact_replay_timestamp()
from tables t
left join truncation u using (table_id)
where t.table_id = %(table_id)s;

-- name: as_of
-- Returns the epoch and snapshot of all that was committed at or before a time, since when the table can be read, and whether
-- the times of all commits that this needs are known. It starts from the newest cut before the time, or that of the truncation,
-- and adds the transactions since then that changed the table. Transactions that still run do not belong to the moment.
with base as materialized (
    select coalesce(case when b.is_before then b.snapshot end, a.snapshot, u.snapshot, t.history_from) as snapshot,
        coalesce(case when b.is_before then b.cut_id end, a.cut_id, 0) as cut_id,
        coalesce(case when b.is_before then b.epoch end, a.epoch) as epoch,
        case when not b.is_before then b.snapshot end as doubted, greatest(t.history_since, u.recorded_at) as since
    from tables t
    left join truncation u using (table_id)
    left join lateral (
        select c.cut_id, c.epoch, c.snapshot, c.recorded_at
        from cut c
        where c.table_id = t.table_id and c.recorded_at <= %(at)s and c.snapshot is not null
        order by c.recorded_at desc
        limit 1
    ) a on true
    left join lateral (
        -- a cut recorded after the clock was set back. While the clock is still behind that cut's time, it was wrong before;
        -- later it cannot be known if it was wrong before or after
        select c.cut_id, c.epoch, c.snapshot, c.recorded_at > clock_timestamp() as is_before
        from cut c
        where c.table_id = t.table_id and c.clock_at <= %(at)s and c.recorded_at > %(at)s and c.snapshot is not null
            -- else the moment was over when the clock was set back to before it
            and (a.recorded_at > c.clock_at + interval '1 minute') is not true
        order by c.cut_id desc
        limit 1
    ) b on true
    where t.table_id = %(table_id)s
), next as materialized (
    -- the first known snapshot after the moment: a cut, or else the present
    select n.snapshot, n.at
    from (
        (
            select c.snapshot, c.recorded_at as at
            from base b
            join cut c on c.cut_id > b.cut_id
            where c.table_id = %(table_id)s and c.recorded_at > %(at)s and c.clock_at is null and c.snapshot is not null
            order by c.recorded_at
            limit 1
        )
        union all
        (
            select c.snapshot, c.clock_at
            from base b
            join cut c on c.cut_id > b.cut_id
            where c.table_id = %(table_id)s and c.clock_at > %(at)s and c.snapshot is not null
            order by c.clock_at
            limit 1
        )
        union all
        select null, clock_timestamp() where not pg_is_in_recovery()
    ) n
    order by n.at
    limit 1
), added as materialized (
    select l.xid
    from base b
    cross join lateral (
        select distinct r.added_xid as xid
        from {file_reference} r
        where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(b.snapshot)
            and not pg_visible_in_snapshot(r.added_xid, b.snapshot)
        offset 0
    ) l
), removed as materialized (
    select l.removed_xid, l.added_xids
    from base b
    cross join lateral (
        select g.removed_xid, g.added_xids
        from removal g
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(b.snapshot)
            and not pg_visible_in_snapshot(g.removed_xid, b.snapshot)
        offset 0
    ) l
), change as materialized (
    select h.added_xid as xid, c.committed_at
    from (
        select xid as added_xid from added
        union
        select removed_xid from removed
        union
        select x.xid
        from base b, deletion d, unnest(array[d.added_xid, d.retired_xid]) as x (xid)
        where d.table_id = %(table_id)s and not pg_visible_in_snapshot(x.xid, b.snapshot)
        union
        select s.added_xid
        from base b, schema_change s
        where s.table_id = %(table_id)s and not pg_visible_in_snapshot(s.added_xid, b.snapshot)
        union
        select x.xid
        from base b, removed r, unnest(r.added_xids) as x (xid)
        where not pg_visible_in_snapshot(x.xid, b.snapshot)
    ) h
    cross join lateral ({committed_at}) c
), reach as materialized (
    select greatest(
        pg_snapshot_xmax(b.snapshot)::text::numeric,
        (select max(xid::text::numeric) + 1 from change where committed_at <= %(at)s)
    ) as xmax
    from base b
), hidden as (
    select xid::text::numeric from change where (committed_at <= %(at)s) is not true
    union
    select pg_snapshot_xip(
        case when pg_is_in_recovery() then replayed_snapshot(%(table_id)s) else pg_current_snapshot() end
    )::text::numeric
), snapshot as (
    select concat(coalesce(min(h.xid), r.xmax), ':', r.xmax, ':', string_agg(h.xid::text, ',' order by h.xid)) as text
    from reach r
    left join hidden h on h.xid < r.xmax
    group by r.xmax
)
select e.epoch, (extract(epoch from e.created_at) * 1000000)::bigint, s.text, b.since,
    e.is_known is not false and not exists (select from change where committed_at is null),
    -- each of these shows that the clock was set back:
    -- - a commit before the next cut has a time long after it, or one after the cut a time long before it
    -- - a doubted cut contains a commit with a time after the moment
    -- - an epoch with an earlier time than this one was committed after the moment
    -- - a commit after the next epoch has a time long before it
    -- - a reference was removed before the moment and added after it
    not exists (
        select from change c
        cross join next n
        where case
            when n.snapshot is null or pg_visible_in_snapshot(c.xid, n.snapshot)
            then c.committed_at > n.at + interval '1 minute'
            else c.committed_at <= %(at)s and c.committed_at < n.at - interval '1 minute'
        end
    ) and not exists (
        select from change c where c.committed_at > %(at)s and pg_visible_in_snapshot(c.xid, b.doubted)
    ) and not exists (
        select from epoch h
        cross join lateral ({committed_at}) c
        where h.table_id = %(table_id)s and h.created_at > %(at)s and h.created_at < e.created_at
            and not pg_visible_in_snapshot(h.added_xid, b.snapshot) and c.committed_at > %(at)s
    ) and not exists (
        select from epoch n
        join change c on c.xid > n.added_xid and c.committed_at <= %(at)s
        where n.table_id = %(table_id)s and n.epoch = e.epoch + 1
            and c.committed_at < coalesce(n.clock_at, n.created_at) - interval '1 minute'
    ) and not exists (
        select from change g
        join removed r on r.removed_xid = g.xid
        cross join lateral unnest(r.added_xids) as x (xid)
        join change a on a.xid = x.xid
        where g.committed_at <= %(at)s and a.committed_at > %(at)s
    )
from base b
cross join snapshot s
left join lateral (
    (
        -- a split records its time shortly before it commits
        select h.epoch, h.created_at, pg_visible_in_snapshot(h.added_xid, b.snapshot) or c.committed_at is not null as is_known
        from epoch h
        cross join lateral ({committed_at}) c
        where h.table_id = %(table_id)s and h.created_at <= %(at)s + interval '1 minute'
            and (pg_visible_in_snapshot(h.added_xid, b.snapshot) or (c.committed_at > %(at)s) is not true)
        order by h.created_at desc
        limit 1
    )
    union all
    (
        -- an epoch whose created_at follows the one before it, as the clock was set back between them
        select h.epoch, h.created_at, pg_visible_in_snapshot(h.added_xid, b.snapshot) or c.committed_at is not null
        from epoch h
        cross join lateral ({committed_at}) c
        where h.table_id = %(table_id)s and h.clock_at <= %(at)s and h.created_at > %(at)s + interval '1 minute'
            and (pg_visible_in_snapshot(h.added_xid, b.snapshot) or (c.committed_at > %(at)s) is not true)
        order by h.epoch desc
        limit 1
    )
    union all
    select h.epoch, h.created_at, true from epoch h where h.table_id = %(table_id)s and h.epoch = b.epoch
    order by epoch desc
    limit 1
) e on true;

-- name: committed_at
-- Part of a query: when the transaction that added a row h was committed; null if that is not known. The server finds times by
-- the lower half of a transaction's id: 2^31 transactions later it would return the time of another one.
select case
    when pg_snapshot_xmax(pg_current_snapshot())::text::numeric - h.added_xid::text::numeric between 0 and 2147483648
    then pg_xact_commit_timestamp(h.added_xid::xid)
end as committed_at

-- name: record
-- Records the present as a cut, and holds its files; returns no row when its name is taken. The running total of ingested rows
-- and bytes is that of the last cut and what was ingested since: each file once, by its own counts, as those of its references
-- may be estimates.
with last as materialized (
    -- the time is taken with the snapshot, before the counting, which may take long
    select n.now, c.recorded_at, c.snapshot, c.rows_till, c.bytes_till, coalesce(c.counted_from, c.cut_id) as counted_from
    from (select clock_timestamp() as now offset 0) n
    left join lateral (
        select * from cut where table_id = %(table_id)s and snapshot is not null order by cut_id desc limit 1
    ) c on true
), came as materialized (
    select r.file_id, r.partition_id, r.row_count
    from last l
    cross join lateral (
        select r.file_id, r.partition_id, r.row_count
        from {file_reference} r
        where r.partition_id <> '' and r.ingested and r.added_xid >= pg_snapshot_xmin(l.snapshot)
            and not pg_visible_in_snapshot(r.added_xid, l.snapshot)
        union all
        select r.file_id, g.partition_id, r.row_count
        from removal g
        cross join lateral unnest(g.file_ids, g.row_counts, g.added_xids, g.ingested)
            as r (file_id, row_count, added_xid, ingested)
        where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(l.snapshot)
            and g.partition_id <> ''
            and not pg_visible_in_snapshot(g.removed_xid, l.snapshot)
            and not pg_visible_in_snapshot(r.added_xid, l.snapshot) and r.ingested
        offset 0
    ) r
), ingested as (
    select coalesce(sum(coalesce(f.row_count, c.row_count)), 0) as row_count, coalesce(sum(f.byte_count), 0) as byte_count,
        count(*) = count(f.file_id) as is_whole
    from (select file_id, sum(row_count) as row_count from came group by file_id) c
    -- for a file that was collected already, the counts of its references are used
    left join lateral (select f.* from ({file_facts}) f where f.file_id = c.file_id offset 0) f on true
), made as (
    insert into cut (table_id, name, recorded_at, clock_at, epoch, snapshot, rows_till, bytes_till, counted_from)
    select t.table_id, %(name)s, greatest(l.now, l.recorded_at + interval '1 microsecond'),
        case when l.now <= l.recorded_at then l.now end, t.epoch,
        pg_current_snapshot(), coalesce(l.rows_till, 0) + i.row_count, coalesce(l.bytes_till, 0) + i.byte_count,
        case
            when i.is_whole and (t.log_since > l.recorded_at and t.history_since > l.recorded_at) is not true
            then l.counted_from
        end
    from tables t
    cross join ingested i
    cross join last l
    where t.table_id = %(table_id)s
    on conflict (table_id, name) do nothing
    returning cut_id, name, recorded_at, epoch, table_id, snapshot
), held as (
    -- by the clock now: the time of the cut may be ahead, as it is at least that of the last cut
    insert into hold (holder, table_id, since, snapshot, until)
    select concat('cut ', m.table_id, '/', m.cut_id), m.table_id, l.now, m.snapshot, case
            when m.name is null then l.now + make_interval(secs => %(kept_seconds)s)
            else 'infinity'
        end
    from made m
    cross join last l
    where m.name is not null or %(kept_seconds)s > 0
)
select cut_id, name, recorded_at, epoch, table_id from made;

-- name: cuts
-- Returns a page of a table's cuts, the oldest first.
select cut_id, name, recorded_at, epoch, table_id
from cut
where table_id = %(table_id)s and cut_id > %(after)s
order by cut_id
limit %(limit)s;

-- name: drop
-- Deletes a cut and its hold; returns how many cuts were deleted.
with dropped as (
    delete from cut where table_id = %(table_id)s and cut_id = %(cut_id)s returning table_id, cut_id
), released as (
    delete from hold h using dropped d where h.holder = concat('cut ', d.table_id, '/', d.cut_id)
)
select count(*) from dropped;

-- name: is_due
-- Returns whether the last cut is old enough for another, and the table has changed since. A cut with a time in the future was
-- recorded before the clock was set back, and counts as old.
select {is_old}
    and (
        l.snapshot is null
        or exists (
            select from {file_reference} r
            where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(l.snapshot)
                and not pg_visible_in_snapshot(r.added_xid, l.snapshot)
            offset 0
        )
        or exists (
            select from removal g
            where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(l.snapshot)
                and not pg_visible_in_snapshot(g.removed_xid, l.snapshot)
            offset 0
        )
        or l.epoch <> t.epoch
    )
from tables t
left join lateral (
    select recorded_at, snapshot, epoch from cut c where c.table_id = t.table_id order by c.cut_id desc limit 1
) l on true
where t.table_id = %(table_id)s;

-- name: is_old
-- Part of a query: whether the last cut l, if any, is old enough for another.
coalesce(
    l.recorded_at not between clock_timestamp() - make_interval(secs => %(interval_seconds)s)
        and clock_timestamp() + interval '1 minute',
    true
)

-- name: forget
-- Deletes cuts without names that are no longer held and can no longer be read, but not the last one.
with dropped as (
    delete from cut c
    using tables t
    where c.table_id = %(table_id)s and t.table_id = c.table_id and c.name is null and c.recorded_at < t.history_since
        and c.cut_id < (select max(cut_id) from cut where table_id = %(table_id)s)
    returning c.table_id, c.cut_id
)
delete from hold h using dropped d where h.holder = concat('cut ', d.table_id, '/', d.cut_id);

-- name: erased_since
-- Returns whether a file that a snapshot had, and that was removed since, had erased rows: such a file cannot be restored.
select exists (
    select from removal g
    cross join lateral unnest(g.file_ids, g.added_xids) as r (file_id, added_xid)
    join erased_file e on e.table_id = g.table_id and e.file_id = r.file_id
    where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
        and not pg_visible_in_snapshot(g.removed_xid, %(snapshot)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
);
