-- name: hold
-- Holds the files of now. A transaction that began before may not have committed yet: what it removes is held, too.
insert into hold (holder, since, until)
values (
    %(holder)s,
    clock_timestamp() - make_interval(secs => %(margin_seconds)s),
    clock_timestamp() + make_interval(secs => %(lease_seconds)s)
);

-- name: renew
-- Goes on holding; one that has ended stays ended: what it held may be gone.
update hold
set until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
where holder = %(holder)s and until > clock_timestamp()
returning holder;

-- name: release
-- Ends a hold, and those of the dead; gives whether it had not ended before.
with ended as (
    delete from hold
    where holder = %(holder)s or until < clock_timestamp()
    returning holder, until
)
select exists (select from ended where holder = %(holder)s and until > clock_timestamp());

-- name: release_others
-- Ends the holds of holders of this name but one.
delete from hold where starts_with(holder, %(prefix)s) and holder <> %(kept)s;

-- name: holds
-- Those that have not ended, by their ends.
select holder, since, least(until, '9999-12-31') from hold where until > clock_timestamp() order by until, holder;

-- name: deletable
-- Part of a query: what lost its last reference before this time can be deleted: it is as old as history is kept, or lies
-- before the truncation and no query of now needs it; and nobody holds it.
select least(
    greatest(
        clock_timestamp() - make_interval(secs => %(kept_seconds)s),
        (
            select least(u.recorded_at, clock_timestamp() - make_interval(secs => %(delay_seconds)s))
            from truncation u
            where u.table_id = %(table_id)s
        )
    ),
    (
        select min(since) from hold
        where until > clock_timestamp() and (table_id is null or table_id = %(table_id)s)
    )
) as before

-- name: before
-- What lost its last reference before this time can be deleted.
{deletable};

-- name: lock_history
-- What changes a table's leaves, lets its files go, or holds those of a moment, comes one after the other: no file that a cut
-- needs is stamped as free before the cut was recorded.
select from tables where table_id = %(table_id)s for no key update;

-- name: let_go
-- Likewise, and remembers that moments before cannot be read any more.
update tables t
set history_since = greatest(t.history_since, b.before)
from ({deletable}) b
where t.table_id = %(table_id)s
returning b.before;

-- name: hold_moment
-- Holds a table's files of a moment, if it can be read still; gives whether it can.
with held as (
    insert into hold (holder, table_id, since, snapshot, until)
    select %(holder)s, table_id, %(since)s, %(snapshot)s::pg_snapshot,
        clock_timestamp() + make_interval(secs => %(lease_seconds)s)
    from tables t
    where table_id = %(table_id)s and history_since <= %(since)s
        and not exists (select from truncation u where u.table_id = t.table_id and u.recorded_at > %(since)s)
    returning holder
)
select exists (select from held);

-- name: is_held
-- Whether a moment of a table is held for some time, as named cuts are.
select exists (
    select from hold
    where table_id = %(table_id)s and snapshot::text = %(snapshot)s
        and until > clock_timestamp() + make_interval(secs => %(seconds)s)
);
