-- name: between
-- The deletions and restores of after one snapshot and up to another, in their order: of a deletion its number and condition,
-- of a restore its transaction and the moment that it put back; the epoch, when it was, and the snapshots of just before and
-- just after it, null where these are not known. It was alone when it took its snapshot: only its own transaction, and
-- those that began before it and have not committed, are in doubt there.
select case when e.moment is null then e.deletion_id end, e.condition, e.xid::text, e.moment, e.epoch, e.at,
    concat(least(pg_snapshot_xmin(e.snapshot), e.xid), ':', s.xmax, ':', s.running) as before,
    case
        when e.snapshot is not null then concat(least(pg_snapshot_xmin(e.snapshot), e.xid), ':', s.xmax, ':', s.others)
    end as after
from (
    select d.deletion_id, 0 as number, d.condition, d.added_xid as xid, null::timestamptz as moment, d.epoch,
        d.deleted_at as at, d.snapshot
    from deletion d
    -- those that a restore made pending again are a part of it
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
-- Whether there is any after a snapshot.
select exists (
    select from deletion d
    where d.table_id = %(table_id)s and not pg_visible_in_snapshot(d.added_xid, %(after)s::pg_snapshot)
) or exists (
    select from restored r
    where r.table_id = %(table_id)s and not pg_visible_in_snapshot(r.restored_xid, %(after)s::pg_snapshot)
);

-- name: touched
-- The partitions whose references a restore removed or added.
select r.partition_id from {file_reference} r where r.added_xid = %(xid)s::xid8 and r.partition_id <> ''
union
select g.partition_id
from removal g
where g.table_id = %(table_id)s and g.removed_xid >= %(xid)s::xid8 and g.partition_id <> ''
    and (g.removed_xid = %(xid)s::xid8 or %(xid)s::xid8 = any(g.added_xids));

-- name: deletions_of
-- The deletions that a restore undid, or made pending again.
select distinct deletion_id, condition
from deletion
where table_id = %(table_id)s and (added_xid = %(xid)s::xid8 or retired_xid = %(xid)s::xid8);

-- name: lives
-- The lives of the database after its first, the earliest first, and after which transaction each began.
select incarnation_id::text, added_xid::text::bigint from incarnation where reason in ('adoption', 'copy') order by number;
