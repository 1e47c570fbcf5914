-- name: candidates
-- Returns two cuts after the truncation: the newest one that meets the limits (bytes ingested since, and age), and the newest of
-- these with no named cut or consumer before it. Expired consumers do not count. The times of cuts ascend, so each cut is looked
-- up from the latest possible time backwards until the bytes are enough.
with limits as materialized (
    select t.table_id, u.recorded_at as truncated_at,
        coalesce(clock_timestamp() - make_interval(secs => %(seconds)s), 'infinity') as old_at,
        %(bytes_now)s::numeric - %(byte_count)s::numeric as bytes_till, (
            select min(n.recorded_at)
            from (
                select recorded_at from cut c
                where c.table_id = t.table_id and c.name is not null and c.snapshot is not null
                offset 0
            ) n
        ) as named_at, (
            select min(c.position_at)
            from consumer c
            join hold h on h.holder = concat('consumer ', c.table_id, '/', c.name) and h.until > clock_timestamp()
            where c.table_id = t.table_id and c.snapshot is not null
        ) as consumed_at
    from tables t
    left join truncation u using (table_id)
    where t.table_id = %(table_id)s
)
select f.*, w.is_free
from limits l
cross join lateral (
    values (false, l.old_at), (true, least(l.old_at, l.named_at, l.consumed_at))
) as w (is_free, before)
cross join lateral (
    select c.cut_id, c.name, c.recorded_at, c.epoch, c.table_id
    from cut c
    where c.table_id = l.table_id and c.snapshot is not null and c.recorded_at <= w.before
        and c.recorded_at > coalesce(l.truncated_at, '-infinity') and (c.bytes_till > l.bytes_till) is not true
    order by c.recorded_at desc
    limit 1
) f;

-- name: holders
-- Returns the named cuts and consumers that hold files and history of a table, the oldest position first. Cuts of another
-- cluster and expired consumers hold nothing.
select 'cut' as kind, c.name, c.recorded_at as since, null::timestamptz as until
from cut c
where c.table_id = %(table_id)s and c.name is not null and c.snapshot is not null
union all
select 'consumer', c.name, c.position_at, h.until
from consumer c
join hold h on h.holder = concat('consumer ', c.table_id, '/', c.name) and h.until > clock_timestamp()
where c.table_id = %(table_id)s and c.snapshot is not null
order by since, kind, name;

-- name: truncation
-- Returns the cut at which a table is truncated, and its epoch.
select cut_id, recorded_at, epoch from truncation where table_id = %(table_id)s and snapshot is not null;

-- name: truncate
-- Makes the history before a cut unreadable.
insert into truncation as t (table_id, cut_id, epoch, snapshot, recorded_at)
select table_id, cut_id, epoch, snapshot, recorded_at
from cut
where table_id = %(table_id)s and cut_id = %(cut_id)s and snapshot is not null
on conflict (table_id) do update
set cut_id = excluded.cut_id, epoch = excluded.epoch, snapshot = excluded.snapshot, recorded_at = excluded.recorded_at,
    truncated_at = clock_timestamp()
returning cut_id;

-- name: forget_cuts
-- Deletes the cuts without a name up to one, and their holds; returns how many.
with dropped as (
    delete from cut
    where table_id = %(table_id)s and name is null and cut_id <= %(last)s
    returning cut_id
), released as (
    delete from hold where holder in (select concat('cut ', %(table_id)s, '/', cut_id) from dropped)
)
select count(*) from dropped;

-- name: count_cuts
-- Returns how many cuts without a name there are up to one.
select count(*) from cut where table_id = %(table_id)s and name is null and cut_id <= %(last)s;

-- name: last_cut
-- Returns the bytes ingested until the last cut, and its position.
select bytes_till, epoch, snapshot::text, recorded_at
from cut
where table_id = %(table_id)s and snapshot is not null
order by cut_id desc
limit 1;

-- name: between
-- Returns the deletions and restores after one snapshot and up to another, in their order: the number and condition of a
-- deletion; the transaction of a restore and the moment that it restored; the epoch, the time, and the snapshots just before and
-- just after it, null where they are not known. It held a lock when it took its snapshot, so only its own transaction, and
-- earlier ones that had not committed, must be added to that snapshot as running.
select case when e.moment is null then e.deletion_id end, e.condition, e.xid::text, e.moment, e.epoch, e.at,
    concat(least(pg_snapshot_xmin(e.snapshot), e.xid), ':', s.xmax, ':', s.running) as before,
    case
        when e.snapshot is not null then concat(least(pg_snapshot_xmin(e.snapshot), e.xid), ':', s.xmax, ':', s.others)
    end as after
from (
    select d.deletion_id, 0 as number, d.condition, d.added_xid as xid, null::timestamptz as moment, d.epoch,
        d.deleted_at as at, d.snapshot
    from deletion d
    -- not the deletions that a restore made pending again: they are a part of the restore
    where d.table_id = %(table_id)s
        and d.added_xid not in (select restored_xid from restored where table_id = %(table_id)s)
    union all
    select coalesce(r.deletion_id, 0), r.number, null, r.restored_xid, r.moment, r.epoch, r.restored_at, r.snapshot
    from restored r
    where r.table_id = %(table_id)s
) e
cross join lateral (
    select greatest(pg_snapshot_xmax(e.snapshot)::text::numeric, max(x.xid) + 1) as xmax, string_agg(x.xid::text, ',' order by x.xid) as running,
        string_agg(x.xid::text, ',' order by x.xid) filter (where x.xid <> e.xid::text::numeric) as others
    from (
        select pg_snapshot_xip(e.snapshot)::text::numeric as xid
        union
        select generate_series(least(pg_snapshot_xmax(e.snapshot)::text::numeric, e.xid::text::numeric), e.xid::text::numeric)
    ) x
) s
where not pg_visible_in_snapshot(e.xid, %(after)s::pg_snapshot) and pg_visible_in_snapshot(e.xid, %(till)s::pg_snapshot)
order by e.deletion_id, e.number;

-- name: any_since
-- Returns whether there is a deletion or a restore after a snapshot.
select exists (
    select from deletion d
    where d.table_id = %(table_id)s and not pg_visible_in_snapshot(d.added_xid, %(after)s::pg_snapshot)
) or exists (
    select from restored r
    where r.table_id = %(table_id)s and not pg_visible_in_snapshot(r.restored_xid, %(after)s::pg_snapshot)
);

-- name: touched
-- Returns the partitions whose references a restore removed or added.
select r.partition_id from {file_reference} r where r.added_xid = %(xid)s::xid8 and r.partition_id <> ''
union
select g.partition_id
from removal g
where g.table_id = %(table_id)s and g.removed_xid >= %(xid)s::xid8 and g.partition_id <> ''
    and (g.removed_xid = %(xid)s::xid8 or %(xid)s::xid8 = any(g.added_xids));

-- name: deletions_of
-- Returns the deletions that a restore undid, or made pending again.
select distinct deletion_id, condition
from deletion
where table_id = %(table_id)s and (added_xid = %(xid)s::xid8 or retired_xid = %(xid)s::xid8);

-- name: lives
-- Returns the lives of the database after its first, the earliest first, and the transaction after which each began.
select incarnation_id::text, added_xid::text::bigint from incarnation where reason in ('adoption', 'copy') order by number;
