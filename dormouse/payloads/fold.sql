-- name: begin
-- From here on, what is deleted of a day is said to be, as its blocks may have it.
update payload_day set state = 'folding' where day = %(day)s;

-- name: in_range
-- How many rows a day has in the range of an object that lead to it, and how many others.
select count(*) filter (where object_key = %(object_key)s), count(*) filter (where object_key is distinct from %(object_key)s)
from {day}
where (kind, tenant, id, inserted_at) >= (%(first_kind)s, %(first_tenant)s, %(first_id)s, %(first_at)s::timestamptz)
    and (kind, tenant, id, inserted_at) <= (%(last_kind)s, %(last_tenant)s, %(last_id)s, %(last_at)s::timestamptz);

-- name: written_keys
-- What was written while a day was folded.
select distinct kind, tenant, id, inserted_at from {written};
