-- name: page
-- A page of a day, in the order of keys.
copy (
    select tenant, id, inserted_at, kind, convert_to(content::text, 'UTF8'), object_key, byte_start, byte_length, checksum
    from {day}
    where (%(after_kind)s::text is null
            or (kind, tenant, id, inserted_at)
            > (%(after_kind)s::text, %(after_tenant)s::text, %(after_id)s::text, %(after_at)s::timestamptz))
        and (%(till_kind)s::text is null
            or (kind, tenant, id, inserted_at)
            <= (%(till_kind)s::text, %(till_tenant)s::text, %(till_id)s::text, %(till_at)s::timestamptz))
    order by kind, tenant, id, inserted_at
    limit %(limit)s
) to stdout (format binary);

-- name: add_pointers
-- Adds pointers to a copy. Skips payloads that were written meanwhile: the mirror has put them into the copy.
insert into {copy} (kind, tenant, id, inserted_at, location, object_key, byte_start, byte_length, checksum)
select kind, tenant, id, inserted_at, 'external', object_key, byte_start, byte_length, checksum
from unnest(
    %(kinds)b::text[], %(tenants)b::text[], %(ids)b::text[], %(times)b::timestamptz[], %(object_keys)b::text[],
    %(starts)s::bigint[], %(lengths)s::integer[], %(checksums)b::bytea[]
) given (kind, tenant, id, inserted_at, object_key, byte_start, byte_length, checksum)
on conflict (kind, tenant, id, inserted_at) do nothing;
