-- name: lock
-- Waits for what else changes where a table is, and keeps others out: splits, cuts, and who lets files go.
select 1 from tables where table_id = %(table_id)s for no key update;

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
