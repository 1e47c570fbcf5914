-- name: applied
-- Returns the migrations that the database has, in order, and whether each row is where it was written, which is false after a
-- dump was restored. (A migration adds the columns for that.)
select version, name, checksum,
    not to_jsonb(m) ? 'written_xid'
        or coalesce(
            (to_jsonb(m) ->> 'written_xid')::xid8::xid = m.xmin and (to_jsonb(m) ->> 'written_in')::oid = m.tableoid, false
        ) as in_place
from dormouse.migration m
order by version;

-- name: lock
-- Waits until no other process migrates this database. The lock ends with the session, too.
-- A frozen process loses it: its session ends when it is silent for too long.
select pg_advisory_lock(7236154098213001), set_config('idle_session_timeout', %(idle_ms)s::text, false);

-- name: unlock
-- Lets the next process migrate.
select pg_advisory_unlock(7236154098213001);

-- name: foreign_relation
-- Returns a relation in a schema named `dormouse` that Dormouse did not create.
select relname from pg_catalog.pg_class
where relnamespace = to_regnamespace('dormouse')
    and not exists (select from pg_catalog.pg_class where oid = to_regclass('dormouse.migration'))
limit 1;

-- name: prepare
-- Makes the schema, and the list of applied migrations.
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
-- Returns whether stored transaction ids are ahead of this cluster.
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
-- Dates references that are ahead back to transaction 3, the first one of any cluster.
update file_reference
set added_xid = '3'
where partition_id <> '' and added_xid >= pg_snapshot_xmax(pg_current_snapshot());

-- name: renumber_removals
-- Dates removals that were not collected to this transaction, and the others to the first.
update removal r
set added_xids = array_fill('3'::xid8, array[cardinality(file_ids)]),
    removed_xid = case when pg_visible_in_snapshot(r.removed_xid, t.collected_till) then '3' else pg_current_xact_id() end
from tables t
where t.table_id = r.table_id;

-- name: renumber_collections
-- Marks removals before this transaction as collected.
update tables set collected_till = concat(pg_current_xact_id(), ':', pg_current_xact_id(), ':')::pg_snapshot;

-- name: forget_history
-- Removes moments of the other cluster, which mean nothing here. Reads at its named cuts are refused from now on.
update cut set snapshot = null;
update consumer set snapshot = null;
update truncation set snapshot = null;
update epoch set added_xid = '3' where added_xid >= pg_snapshot_xmin(pg_current_snapshot());
delete from restored where restored_xid <> '4';
delete from hold;

-- name: begin_history
-- Begins the history here and now; the present rows are from before it.
update tables set history_from = pg_current_snapshot(), history_since = clock_timestamp();

-- name: renumber_deletions
-- Dates deletions back to transaction 3, and ends those that no file needs, which belong to the deleted history. If a restore
-- made a deletion pending again, its earlier rows are deleted, because only their transactions tell them apart. Transaction 4
-- stands for all restores of a table: it still shows that restores undid deletions.
delete from deletion d
using deletion later
where later.table_id = d.table_id and later.deletion_id = d.deletion_id and later.added_xid > d.added_xid;
with undone as materialized (
    select d.table_id, d.deletion_id, max(r.moment) as moment, max(r.restored_at) as restored_at
    from deletion d
    join restored r on r.table_id = d.table_id and r.restored_xid = d.retired_xid
    group by d.table_id, d.deletion_id
), recorded as (
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
-- Dates the changes of columns back to transaction 3.
update schema_change set added_xid = '3';

-- name: forget_dropped
-- Forgets dropped removals: no present reader has a snapshot from before.
update tables set log_dropped_xid = null, log_dropped_by = null;

-- name: knows_dropped
-- Returns whether the database records what is dropped from the log of removals; a migration adds that.
select exists (
    select from pg_attribute where attrelid = to_regclass('tables') and attname = 'log_dropped_by' and not attisdropped
);

-- name: knows_schemas
-- Returns whether the database has versions of schemas; a migration adds them.
select to_regclass('schema_change') is not null;

-- name: knows_deletions
-- Returns whether the database has deletions; a migration adds them.
select to_regclass('deletion') is not null;

-- name: knows_history
-- Returns whether the database has the tables of the history; a migration adds them.
select to_regclass('cut') is not null;

-- name: knows_payloads
-- Returns whether the database has days of payloads; a migration adds them.
select to_regclass('payload_day') is not null;

-- name: begin_days_anew
-- Copies days again from the beginning: rows written during a copy are known by transactions of the other cluster.
update payload_day
set phase = 'prepare', verified_till = null, after_kind = null, after_tenant = null, after_id = null, after_at = null
where work in ('offload', 'fold') and phase <> 'finish';

-- name: forget_looks
-- Makes every table due to be examined and counted.
delete from watermark;

-- name: knows_incarnations
-- Returns whether the database has the table of incarnations; a migration adds it.
select to_regclass('incarnation') is not null;

-- name: note_copy
-- Records an incarnation for a copied database that has none.
insert into incarnation (number, reason, system_identifier, timeline, database_oid)
select 0, 'copy', d.* from this_database() d
where not exists (select from incarnation)
    and exists (
        select from migration
        where written_xid is not null and (written_xid::xid <> xmin or written_in <> tableoid)
    );

-- name: advance_sequences
-- Continues sequences after the existing numbers: logical replication does not copy sequences. (A dump does, so nothing changes.)
-- The numbers of loads are stored in files: a sequence that was never used continues from the time, which no other has reached.
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
-- Records that the rows are where they were written.
update migration set written_xid = pg_current_xact_id(), written_in = tableoid;
