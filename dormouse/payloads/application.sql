-- name: put
-- Keeps payloads, in the transaction of an application, whose role needs no right but to this function.
select dormouse.put_payloads(
    %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(kinds)s::text[], %(contents)b::text[]::jsonb[],
    %(instance)s::uuid
);

-- name: instance
-- The id of the instance.
select instance_id::text from instance;

-- name: begin
-- Begins the transaction of a connection that is not in autocommit mode and has begun none.
select;
