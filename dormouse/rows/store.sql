-- name: take
-- Takes a lock of a table; if another process holds it, returns the holder, and whether the lease is longer than leases
-- may be. The commit is asynchronous: if a crash loses the lock, its fencing token protects the table, as for any lost lock.
select l.state, l.kind, l.holder, l.leased_until, l.version, l.next_id,
    l.leased_until > clock_timestamp() + make_interval(secs => %(lease_seconds)s + %(margin_seconds)s)
from lock_rows(%(table_id)s, %(kind)s, %(token)s, %(holder)s, %(lease_seconds)s) l,
    (select set_config('synchronous_commit', 'off', true)) quick;

-- name: renew
-- Renews the lease of a lock. No row: another process has the lock now.
update row_lock set leased_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
from (select set_config('synchronous_commit', 'off', true)) quick
where table_id = %(table_id)s and token = %(token)s
returning token;

-- name: release
-- Releases a lock.
delete from row_lock
using (select set_config('synchronous_commit', 'off', true)) quick
where table_id = %(table_id)s and token = %(token)s;

-- name: locks
-- The holders of a table's locks.
select kind, holder, leased_until from row_lock where table_id = %(table_id)s order by kind, leased_until;

-- name: create
-- Records a new table as a row table, within the transaction that makes it.
with made as (
    insert into row_table (table_id) values (%(table_id)s)
)
insert into row_columns (table_id, since_version, columns) values (%(table_id)s, 0, %(columns)s);

-- name: state
-- The newest version, the next id, and the current columns.
select r.version, r.next_id, r.changed_at, c.since_version, c.columns
from row_table r
cross join lateral (
    select since_version, columns from row_columns c where c.table_id = r.table_id order by since_version desc limit 1
) c
where r.table_id = %(table_id)s;

-- name: columns
-- The columns as of a version.
select columns
from row_columns
where table_id = %(table_id)s and since_version <= %(version)s
order by since_version desc
limit 1;

-- name: ranges
-- The ranges that overlap the given spans of ids.
select r.first_id, r.last_id, r.version, r.is_deleted
from unnest(%(firsts)s::bigint[], %(lasts)s::bigint[]) as s (first_id, last_id)
cross join lateral (
    (
        select * from row_range r
        where r.table_id = %(table_id)s and r.first_id <= s.first_id
        order by r.first_id desc
        limit 1
    )
    union all
    select * from row_range r
    where r.table_id = %(table_id)s and r.first_id > s.first_id and r.first_id <= s.last_id
) r
where r.last_id >= s.first_id;

-- name: changed_ranges
-- The ranges whose version is newer than the given one, sorted by id.
select first_id, last_id
from row_range
where table_id = %(table_id)s and version > %(after)s
order by first_id;

-- name: fence
-- Runs first in the transaction of a commit: locks the table's row and releases the write lock. No row: the lock was lost.
with held as materialized (
    select table_id from row_table where table_id = %(table_id)s for update
)
delete from row_lock l
using held
where l.table_id = held.table_id and l.token = %(token)s and l.kind = 'write'
returning l.table_id;

-- name: remove_ranges
-- Deletes the ranges that others replace.
delete from row_range where table_id = %(table_id)s and first_id = any(%(firsts)s::bigint[]);

-- name: add_ranges
-- Adds the ranges of changed rows, and the pieces that are left of the ranges around them.
insert into row_range (table_id, first_id, last_id, version, is_deleted)
select %(table_id)s, first_id, last_id, version, is_deleted
from unnest(%(firsts)s::bigint[], %(lasts)s::bigint[], %(versions)s::bigint[], %(deleted)s::boolean[])
    as t (first_id, last_id, version, is_deleted);

-- name: record
-- Records a change: its versions, its author and its counts of rows.
with changed as (
    update row_table
    set version = %(last_version)s, next_id = %(next_id)s, deleted = deleted + %(deleted)s,
        changed_at = clock_timestamp()
    where table_id = %(table_id)s
    returning changed_at
), identified as (
    insert into row_change_id (table_id, change_id, last_version, digest)
    select %(table_id)s, %(change_id)s, %(last_version)s, %(digest)s
    where %(change_id)s::text is not null
)
insert into row_change (
    table_id, first_version, last_version, changed_at, changed_by, first_id, inserted, updated, deleted, unchanged,
    columns_changed
)
select
    %(table_id)s, %(first_version)s, %(last_version)s, changed_at, %(changed_by)s, %(first_id)s, %(inserted)s,
    %(updated)s, %(deleted)s, %(unchanged)s, %(columns_changed)s
from changed;

-- name: record_unchanged
-- Records the id of a change that changed nothing, while its lock is held. No row: the lock was lost. Can be repeated.
with held as (
    select table_id from row_lock where table_id = %(table_id)s and token = %(token)s and kind = 'write' for update
)
insert into row_change_id (table_id, change_id, last_version, digest, unchanged)
select table_id, %(change_id)s, %(last_version)s, %(digest)s, %(unchanged)s from held
on conflict (table_id, change_id) do update set digest = excluded.digest
returning table_id;

-- name: record_columns
-- Records the columns from a version on.
insert into row_columns (table_id, since_version, columns) values (%(table_id)s, %(version)s, %(columns)s);

-- name: change_of_id
-- The result of the earlier change with this id, and whether it was the same change (true if a digest is unknown).
-- Jobs of earlier releases recorded "job:" and their id, which clients gave as the id of the change.
select coalesce(i.digest = %(digest)s, true),
    coalesce(c.first_version, i.last_version + 1), i.last_version, coalesce(c.first_id, 1),
    coalesce(c.inserted, 0), coalesce(c.updated, 0), coalesce(c.deleted, 0), coalesce(i.unchanged, c.unchanged)
from row_change_id i
left join row_change c
    on c.table_id = i.table_id and c.last_version = i.last_version and i.unchanged is null
where i.table_id = %(table_id)s and i.change_id in (%(change_id)s, 'job:' || %(change_id)s)
    and (i.unchanged is not null or c.table_id is not null)
order by i.change_id <> %(change_id)s
limit 1;

-- name: history
-- A page of the changes, the newest first.
select first_version, last_version, changed_at, changed_by, inserted, updated, deleted, columns_changed
from row_change
where table_id = %(table_id)s and last_version < %(before)s
order by last_version desc
limit %(limit)s;

-- name: add_snapshot
-- Gives the newest version a name. No row: a snapshot of this name exists.
insert into row_snapshot (table_id, name, version)
select table_id, %(name)s, version from row_table where table_id = %(table_id)s
on conflict do nothing
returning name, version, taken_at;

-- name: snapshots
-- All snapshots, by name.
select name, version, taken_at from row_snapshot where table_id = %(table_id)s order by name;

-- name: drop_snapshot
-- Deletes the name of a snapshot.
delete from row_snapshot where table_id = %(table_id)s and name = %(name)s returning name;
