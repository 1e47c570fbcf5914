-- name: take
-- Takes a lock of a table, or tells who has it, and whether its lease is longer than leases are. One that a crash loses is
-- fenced off as one that was given to another is.
select l.state, l.kind, l.holder, l.leased_until, l.version, l.next_id,
    l.leased_until > clock_timestamp() + make_interval(secs => %(lease_seconds)s + %(margin_seconds)s)
from lock_rows(%(table_id)s, %(kind)s, %(token)s, %(holder)s, %(lease_seconds)s) l,
    (select set_config('synchronous_commit', 'off', true)) quick;

-- name: renew
-- Keeps a lock for longer; no row: it was given to another.
update row_lock set leased_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
from (select set_config('synchronous_commit', 'off', true)) quick
where table_id = %(table_id)s and token = %(token)s
returning token;

-- name: release
-- Gives a lock back.
delete from row_lock
using (select set_config('synchronous_commit', 'off', true)) quick
where table_id = %(table_id)s and token = %(token)s;

-- name: locks
-- Who holds locks of a table.
select kind, holder, leased_until from row_lock where table_id = %(table_id)s order by kind, leased_until;
