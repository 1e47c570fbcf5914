-- name: hold
-- Holds all files that are referenced now. The margin covers the removals of transactions that have not committed yet.
insert into hold (holder, since, until)
values (
    %(holder)s,
    clock_timestamp() - make_interval(secs => %(margin_seconds)s),
    clock_timestamp() + make_interval(secs => %(lease_seconds)s)
);

-- name: renew
-- Renews a hold. A hold that has ended stays ended, since its files may have been deleted.
update hold
set until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
where holder = %(holder)s and until > clock_timestamp()
returning holder;

-- name: release
-- Ends a hold, and deletes expired ones; returns whether the hold had not ended before.
with ended as (
    delete from hold
    where holder = %(holder)s or until < clock_timestamp()
    returning holder, until
)
select exists (select from ended where holder = %(holder)s and until > clock_timestamp());

-- name: release_others
-- Ends all holds whose holders have this prefix, except one.
delete from hold where starts_with(holder, %(prefix)s) and holder <> %(kept)s;

-- name: holds
-- The holds that have not ended, sorted by their ends.
select holder, since, least(until, '9999-12-31') from hold where until > clock_timestamp() order by until, holder;

-- name: deletable
-- Part of a query: the time before which files must have lost their last reference to be deleted. They must be older than the
-- history that is kept, or older than the truncation and than any running query; and no hold may cover them.
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
-- The time before which files must have lost their last reference to be deleted.
{deletable};

-- name: lock_history
-- Serializes transactions that change a table's leaves, delete its files, or hold those of a moment. So no file that a cut
-- needs is stamped before the cut is recorded.
select from tables where table_id = %(table_id)s for no key update;

-- name: let_go
-- The same time; records that earlier moments cannot be read from now on.
update tables t
set history_since = greatest(t.history_since, b.before)
from ({deletable}) b
where t.table_id = %(table_id)s
returning b.before;

-- name: hold_moment
-- Holds a table's files of a moment if the moment can still be read; returns whether it can.
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
-- Whether a moment of a table is held for some more time, as named cuts are.
select exists (
    select from hold
    where table_id = %(table_id)s and snapshot::text = %(snapshot)s
        and until > clock_timestamp() + make_interval(secs => %(seconds)s)
);
