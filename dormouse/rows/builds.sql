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
