-- name: lock
-- Waits for what else changes where a table is, and keeps others out: splits, cuts, and who lets files go.
select 1 from tables where table_id = %(table_id)s for no key update;

-- name: between
-- The last restore of a table after a snapshot and up to another: to which moment, and when.
select moment, restored_at
from restored
where table_id = %(table_id)s and pg_visible_in_snapshot(restored_xid, %(till)s::pg_snapshot)
    and not pg_visible_in_snapshot(restored_xid, %(after)s::pg_snapshot)
order by restored_at desc
limit 1;
