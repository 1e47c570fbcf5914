-- name: announce
-- Announces an object before it is written.
insert into payload_object (object_key, day, token) values (%(object_key)s, %(day)s, %(token)s);

-- name: register
-- Registers an object as one of a day's. No row: it is known already.
insert into payload_object (object_key, day, token)
values (%(object_key)s, %(day)s, 0)
on conflict (object_key) do nothing
returning object_key;

-- name: settle
-- Records an object's contents, within the transaction that begins to use it. No row: it was deleted.
update payload_object
set state = %(state)s, kept = %(state)s = 'staged', changed_at = clock_timestamp(), byte_count = %(byte_count)s, digest = %(digest)s,
    payloads = %(payloads)s, index_start = %(index_start)s, dictionaries = %(dictionaries)s,
    first_kind = %(first_kind)s, first_tenant = %(first_tenant)s, first_id = %(first_id)s, first_at = %(first_at)s,
    last_kind = %(last_kind)s, last_tenant = %(last_tenant)s, last_id = %(last_id)s, last_at = %(last_at)s
where object_key = %(object_key)s and state = 'pending'
returning object_key;

-- name: of_day
-- The objects of a day in some states, in the order of their payloads.
select object_key, state, byte_count, digest, payloads, index_start, dictionaries, kept, verified,
    first_tenant, first_id, first_at, first_kind, last_tenant, last_id, last_at, last_kind
from payload_object
where day = %(day)s and state = any(%(states)s)
order by first_kind, first_tenant, first_id, first_at, object_key;

-- name: change_state
-- Changes the state of a day's objects.
update payload_object
set state = %(state)s, changed_at = clock_timestamp()
where day = %(day)s and state = any(%(states)s);

-- name: keep
-- Marks an object to become a block of the fold without being rewritten.
update payload_object set kept = true where object_key = %(object_key)s;

-- name: note_verified
-- Records that objects were read back and are what was written.
update payload_object set verified = true where object_key = any(%(object_keys)s);

-- name: activate
-- Makes the kept objects of a fold the day's blocks, and all others dead.
update payload_object
set state = case when kept then 'block' else 'dead' end, kept = false, changed_at = clock_timestamp()
where day = %(day)s and state in ('live', 'staged', 'block');

-- name: unstage
-- Resets the states of a day's objects to those before a fold or offload: objects with pointers to them are live.
update payload_object o
set state = case
        when exists (select from {day} p where p.object_key = o.object_key) then case o.state when 'block' then 'block' else 'live' end
        when state = 'block' then 'block'
        else 'dead'
    end,
    kept = false, changed_at = clock_timestamp()
where day = %(day)s and state <> 'pending';

-- name: give_up
-- Marks announced objects as dead that no transaction will use: their worker has lost the day or released it.
update payload_object o
set state = 'dead', changed_at = clock_timestamp()
where o.state = 'pending' and not exists (
    select from payload_day d
    where d.day = o.day and d.token = o.token and d.worker is not null and d.leased_until > clock_timestamp()
);

-- name: deletable
-- Objects that have been dead for a while and that no hold keeps, sorted by name. Objects that were never used are due sooner.
select object_key, byte_count
from payload_object
where state = 'dead' and changed_at < least(
        clock_timestamp()
            - make_interval(secs => case when byte_count is null then %(delay_seconds)s else %(kept_seconds)s end),
        (select min(since) from hold where until > clock_timestamp() and table_id is null)
    )
    and object_key > %(after)s
    -- work on the day that is not finished may need the object
    and not exists (select from payload_day d where d.day = payload_object.day and d.work is not null)
order by object_key
limit %(limit)s;

-- name: forget
-- Deletes the records of deleted objects. Keeps those that a frozen writer may still write, so that they are deleted again.
delete from payload_object
where object_key = any(%(object_keys)s) and state = 'dead'
    and (byte_count is not null or changed_at < clock_timestamp() - make_interval(secs => %(writer_seconds)s));

-- name: known
-- The objects among the given ones that are recorded here.
select object_key from payload_object where object_key = any(%(object_keys)s);

-- name: written
-- A page of the objects that transactions have used, and whether payloads need them. Leaves out objects that were dead when
-- the oldest hold began, because the copy of the database that the hold is for does not need them either.
select object_key, byte_count, digest, state <> 'dead'
from payload_object
where byte_count is not null and object_key > %(after)s
    and (
        state <> 'dead'
        or changed_at >= (select min(since) from hold where until > clock_timestamp() and table_id is null)
    )
order by object_key
limit %(limit)s;

-- name: orphaned
-- The number of objects that are dead or not yet used, and their bytes as far as they are recorded.
select count(*), coalesce(sum(byte_count), 0)::bigint from payload_object where state in ('pending', 'dead');
