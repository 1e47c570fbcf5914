-- name: any_state
-- The objects among the given ones that are recorded, with their states.
select object_key, state from payload_object where object_key = any(%(object_keys)s);

-- name: pointers_to
-- The number of pointers of a day to each object, or to each of the given objects.
select object_key, count(*)
from {day}
where location = 'external' and (%(object_keys)s::text[] is null or object_key = any(%(object_keys)s))
group by object_key;

-- name: was_adopted
-- Whether an adoption ever made this database the owner, so that objects may belong to another timeline.
select exists (select from incarnation where reason = 'adoption');

-- name: was_adopted_lately
-- Whether the hold of an adoption is still active.
select exists (select from hold where starts_with(holder, 'adoption ') and until > clock_timestamp());

-- name: recoverable
-- The number of pointers of a day to lost objects whose contents are the given ones.
select count(*) from {day} p join {given} using (kind, tenant, id, inserted_at) where {lost};

-- name: recover
-- Changes pointers to contents in lost objects, so that they lead to the same contents in the given object.
update {day} p
set object_key = %(object_key)s, byte_start = given.byte_start, byte_length = given.byte_length
from {given}
where (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at) and {lost};

-- name: given
-- Part of a query: the entries of an object.
unnest(
    %(kinds)b::text[], %(tenants)b::text[], %(ids)b::text[], %(times)b::timestamptz[],
    %(starts)s::bigint[], %(lengths)s::integer[], %(checksums)b::bytea[]
) given (kind, tenant, id, inserted_at, byte_start, byte_length, checksum)

-- name: lost
-- Part of a query: whether a pointer leads to a lost object, and to the same content.
p.location = 'external' and p.object_key = any(%(lost)s::text[]) and p.checksum = given.checksum

-- name: revive
-- Marks a dead object as in use again.
update payload_object
set state = %(state)s, kept = false, changed_at = clock_timestamp()
where object_key = %(object_key)s and state = 'dead';

-- name: mark_dead
-- Marks lost objects as dead.
update payload_object set state = 'dead', changed_at = clock_timestamp() where object_key = any(%(object_keys)s);
