-- name: any_state
-- Which of some objects are known, and as what.
select object_key, state from payload_object where object_key = any(%(object_keys)s);

-- name: pointers_to
-- How many pointers of a day lead to each object, or to each of some.
select object_key, count(*)
from {day}
where location = 'external' and (%(object_keys)s::text[] is null or object_key = any(%(object_keys)s))
group by object_key;

-- name: was_adopted
-- Whether an adoption ever made this database the owner, so that objects may be another timeline's.
select exists (select from incarnation where reason = 'adoption');

-- name: was_adopted_lately
-- Whether the hold of an adoption, which begins before all that a database knows, has not ended.
select exists (select from hold where starts_with(holder, 'adoption ') and until > clock_timestamp());

-- name: recoverable
-- How many pointers of a day lead to objects that are lost, and to just the contents that are given.
select count(*) from {day} p join {given} using (kind, tenant, id, inserted_at) where {lost};

-- name: recover
-- Has pointers to contents in objects that are lost lead to where an object has just these.
update {day} p
set object_key = %(object_key)s, byte_start = given.byte_start, byte_length = given.byte_length
from {given}
where (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at) and {lost};

-- name: given
-- Part of a query: what an object has.
unnest(
    %(kinds)b::text[], %(tenants)b::text[], %(ids)b::text[], %(times)b::timestamptz[],
    %(starts)s::bigint[], %(lengths)s::integer[], %(checksums)b::bytea[]
) given (kind, tenant, id, inserted_at, byte_start, byte_length, checksum)

-- name: lost
-- Part of a query: a pointer that leads to an object that is lost, and to the same content.
p.location = 'external' and p.object_key = any(%(lost)s::text[]) and p.checksum = given.checksum

-- name: revive
-- Has an object that was to be deleted be needed again.
update payload_object
set state = %(state)s, kept = false, changed_at = clock_timestamp()
where object_key = %(object_key)s and state = 'dead';

-- name: let_go
-- Has objects that are lost be needed no more.
update payload_object set state = 'dead', changed_at = clock_timestamp() where object_key = any(%(object_keys)s);
