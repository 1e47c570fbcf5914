-- name: applied
-- The migrations that the database has, in order, and whether each row is where it was written: not after a dump was
-- restored. (The columns that tell come with a migration.)
select version, name, checksum,
    not to_jsonb(m) ? 'written_xid'
        or coalesce(
            (to_jsonb(m) ->> 'written_xid')::xid8::xid = m.xmin and (to_jsonb(m) ->> 'written_in')::oid = m.tableoid, false
        ) as in_place
from dormouse.migration m
order by version;

-- name: lock
-- Waits until no other process migrates this database; the lock ends with the session, too.
-- A process that is frozen loses it, as its session ends when it says nothing for too long.
select pg_advisory_lock(7236154098213001), set_config('idle_session_timeout', %(idle_ms)s::text, false);

-- name: unlock
-- Lets the next process migrate.
select pg_advisory_unlock(7236154098213001);

-- name: foreign_relation
-- A relation in a schema of our name that we did not create.
select relname from pg_catalog.pg_class
where relnamespace = to_regnamespace('dormouse')
    and not exists (select from pg_catalog.pg_class where oid = to_regclass('dormouse.migration'))
limit 1;

-- name: prepare
-- The schema, and the list of what was applied to it.
do $$
begin
    -- `if not exists` needs the right to make schemas even when the schema exists
    if to_regnamespace('dormouse') is null then
        create schema if not exists dormouse;
    end if;
end
$$;
create table if not exists dormouse.migration (
    version integer primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default now()
);

-- name: record
-- Notes a migration, in the transaction that applied it, and that the row is where it was written. (Older databases lack these
-- columns.)
insert into dormouse.migration
select (jsonb_populate_record(
    null::dormouse.migration,
    jsonb_build_object(
        'version', %(version)s::integer, 'name', %(name)s::text, 'checksum', %(checksum)s::text, 'applied_at', now(),
        'written_xid', pg_current_xact_id()::text, 'written_in', 'dormouse.migration'::regclass::oid
    )
)).*;
