-- name: pointers
-- The pointers of a day to an object, in the order of keys.
select tenant, id, inserted_at, kind, byte_start, byte_length, checksum
from {day}
where location = 'external' and object_key = %(object_key)s
order by kind, tenant, id, inserted_at;

-- name: lost_objects
-- The objects that pointers of a day lead to, and that are not known. Those that a fold replaced are there until it has
-- exchanged the partition that leads to them.
select p.object_key, count(*)
from {day} p
where p.location = 'external'
    and not exists (
        select
        from payload_object o
        left join payload_day d on d.day = o.day
        where o.object_key = p.object_key
            and (o.state in ('live', 'staged', 'block') or (d.work, d.phase) = ('fold', 'swap'))
    )
group by p.object_key;

-- name: warm
-- Has payloads be inline that are in objects still as they were when they were read.
update {day} p
set location = 'inline', content = given.content::jsonb, object_key = null, byte_start = null, byte_length = null, checksum = null
from unnest(
    %(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(contents)b::text[],
    %(object_keys)s::text[], %(starts)s::bigint[]
) given (kind, tenant, id, inserted_at, content, object_key, byte_start)
where (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at)
    and (p.object_key, p.byte_start) = (given.object_key, given.byte_start);

-- name: lock_state
-- What a day is, and stays until the end of the transaction.
select state from payload_day where day = %(day)s for share;

-- name: unfold
-- Has payloads be inline that are in blocks, but for those that were written or deleted since: a row says so, or, once that
-- is folded, that the block is none any more.
insert into {day} (kind, tenant, id, inserted_at, content)
select kind, tenant, id, inserted_at, content::jsonb
from unnest(
    %(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(contents)b::text[],
    %(object_keys)s::text[]
) given (kind, tenant, id, inserted_at, content, object_key)
join payload_object o on o.object_key = given.object_key and o.state = 'block'
order by kind collate "C", tenant collate "C", id collate "C", inserted_at
on conflict (kind, tenant, id, inserted_at) do nothing;

-- name: lock_writers
-- Waits for the writers of a day, and keeps others out.
lock table {day} in share row exclusive mode;

-- name: forget_deleted
-- Once no block has them, what is deleted need not be said.
delete from {day} where location = 'deleted';

-- name: note_warm
-- Notes that a day is hot again.
update payload_day set rehydrated_at = clock_timestamp() where day = %(day)s;
