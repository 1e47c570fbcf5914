-- name: expire
-- Notes that a day is dropped, and that nobody works on it any more; no row: somebody does, or it is dropped already, and
-- nobody has made its partition again.
insert into payload_day as d (day, state) values (%(day)s, 'expired')
on conflict (day) do update
set state = 'expired', work = null, phase = null, token = d.token + 1, worker = null, leased_until = null, after_kind = null,
    after_tenant = null, after_id = null, after_at = null, verified_till = null, error = null, failed_at = null,
    changed_at = clock_timestamp()
where (d.state <> 'expired' or to_regclass(%(name)s) is not null) and (d.worker is null or d.leased_until < clock_timestamp())
returning day;

-- name: drop_work
-- Drops what work on a day that was not done has left.
drop table if exists {copy}, {written}, {old};

-- name: drop_mirror
-- Drops the function of a trigger that is gone with its table.
drop function if exists {mirror}();

-- name: is_partition
-- Whether a day has a partition.
select to_regclass(%(name)s) is not null;

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
