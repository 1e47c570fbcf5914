-- name: find
-- A build of a table, with its version.
select build_id, version, purged_version, column_ids, indexed_ids, row_count, retired_at is not null
from build
where build_id = %(build_id)s and table_uuid = %(table_uuid)s and incarnation_id = %(incarnation_id)s;

-- name: is_at
-- Whether the build of a table has this version and is not retired. No row: the build does not exist.
select version = %(at_version)s and retired_at is null
from build
where build_id = %(at_build_id)s and table_uuid = %(at_table_uuid)s and incarnation_id = %(at_incarnation_id)s;

-- name: alone
-- Locks the table's builds in this database until the end of the transaction. False: another process builds one.
select pg_try_advisory_xact_lock(7236154, hashtext(%(table_uuid)s::text));

-- name: patiently
-- Allows more time than a query has, because copying many rows takes long.
set local statement_timeout = '6h';

-- name: add
-- Adds a build.
insert into build (table_uuid, instance_id, incarnation_id, version, purged_version, column_ids, row_count)
values (%(table_uuid)s, %(instance_id)s, %(incarnation_id)s, %(version)s, %(version)s, %(column_ids)s, 0)
returning build_id;

-- name: filled
-- Records a build's number of rows, and its columns that have an index of their own.
update build set row_count = %(row_count)s, indexed_ids = %(indexed_ids)s where build_id = %(build_id)s;

-- name: reached
-- Records that a build has the rows of this version.
insert into applied (build_id, version) values (%(build_id)s, %(version)s);

-- name: was_at
-- A row if the build once had this version, and still keeps the rows that were superseded since. A build skips the
-- versions between two updates.
select 1 from applied where build_id = %(build_id)s and version = %(version)s;

-- name: hold
-- A build, locked for a change.
select build_id, version, purged_version, column_ids, indexed_ids, row_count, retired_at is not null
from build
where build_id = %(build_id)s
for update;

-- name: clear
-- Empties the table that receives the changed rows.
truncate {incoming};

-- name: supersede
-- Copies the old versions of changed rows, for queries that began before.
insert into {superseded} ({columns}, until_version)
select {columns}, %(version)s from {current} where row_id in (select row_id from {incoming});

-- name: remove
-- Deletes the old versions of changed rows.
delete from {current} where row_id in (select row_id from {incoming});

-- name: put
-- Inserts the newest version of each changed row, unless it is a deletion.
insert into {current} ({columns})
select {columns} from (
    select distinct on (row_id) * from {incoming} order by row_id, row_version desc
) newest
where not row_deleted;

-- name: brought
-- Records a build's new version, number of rows and columns.
update build
set version = %(version)s, row_count = row_count + %(more)s, column_ids = %(column_ids)s
where build_id = %(build_id)s;

-- name: purge
-- Records the newest version whose superseded rows no page needs any longer, before they are deleted.
with old as (
    select max(a.version) as version
    from applied a
    where a.build_id = %(build_id)s and a.applied_at < clock_timestamp() - make_interval(secs => %(page_seconds)s)
), forgotten as (
    delete from applied a using old where a.build_id = %(build_id)s and a.version <= old.version
)
update build b
set purged_version = old.version
from old
where b.build_id = %(build_id)s and b.purged_version < old.version
returning b.purged_version;

-- name: remove_purged
-- Deletes the rows that were superseded up to that version.
delete from {superseded} where until_version <= %(purged_version)s;

-- name: retire
-- Marks builds as retired: another build replaces them. Queries that began on them can go on for a while.
update build set retired_at = clock_timestamp() where build_id = any(%(build_ids)s) and retired_at is null;

-- name: all
-- All builds of an instance, with their sizes and the time since they were retired.
select
    build_id, table_uuid, version, row_count,
    coalesce(pg_total_relation_size(to_regclass(format('current_%%s', build_id))), 0)
        + coalesce(pg_total_relation_size(to_regclass(format('superseded_%%s', build_id))), 0) as bytes,
    extract(epoch from clock_timestamp() - retired_at)::double precision as retired_seconds
from build
where instance_id = %(instance_id)s
order by build_id;

-- name: whose
-- The table of a build, locked for its drop.
select table_uuid from build where build_id = %(build_id)s for update;

-- name: forget
-- Deletes the record of a build.
delete from build where build_id = %(build_id)s;

-- name: state
-- The index of a column of a build: whether it exists, is valid, and is being made. No row: the build does not have the
-- column, or has recorded its index.
select
    i.indexrelid is not null,
    coalesce(i.indisvalid, false),
    exists (select 1 from pg_catalog.pg_stat_progress_create_index p where p.relid = to_regclass(%(current)s))
from build b left join pg_catalog.pg_index i on i.indexrelid = to_regclass(%(index)s)
where b.build_id = %(build_id)s and %(column_id)s = any(b.column_ids) and not %(column_id)s = any(b.indexed_ids);

-- name: mark
-- Records a column as indexed, if its index is valid. Without `is_needed` records it anyway: it shall never get an index.
update build
set indexed_ids = indexed_ids || %(column_id)s::integer
where build_id = %(build_id)s and not %(column_id)s = any(indexed_ids)
    and (
        not %(is_needed)s
        or exists (
            select 1 from pg_catalog.pg_index i where i.indexrelid = to_regclass(%(index)s) and i.indisvalid
        )
    );

-- name: cancel
-- Cancels the statements that make indexes of a build's columns.
select pg_cancel_backend(pid)
from pg_catalog.pg_stat_progress_create_index
where relid = to_regclass(%(current)s) and datname = current_database();

-- name: of_texts
-- The indexes of a build's text columns.
select i.indexrelid::regclass::text
from pg_catalog.pg_index i
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
where i.indrelid = to_regclass(%(current)s) and a.atttypid = 'text'::regtype;

-- name: note_use
-- Records the column indexes that were scanned since the last call.
insert into column_index as c (build_id, column_id, scan_count)
select b.build_id, ids.column_id, coalesce(s.idx_scan, 0)
from build b
    cross join lateral unnest(b.indexed_ids) ids (column_id)
    join pg_catalog.pg_stat_user_indexes s
        on s.indexrelid = to_regclass(format('current_%%s_c_%%s', b.build_id, ids.column_id))
where b.build_id = %(build_id)s
on conflict on constraint column_index_pkey do update
set scan_count = excluded.scan_count, scanned_at = clock_timestamp()
where c.scan_count <> excluded.scan_count;

-- name: forget_unused
-- Deletes the records of column indexes that were not scanned for so long. The caller then drops the indexes.
with unused as (
    delete from column_index
    where build_id = %(build_id)s and scanned_at < clock_timestamp() - make_interval(secs => %(unused_seconds)s)
    returning column_id
), forgotten as (
    update build b
    set indexed_ids = array(
        select i.column_id
        from unnest(b.indexed_ids) with ordinality i (column_id, place)
        where i.column_id not in (select column_id from unused)
        order by i.place
    )
    where b.build_id = %(build_id)s and exists (select 1 from unused)
)
select column_id from unused order by column_id;
