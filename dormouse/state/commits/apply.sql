-- name: record
-- Records a commit that is about to be applied; returns no row when its id is recorded already.
insert into applied_commit (table_id, commit_key, commit_id, content, expires_at)
values (
    %(table_id)s, %(commit_key)s, %(commit_id)s, %(content)s,
    clock_timestamp() + make_interval(secs => %(kept_seconds)s::float8)
)
on conflict do nothing
returning commit_key;

-- name: recorded
-- Returns whether the recorded commit of this id had the same content.
select content is null or content = %(content)s::uuid as same
from applied_commit
where table_id = %(table_id)s and commit_key = %(commit_key)s;

-- name: was_adopted
-- Returns whether this database was restored or copied: then it may lack tables that older requests name.
select exists (select from incarnation where reason = 'adoption' and confirmed);

-- name: tables
-- Returns the tables that a batch names by id, or by name when it has no id.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where table_id = any(%(table_ids)s::integer[]) or name = any(%(names)s::text[]);
