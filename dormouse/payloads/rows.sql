-- name: put
-- Stores payloads of a day, in place of those with the same keys; in the order of keys, so that transactions do not deadlock.
insert into {day} (kind, tenant, id, inserted_at, content)
select kind, tenant, id, inserted_at, content::jsonb
from unnest(
    %(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(contents)b::text[]
) given (kind, tenant, id, inserted_at, content)
where {such}
order by kind collate "C", tenant collate "C", id collate "C", inserted_at
on conflict (kind, tenant, id, inserted_at) do update
set location = 'inline', content = excluded.content, object_key = null, byte_start = null, byte_length = null, checksum = null;

-- name: all_given
-- Part of a query: stores all given payloads.
true

-- name: delete
-- Deletes payloads of a day. Waits for an exchange of its partition; a later exchange waits for this transaction.
delete from {day} p
using unnest(%(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[])
    given (kind, tenant, id, inserted_at)
where (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at);

-- name: bury
-- If the day may have blocks, leaves rows that mark the payloads as deleted.
insert into {day} (kind, tenant, id, inserted_at, location)
select given.*, 'deleted'
from unnest(%(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[])
    given (kind, tenant, id, inserted_at)
where exists (select from payload_day where day = %(day)s and state in ('folding', 'folded'))
order by 1, 2, 3, 4
on conflict (kind, tenant, id, inserted_at) do update
set location = 'deleted', content = null, object_key = null, byte_start = null, byte_length = null, checksum = null;

-- name: state
-- The state of a day. No row: there was never any work on it.
select state from payload_day where day = %(day)s;

-- name: get
-- The places of payloads of a day in the order of their keys: the content, the pointer, or the block that may have it.
select p.location, p.content::text, coalesce(p.object_key, b.object_key), p.byte_start, p.byte_length, p.checksum,
    coalesce(o.dictionaries, b.dictionaries), b.index_start, b.byte_count
from unnest(%(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[])
    with ordinality given (kind, tenant, id, inserted_at, number)
left join {day} p
    on (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at)
left join payload_object o on o.object_key = p.object_key
left join lateral (
    select *
    from payload_object
    where p.location is null and day = %(day)s and state = 'block'
        and (last_kind, last_tenant, last_id, last_at) >= (given.kind, given.tenant, given.id, given.inserted_at)
    order by last_kind, last_tenant, last_id, last_at
    limit 1
) b on (b.first_kind, b.first_tenant, b.first_id, b.first_at) <= (given.kind, given.tenant, given.id, given.inserted_at)
order by given.number;
