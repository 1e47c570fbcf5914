-- name: record
-- Records a commit that is about to be applied; gives nothing when its id is recorded already.
insert into applied_commit (table_id, commit_key, commit_id, content, expires_at)
values (
    %(table_id)s, %(commit_key)s, %(commit_id)s, %(content)s,
    clock_timestamp() + make_interval(secs => %(kept_seconds)s::float8)
)
on conflict do nothing
returning commit_key;

-- name: recorded
-- Whether a recorded commit had the same content.
select content is null or content = %(content)s::uuid as same
from applied_commit
where table_id = %(table_id)s and commit_key = %(commit_key)s;

-- name: was_adopted
-- Whether this database was restored or copied, and so may lack tables that requests of before are for.
select exists (select from incarnation where reason = 'adoption' and confirmed);

-- name: tables
-- The tables that a batch names by id, or by name when it has no id.
select table_id, name, schema, properties, layout, created_at, table_uuid, numbered
from tables
where table_id = any(%(table_ids)s::integer[]) or name = any(%(names)s::text[]);
