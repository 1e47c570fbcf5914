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

-- name: is_ahead
-- Whether anything is remembered of transactions that this cluster has not begun yet.
with now as (
    select pg_snapshot_xmax(pg_current_snapshot()) as next
)
select exists (select from tables where pg_snapshot_xmax(collected_till) > next)
    or exists (select from watermark where pg_snapshot_xmax(till) > next)
    or exists (select from file_reference where partition_id <> '' and added_xid >= next)
    or exists (
        select from tables t
        where exists (select from removal r where r.table_id = t.table_id and r.removed_xid >= next)
    )
from now;

-- name: renumber_references
-- All references have been there for ever: 3 is the first transaction of any cluster.
update file_reference
set added_xid = '3'
where partition_id <> '' and added_xid >= pg_snapshot_xmax(pg_current_snapshot());

-- name: renumber_removals
-- Removals that were not collected are of this transaction, the others of the first.
update removal r
set added_xids = array_fill('3'::xid8, array[cardinality(file_ids)]),
    removed_xid = case when pg_visible_in_snapshot(r.removed_xid, t.collected_till) then '3' else pg_current_xact_id() end
from tables t
where t.table_id = r.table_id;

-- name: renumber_collections
-- What was removed before this transaction is collected.
update tables set collected_till = concat(pg_current_xact_id(), ':', pg_current_xact_id(), ':')::pg_snapshot;

-- name: forget_history
-- Moments of the other cluster cannot be told here: those that have names are refused by them.
update cut set snapshot = null;
update consumer set snapshot = null;
update truncation set snapshot = null;
update epoch set added_xid = '3' where added_xid >= pg_snapshot_xmin(pg_current_snapshot());
delete from restored where restored_xid <> '4';
delete from hold;

-- name: begin_history
-- The history begins here and now; what is there is of before.
update tables set history_from = pg_current_snapshot(), history_since = clock_timestamp();

-- name: renumber_deletions
-- Deletions have been there for ever, and those that no file needs are of the history that is not told here. Of one that a
-- restore has made pending again, the rows of before go: nothing but their transactions tells them apart. That restores have
-- undone others is still told, by one of transaction 4 for all restores of a table.
delete from deletion d
using deletion later
where later.table_id = d.table_id and later.deletion_id = d.deletion_id and later.added_xid > d.added_xid;
with undone as materialized (
    select d.table_id, d.deletion_id, max(r.moment) as moment, max(r.restored_at) as restored_at
    from deletion d
    join restored r on r.table_id = d.table_id and r.restored_xid = d.retired_xid
    group by d.table_id, d.deletion_id
), told as (
    insert into restored (table_id, restored_xid, moment, restored_at)
    select table_id, '4', max(moment), max(restored_at) from undone group by table_id
    on conflict do nothing
)
update deletion d
set snapshot = null, added_xid = '3', retired_xid = case
        when (d.table_id, d.deletion_id) in (select table_id, deletion_id from undone) then '4'::xid8
        when d.retired_xid is not null then '3'::xid8
    end;

-- name: renumber_schemas
-- Columns have been as they are for ever.
update schema_change set added_xid = '3';

-- name: forget_dropped
-- No reader of now has a snapshot of before.
update tables set log_dropped_xid = null, log_dropped_by = null;

-- name: knows_dropped
-- Whether a database notes what is dropped from the log of removals, which comes with a migration.
select exists (
    select from pg_attribute where attrelid = to_regclass('tables') and attname = 'log_dropped_by' and not attisdropped
);

-- name: knows_schemas
-- Whether a database has the versions of schemas, which come with a migration.
select to_regclass('schema_change') is not null;

-- name: knows_deletions
-- Whether a database has the deletions, which come with a migration.
select to_regclass('deletion') is not null;

-- name: knows_history
-- Whether a database has the tables of the history, which come with a migration.
select to_regclass('cut') is not null;

-- name: knows_payloads
-- Whether a database has the days of payloads, which come with a migration.
select to_regclass('payload_day') is not null;

-- name: begin_days_anew
-- What was written while a day was copied is told by transactions of the other cluster: it is copied anew.
update payload_day
set phase = 'prepare', verified_till = null, after_kind = null, after_tenant = null, after_id = null, after_at = null
where work in ('offload', 'fold') and phase <> 'finish';

-- name: forget_looks
-- Everything is to be looked at, and counted.
delete from watermark;

-- name: knows_incarnations
-- Whether a database has the table, which comes with a migration.
select to_regclass('incarnation') is not null;

-- name: note_copy
-- A database that has no incarnation to tell by is a copy, too.
insert into incarnation (number, reason, system_identifier, timeline, database_oid)
select 0, 'copy', d.* from this_database() d
where not exists (select from incarnation)
    and exists (
        select from migration
        where written_xid is not null and (written_xid::xid <> xmin or written_in <> tableoid)
    );

-- name: advance_sequences
-- Numbers go on after those that are there, as logical replication brings no sequences along; a dump does, and nothing changes.
-- The places of loads are in files: those of a sequence that gave none go on by the time, which no other has reached.
do $$
declare
    statement text;
begin
    for statement in
        select format(
            'select setval(%1$L, max(%2$I)) from %3$s having max(%2$I) >= (select last_value from %1$s)',
            pg_get_serial_sequence(c.oid::regclass::text, a.attname), a.attname, c.oid::regclass
        )
        from pg_attribute a
        join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'dormouse'::regnamespace and a.attidentity <> '' and not c.relispartition
    loop
        execute statement;
    end loop;
    if to_regclass('load_sequence') is not null then
        perform setval('load_sequence', (1000 * extract(epoch from clock_timestamp()))::bigint * 1048576)
        from load_sequence where not is_called;
    end if;
end
$$;

-- name: settle
-- The rows are where they were written.
update migration set written_xid = pg_current_xact_id(), written_in = tableoid;
