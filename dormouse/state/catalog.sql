-- name: add
-- Adds a table; returns nothing when the name is taken.
insert into tables (name, schema, properties, layout)
select %(name)s, %(schema)s, %(properties)s, %(layout)s
from pg_advisory_xact_lock(hashtextextended('table ' || lower(%(name)s), 0))
on conflict (name) do nothing
returning table_id, created_at, table_uuid;

-- name: tables
-- All tables, by name.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered from tables order by name;

-- name: table
-- One table.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered from tables where name = %(name)s;

-- name: tables_like
-- The tables that have one of these names, given in lower case.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where lower(name) = any(%(names)s::text[])
order by name;

-- name: names
-- The names of all tables.
select name from tables order by name;

-- name: rename
-- Gives a table another name.
update tables set name = %(new_name)s
from pg_advisory_xact_lock(hashtextextended('table ' || lower(%(new_name)s), 0))
where name = %(name)s
returning table_id;

-- name: alike
-- A table whose name differs in upper and lower case only. Runs after the name was taken, under a lock that every
-- transaction that takes such a name waits for.
select name from tables where lower(name) = lower(%(name)s) and name <> %(name)s limit 1;

-- name: table_to_change
-- One table, whose row stays locked until the change of it is committed.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where table_id = %(table_id)s
for no key update;

-- name: set_properties
-- Replaces a table's properties.
update tables set properties = %(properties)s where table_id = %(table_id)s;

-- name: set_layout
-- Sets the layout by which a table's references and files are stored.
update tables set layout = %(layout)s where table_id = %(table_id)s;

-- name: remove
-- Removes a table; foreign keys remove the rows that belong to it.
delete from tables where table_id = %(table_id)s;

-- name: instance_id
-- The id of this database's instance.
select instance_id from instance;

-- name: rename_references
-- Renames the table of references to the name that the new layout uses; the cost does not depend on their number.
alter table {old_reference} rename to {file_reference};

-- name: adopt_files
-- Tracks the files as the new layout does.
with fact as materialized (
    {file_facts}
)
{adopt};
