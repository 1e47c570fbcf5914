-- name: expire
-- Records a day as expired, and ends its work. No row: a worker has the day, or it is expired already and has no partition.
insert into payload_day as d (day, state) values (%(day)s, 'expired')
on conflict (day) do update
set state = 'expired', work = null, phase = null, token = d.token + 1, worker = null, leased_until = null, after_kind = null,
    after_tenant = null, after_id = null, after_at = null, verified_till = null, error = null, failed_at = null,
    changed_at = clock_timestamp()
where (d.state <> 'expired' or to_regclass(%(name)s) is not null) and (d.worker is null or d.leased_until < clock_timestamp())
returning day;

-- name: drop_work
-- Drops the tables that unfinished work on a day has left.
drop table if exists {copy}, {written}, {old};

-- name: drop_mirror
-- Drops the function of a trigger that was dropped with its table.
drop function if exists {mirror}();

-- name: is_partition
-- Whether a day has a partition.
select to_regclass(%(name)s) is not null;

-- name: warm
-- Puts payloads back into their rows, unless their pointers changed since they were read.
update {day} p
set location = 'inline', content = given.content::jsonb, object_key = null, byte_start = null, byte_length = null, checksum = null
from unnest(
    %(kinds)s::text[], %(tenants)s::text[], %(ids)s::text[], %(times)s::timestamptz[], %(contents)b::text[],
    %(object_keys)s::text[], %(starts)s::bigint[]
) given (kind, tenant, id, inserted_at, content, object_key, byte_start)
where (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at)
    and (p.object_key, p.byte_start) = (given.object_key, given.byte_start);

-- name: lock_state
-- The state of a day, locked until the end of the transaction.
select state from payload_day where day = %(day)s for share;

-- name: unfold
-- Puts payloads of blocks back into rows, except those that were written or deleted since: these have a row already, or
-- their block is no longer one, because the day was folded again.
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
-- Waits for the writers of a day, and keeps other writers out.
lock table {day} in share row exclusive mode;

-- name: forget_deleted
-- Deletes the rows of deleted payloads, which are needed only while blocks may have them.
delete from {day} where location = 'deleted';

-- name: note_warm
-- Records that a day is hot again.
update payload_day set rehydrated_at = clock_timestamp() where day = %(day)s;
