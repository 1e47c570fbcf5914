-- name: begin
-- Marks a day as folding. From here on, deletions leave a row marked as deleted, because blocks may have the payload.
update payload_day set state = 'folding' where day = %(day)s;

-- name: in_range
-- The numbers of rows in an object's key range: pointers to the object, and others.
select count(*) filter (where object_key = %(object_key)s), count(*) filter (where object_key is distinct from %(object_key)s)
from {day}
where (kind, tenant, id, inserted_at) >= (%(first_kind)s, %(first_tenant)s, %(first_id)s, %(first_at)s::timestamptz)
    and (kind, tenant, id, inserted_at) <= (%(last_kind)s, %(last_tenant)s, %(last_id)s, %(last_at)s::timestamptz);

-- name: written_of
-- The keys among the given ones that were written while the day was folded.
select kind, tenant, id, inserted_at
from unnest(%(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[])
    given (kind, tenant, id, inserted_at)
where (kind, tenant, id, inserted_at) in (select kind, tenant, id, inserted_at from {written});
