-- name: create
-- Adds a consumer at a moment that can still be read, or now if none is given, and a hold on its files. Returns no row when
-- the name is taken or the moment cannot be read.
with made as (
    insert into consumer (table_id, name, position_at, epoch, snapshot)
    select t.table_id, %(name)s, coalesce(%(at)s, clock_timestamp()), coalesce(%(epoch)s, t.epoch),
        coalesce(%(snapshot)s::pg_snapshot, pg_current_snapshot())
    from tables t
    where t.table_id = %(table_id)s and (t.history_since > %(at)s::timestamptz) is not true
        and not exists (select from truncation u where u.table_id = t.table_id and u.recorded_at > %(at)s)
    on conflict do nothing
    returning *
)
insert into hold (holder, table_id, since, snapshot, until)
select %(holder)s, table_id, position_at - make_interval(secs => %(margin_seconds)s), snapshot,
    acknowledged_at + make_interval(secs => %(expiry_seconds)s)
from made
-- a hold of this name may be left from a consumer that was deleted without it
on conflict (holder) do update set since = excluded.since, snapshot = excluded.snapshot, until = excluded.until
returning holder;

-- name: consumers
-- Returns a table's consumers by name, or the one of a name, and whether their files are held.
select c.name, c.version, c.created_at, c.acknowledged_at, c.position_at, c.epoch, c.snapshot::text, h.until,
    coalesce(h.until > clock_timestamp() and t.history_since <= c.position_at, false),
    extract(epoch from clock_timestamp() - c.position_at)::float8
from consumer c
join tables t using (table_id)
left join hold h on h.holder = %(prefix)s || c.name
where c.table_id = %(table_id)s and c.name = coalesce(%(name)s::text, c.name)
order by c.name;

-- name: acknowledge
-- Moves a consumer that is still where it was read, and renews its hold. Returns no row when it was moved meanwhile, or its
-- files are no longer held.
with held as materialized (
    select h.holder
    from hold h
    join tables t on t.table_id = %(table_id)s
    where h.holder = %(holder)s and h.until > clock_timestamp() and t.history_since <= %(at)s
    for update of h
), moved as (
    update consumer c
    set version = c.version + 1, acknowledged_at = clock_timestamp(), position_at = %(at)s, epoch = %(epoch)s,
        snapshot = %(snapshot)s::pg_snapshot
    where c.table_id = %(table_id)s and c.name = %(name)s and c.version = %(version)s and c.created_at = %(created_at)s
        and c.snapshot is not null and exists (select from held)
    returning acknowledged_at
)
update hold h
set since = %(at)s::timestamptz - make_interval(secs => %(margin_seconds)s), snapshot = %(snapshot)s::pg_snapshot,
    until = m.acknowledged_at + make_interval(secs => %(expiry_seconds)s)
from moved m
where h.holder = %(holder)s
returning h.holder;

-- name: drop
-- Deletes a consumer and its hold; returns no row when there is none.
with released as (
    delete from hold where holder = %(holder)s
)
delete from consumer where table_id = %(table_id)s and name = %(name)s returning name;
