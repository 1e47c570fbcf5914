-- name: find
-- The build of a table, and how far it is.
select build_id, version, purged_version, column_ids, indexed_ids, row_count, retired_at is not null
from build
where build_id = %(build_id)s and table_uuid = %(table_uuid)s and incarnation_id = %(incarnation_id)s;

-- name: is_at
-- Whether the build of a table is of this version, and another has not taken its place: no row when it is gone.
select version = %(at_version)s and retired_at is null
from build
where build_id = %(at_build_id)s and table_uuid = %(at_table_uuid)s and incarnation_id = %(at_incarnation_id)s;

-- name: alone
-- Whether nobody else builds an index of the table here; until the transaction ends.
select pg_try_advisory_xact_lock(7236154, hashtext(%(table_uuid)s::text));

-- name: patiently
-- A copy of many rows may take its time, which no query may.
set local statement_timeout = '6h';

-- name: add
-- Another build.
insert into build (table_uuid, instance_id, incarnation_id, version, purged_version, column_ids, row_count)
values (%(table_uuid)s, %(instance_id)s, %(incarnation_id)s, %(version)s, %(version)s, %(column_ids)s, 0)
returning build_id;

-- name: filled
-- How many rows it has, and which of its columns have an index of their own.
update build set row_count = %(row_count)s, indexed_ids = %(indexed_ids)s where build_id = %(build_id)s;

-- name: reached
-- It has the rows of this version.
insert into applied (build_id, version) values (%(build_id)s, %(version)s);

-- name: was_at
-- Whether it was brought to this version, and what that superseded since is kept. Of versions in between it never had
-- the rows.
select 1 from applied where build_id = %(build_id)s and version = %(version)s;

-- name: hold
-- The build, for the one that changes it.
select build_id, version, purged_version, column_ids, indexed_ids, row_count, retired_at is not null
from build
where build_id = %(build_id)s
for update;

-- name: clear
-- Rows that changed come here first.
truncate {incoming};

-- name: supersede
-- What changed rows were until then, for pages that began before.
insert into {superseded} ({columns}, until_version)
select {columns}, %(version)s from {current} where row_id in (select row_id from {incoming});

-- name: remove
-- The rows that changed.
delete from {current} where row_id in (select row_id from {incoming});

-- name: put
-- What they are now: of each the last version, if that is no deletion.
insert into {current} ({columns})
select {columns} from (
    select distinct on (row_id) * from {incoming} order by row_id, row_version desc
) newest
where not row_deleted;

-- name: brought
-- The build is at another version, and has other columns.
update build
set version = %(version)s, row_count = row_count + %(more)s, column_ids = %(column_ids)s
where build_id = %(build_id)s;

-- name: purge
-- What was superseded so long ago that no page needs it: says so first.
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
-- The rows of it.
delete from {superseded} where until_version <= %(purged_version)s;

-- name: retire
-- Another build has taken the place: pages that began on this one may go on for a while.
update build set retired_at = clock_timestamp() where build_id = any(%(build_ids)s) and retired_at is null;

-- name: all
-- All builds of an instance, how large they are, and for how long they have been retired.
select
    build_id, table_uuid, version, row_count,
    coalesce(pg_total_relation_size(to_regclass(format('current_%%s', build_id))), 0)
        + coalesce(pg_total_relation_size(to_regclass(format('superseded_%%s', build_id))), 0) as bytes,
    extract(epoch from clock_timestamp() - retired_at)::double precision as retired_seconds
from build
where instance_id = %(instance_id)s
order by build_id;

-- name: whose
-- Of which table a build is, for the one that drops it.
select table_uuid from build where build_id = %(build_id)s for update;

-- name: forget
-- A build is gone.
delete from build where build_id = %(build_id)s;

-- name: state
-- The index of a column of a build: whether it is there, valid, and being made. No row where the build does not have the
-- column, or has its index.
select
    i.indexrelid is not null,
    coalesce(i.indisvalid, false),
    exists (select 1 from pg_catalog.pg_stat_progress_create_index p where p.relid = to_regclass(%(current)s))
from build b left join pg_catalog.pg_index i on i.indexrelid = to_regclass(%(index)s)
where b.build_id = %(build_id)s and %(column_id)s = any(b.column_ids) and not %(column_id)s = any(b.indexed_ids);

-- name: mark
-- Records that a column has an index. Without `is_needed` it never gets one; else only if the index is valid.
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
-- Ends the statements that make an index of a build's column.
select pg_cancel_backend(pid)
from pg_catalog.pg_stat_progress_create_index
where relid = to_regclass(%(current)s) and datname = current_database();

-- name: of_texts
-- The indexes of a build's columns of text.
select i.indexrelid::regclass::text
from pg_catalog.pg_index i
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
where i.indrelid = to_regclass(%(current)s) and a.atttypid = 'text'::regtype;

-- name: note_use
-- Records which column indexes were scanned since this was recorded last.
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
-- Forgets the column indexes that were not scanned for so long; they are still to be dropped.
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
