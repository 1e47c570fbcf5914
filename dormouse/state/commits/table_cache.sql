-- name: was_adopted
-- Whether this database was restored or copied, and so may lack tables that requests of before are for.
select exists (select from incarnation where reason = 'adoption' and confirmed);

-- name: tables
-- The tables that a batch names by id, or by name when it has no id.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where table_id = any(%(table_ids)s::integer[]) or name = any(%(names)s::text[]);
