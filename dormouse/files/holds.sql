-- name: hold
-- Holds the files of now, or goes on doing so. A transaction that began before may not have committed yet: what it
-- removes is held, too.
insert into hold (holder, since, until)
values (
    %(holder)s,
    clock_timestamp() - make_interval(secs => %(margin_seconds)s),
    clock_timestamp() + make_interval(secs => %(lease_seconds)s)
)
on conflict (holder) do update set until = excluded.until;

-- name: release
-- Ends a hold, and those of the dead.
delete from hold where holder = %(holder)s or until < clock_timestamp();

-- name: before
-- What lost its last reference before this time can be deleted.
select least(
    clock_timestamp() - make_interval(secs => %(delay_seconds)s),
    (select min(since) from hold where until > clock_timestamp())
);
