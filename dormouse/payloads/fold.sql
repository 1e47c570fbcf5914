-- name: begin
-- From here on, what is deleted of a day is said to be, as its blocks may have it.
update payload_day set state = 'folding' where day = %(day)s;

-- name: in_range
-- How many rows a day has in the range of an object that lead to it, and how many others.
select count(*) filter (where object_key = %(object_key)s), count(*) filter (where object_key is distinct from %(object_key)s)
from {day}
where (kind, tenant, id, inserted_at) >= (%(first_kind)s, %(first_tenant)s, %(first_id)s, %(first_at)s::timestamptz)
    and (kind, tenant, id, inserted_at) <= (%(last_kind)s, %(last_tenant)s, %(last_id)s, %(last_at)s::timestamptz);

-- name: written_of
-- Which of some keys were written while a day was folded.
select kind, tenant, id, inserted_at
from unnest(%(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[])
    given (kind, tenant, id, inserted_at)
where (kind, tenant, id, inserted_at) in (select kind, tenant, id, inserted_at from {written});
