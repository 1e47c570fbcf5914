-- name: now
-- The present of a table.
select epoch, (case when pg_is_in_recovery() then replayed_snapshot(%(table_id)s) else pg_current_snapshot() end)::text, clock_timestamp() from tables where table_id = %(table_id)s;

-- name: range
-- From when on a table can be read, and what the database says of times. Transactions that write to it and may have the
-- time of their commit already, one up to this, are unfinished: one that waits for its client has not. On a standby: up to
-- which commit it has replayed; one with an earlier time may follow, as they are logged in another order, if any is under way.
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
-- The epoch and snapshot of all that was committed at or before a time, from when on the table can be read, and whether all
-- the times of commits that this takes are known. The newest cut of before, or that of the truncation, tells most of it; to this come the transactions
-- since then that changed the table. Those that still run are as little of the moment as those that came later.
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
        -- one after the clock was set back. Until the clock is again where it was, it was wrong before; later nothing tells
        -- whether it was wrong before or after
        select c.cut_id, c.epoch, c.snapshot, c.recorded_at > clock_timestamp() as is_before
        from cut c
        where c.table_id = t.table_id and c.clock_at <= %(at)s and c.recorded_at > %(at)s and c.snapshot is not null
            -- else the moment had been when the clock was set back to before it
            and (a.recorded_at > c.clock_at + interval '1 minute') is not true
        order by c.cut_id desc
        limit 1
    ) b on true
    where t.table_id = %(table_id)s
), next as materialized (
    -- what is known of a time after the moment: a cut, or else the present
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
    -- else the clock was set back: what was committed before the next cut is long after it, or what came later is long before
    -- it; an epoch that came later is of it, and this one is not; or what came later than the next epoch is long before it; or
    -- what was removed came after it
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
        -- a split takes its time for a moment only
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
        -- whose time is that of one before, as the clock was set back between them
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
-- Part of a query: when the transaction that added a row h was committed; null: that is not known any more, or never was.
-- The server knows times by the lower half of an id: of one that is 2^31 ago it would tell another's.
select case
    when pg_snapshot_xmax(pg_current_snapshot())::text::numeric - h.added_xid::text::numeric between 0 and 2147483648
    then pg_xact_commit_timestamp(h.added_xid::xid)
end as committed_at

-- name: record
-- Records the present as a cut, and holds its files; nothing when its name is taken. What was ingested till then is what was
-- till the last cut and what came since: each file once, by its own counts, as those of its references may be estimates.
with last as materialized (
    -- the time is that of the snapshot, however long it takes to count
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
    -- of one that is collected already, the references tell
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
    -- by the clock of now: that of the last cut, which this one comes after, may have been ahead
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
-- A page of a table's cuts, the oldest first.
select cut_id, name, recorded_at, epoch, table_id
from cut
where table_id = %(table_id)s and cut_id > %(after)s
order by cut_id
limit %(limit)s;

-- name: drop
-- Forgets a cut, and lets go of what it held.
with gone as (
    delete from cut where table_id = %(table_id)s and cut_id = %(cut_id)s returning table_id, cut_id
), let_go as (
    delete from hold h using gone g where h.holder = concat('cut ', g.table_id, '/', g.cut_id)
)
select count(*) from gone;

-- name: is_due
-- Whether the last cut is old enough for another, and the table has changed since. What is as it was needs no cut. One of the
-- future is that of a clock that went back since, and tells nothing.
select coalesce(
        l.recorded_at not between clock_timestamp() - make_interval(secs => %(interval_seconds)s)
            and clock_timestamp() + interval '1 minute',
        true
    )
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

-- name: forget
-- Forgets cuts without names that are no longer held and cannot be read any more, but for the last.
with gone as (
    delete from cut c
    using tables t
    where c.table_id = %(table_id)s and t.table_id = c.table_id and c.name is null and c.recorded_at < t.history_since
        and c.cut_id < (select max(cut_id) from cut where table_id = %(table_id)s)
    returning c.table_id, c.cut_id
)
delete from hold h using gone g where h.holder = concat('cut ', g.table_id, '/', g.cut_id);

-- name: erased_since
-- Whether files that a snapshot had, and that were removed since, had rows of an erasure: they do not come back.
select exists (
    select from removal g
    cross join lateral unnest(g.file_ids, g.added_xids) as r (file_id, added_xid)
    join erased_file e on e.table_id = g.table_id and e.file_id = r.file_id
    where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
        and not pg_visible_in_snapshot(g.removed_xid, %(snapshot)s::pg_snapshot)
        and pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
);
