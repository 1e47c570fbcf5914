-- name: lock
-- Waits for what else makes positions of a table, and keeps others out: cuts, splits, and collection's first stage, so that
-- no file that a cut needs is stamped as free before the cut was recorded.
select 1 from tables where table_id = %(table_id)s for no key update;

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
