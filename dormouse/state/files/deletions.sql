-- name: aggregates
-- Whether rows of equal key are merged, and the version of the schema; nobody changes them until the transaction ends.
select properties ->> 'aggregate' is not null, schema_version from tables where table_id = %(table_id)s for share;

-- name: record
-- Records a deletion, while references are added by nobody.
insert into deletion (table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, epoch)
select t.table_id, 1 + coalesce((select max(deletion_id) from deletion where table_id = %(table_id)s), 0), %(condition)s,
    %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(min_key)s, %(max_key)s, %(by_values)s, t.epoch
from tables t
where t.table_id = %(table_id)s
returning deletion_id, deleted_at;

-- name: list
-- A table's deletions by number, pending ones or all, each with whether it is pending.
select deletion_id, condition, by_values, deleted_at, retired_xid is null
from deletion
where table_id = %(table_id)s and (retired_xid is null or %(all)s)
order by deletion_id;

-- name: count_pending
-- How many deletions readers apply.
select count(*) from deletion where table_id = %(table_id)s and retired_xid is null;

-- name: some_pending
-- Some of the pending deletions, other ones each time where there are many.
select deletion_id
from deletion
where table_id = %(table_id)s and retired_xid is null
order by random()
limit %(limit)s;

-- name: not_needed
-- Which of some deletions are of no rows that a partition refers to: each walks down the tree where its keys may be.
select o.deletion_id
from unnest(%(deletion_ids)s::bigint[]) as o (deletion_id)
where not exists (
    with recursive d as materialized (
        select * from deletion where table_id = %(table_id)s and deletion_id = o.deletion_id and retired_xid is null
    ), walk as (
        select p.partition_id, p.split_key, p.split_point, p.left_id, p.right_id
        from partition p
        where p.table_id = %(table_id)s and p.parent_id is null and p.is_upper is null and p.merged_epoch is null
        union all
        select p.partition_id, p.split_key, p.split_point, p.left_id, p.right_id
        from walk w
        cross join d
        cross join lateral (
            values
            (w.left_id, d.min_keys[w.split_key + 1] < w.split_point),
            (w.right_id, d.max_keys[w.split_key + 1] >= w.split_point)
        ) as child (partition_id, is_reached)
        join partition p on p.table_id = %(table_id)s and p.partition_id = child.partition_id
        -- an open end reaches it: null
        where child.is_reached is not false and w.left_id is not null
    )
    select from walk w
    cross join d
    cross join lateral (
        select r.file_id from {file_reference} r where r.partition_id = w.partition_id offset 0
    ) r
    left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
    -- a file whose row is lost may be one
    where f.file_id is null or {may_be_of}
)
-- nor of rows that a load of a keyed table may still bring, which came before it
and not exists (
    select from write_attempt a
    where a.table_id = %(table_id)s and a.deletions_till < o.deletion_id
        and a.abandoned_at is null and a.finished_at is null
);

-- name: retire
-- No reader applies them from here on; moments of before still do.
update deletion
set retired_xid = pg_current_xact_id(), retired_at = clock_timestamp()
where table_id = %(table_id)s and deletion_id = any(%(deletion_ids)s) and retired_xid is null;

-- name: lock_history
-- Those that let go what moments need, and those that hold a moment, come one after the other.
select from tables where table_id = %(table_id)s for no key update;

-- name: forget
-- Forgets deletions that were retired so long ago that no moment is kept which needs them: moments of before cannot be
-- read from here on. The last number of all stays, as it is not given again.
with gone as (
    delete from deletion d
    where d.table_id = %(table_id)s
        and d.retired_at < clock_timestamp() - make_interval(secs => %(kept_seconds)s + %(margin_seconds)s)
        and d.deletion_id < (select max(deletion_id) from deletion where table_id = %(table_id)s)
        and not exists (
            select from hold h
            where h.until > clock_timestamp() and (h.table_id is null or h.table_id = %(table_id)s)
                and not pg_visible_in_snapshot(d.retired_xid, h.snapshot)
        )
    returning d.retired_at
)
update tables t
set history_since = greatest(t.history_since, g.retired_at)
from (select max(retired_at) as retired_at from gone) g
where t.table_id = %(table_id)s and g.retired_at is not null;

-- name: pending_then
-- Part of a restore: the deletions that were pending in a snapshot.
pending_then as materialized (
    select *
    from deletion d
    where d.table_id = %(table_id)s and pg_visible_in_snapshot(d.added_xid, %(snapshot)s::pg_snapshot)
        and pg_visible_in_snapshot(d.retired_xid, %(snapshot)s::pg_snapshot) is not true
)

-- name: then_pending
-- The conditions of the deletions that were pending in a snapshot.
with {pending_then}
select deletion_id, condition from pending_then order by deletion_id;

-- name: count_restored
-- How many deletions a restore to a snapshot undoes, or makes pending again.
with {pending_then}
select count(*)
from (select deletion_id from deletion d where d.table_id = %(table_id)s and d.retired_xid is null) n
full join pending_then t using (deletion_id)
where n.deletion_id is null or t.deletion_id is null;

-- name: restore
-- Part of a restore: undoes the deletions that were not pending in a snapshot, and makes those pending again that were.
with {pending_then}, undone as (
    update deletion d
    set retired_xid = pg_current_xact_id(), retired_at = clock_timestamp()
    where d.table_id = %(table_id)s and d.retired_xid is null
        and d.deletion_id not in (select deletion_id from pending_then)
)
insert into deletion (
    table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, deleted_at, epoch, snapshot
)
select table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, deleted_at, epoch, snapshot
from pending_then t
where not exists (
    select from deletion d
    where d.table_id = %(table_id)s and d.deletion_id = t.deletion_id and d.retired_xid is null
);
