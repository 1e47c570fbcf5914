-- name: now
-- One table as it is now.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where table_id = %(table_id)s;

-- name: held
-- One table, whose row stays locked until a change of its columns is committed; new writers and deletions wait for it.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where table_id = %(table_id)s
for update;

-- name: then
-- The schema of a table in a snapshot: the one before the first change that the snapshot does not see.
select coalesce(
        (
            select c.was
            from schema_change c
            where c.table_id = %(table_id)s and not pg_visible_in_snapshot(c.added_xid, %(snapshot)s::pg_snapshot)
            order by c.version
            limit 1
        ),
        t.schema
    ), t.schema, t.properties
from tables t
where t.table_id = %(table_id)s;

-- name: change
-- Stores a new version of a table's schema, and records the one before.
with changed as (
    update tables
    set schema = %(schema)s, schema_version = %(version)s, properties = %(properties)s
    where table_id = %(table_id)s
)
insert into schema_change (table_id, version, was, change)
values (%(table_id)s, %(version)s, %(was)s, %(change)s);

-- name: conditions
-- The numbers and conditions of pending deletions, which readers apply.
select deletion_id, condition from deletion where table_id = %(table_id)s and retired_xid is null order by deletion_id;

-- name: changes
-- The changes of a table's schema, in their order.
select version, change, changed_at from schema_change where table_id = %(table_id)s order by version;
