-- name: put
-- Stores payloads, in the transaction of an application. Its role needs only the right to call this function.
select dormouse.put_payloads(
    %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(kinds)s::text[], %(contents)b::text[]::jsonb[],
    %(instance)s::uuid
);

-- name: find
-- The places of payloads in the order of their keys, as the transaction of an application sees them.
select expired, location, content, object_key, byte_start, byte_length, checksum, dictionaries, index_start, byte_count
from dormouse.find_payloads(
    %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(kinds)s::text[], %(instance)s::uuid
)
order by number;

-- name: delete
-- Deletes payloads, in the transaction of an application.
select dormouse.delete_payloads(
    %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(kinds)s::text[], %(instance)s::uuid
);

-- name: instance
-- The id of the instance.
select instance_id::text from instance;

-- name: begin
-- Begins the transaction of a connection that is not in autocommit mode and has none yet.
select;
