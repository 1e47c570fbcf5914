-- name: tables_named
-- The tables that a batch names by id, or by name when it has no id; and the versions of their rows.
select table_id, name, xmin::text as version
from tables
where table_id = any(%(table_ids)s::integer[]) or name = any(%(names)s::text[]);

-- name: tables_with_ids
-- Some tables, whole, and the versions of their rows.
select xmin::text as version, table_id, name, schema, properties, layout, created_at
from tables
where table_id = any(%(table_ids)s::integer[]);
