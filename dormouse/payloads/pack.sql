-- name: announce
-- Announces an object before it is written.
insert into payload_object (object_key, day, token) values (%(object_key)s, %(day)s, %(token)s);

-- name: register
-- Takes an object for one of a day's, if nothing is known of it; no row: it is known.
insert into payload_object (object_key, day, token)
values (%(object_key)s, %(day)s, 0)
on conflict (object_key) do nothing
returning object_key;

-- name: settle
-- Within the transaction that relies on an object: it is there, and what it has; no row: it is collected.
update payload_object
set state = %(state)s, kept = %(state)s = 'staged', changed_at = clock_timestamp(), byte_count = %(byte_count)s, digest = %(digest)s,
    payloads = %(payloads)s, index_start = %(index_start)s, dictionaries = %(dictionaries)s,
    first_kind = %(first_kind)s, first_tenant = %(first_tenant)s, first_id = %(first_id)s, first_at = %(first_at)s,
    last_kind = %(last_kind)s, last_tenant = %(last_tenant)s, last_id = %(last_id)s, last_at = %(last_at)s
where object_key = %(object_key)s and state = 'pending'
returning object_key;

-- name: of_day
-- The objects of a day in some states, in the order of what they have.
select object_key, state, byte_count, digest, payloads, index_start, dictionaries, kept, verified,
    first_tenant, first_id, first_at, first_kind, last_tenant, last_id, last_at, last_kind
from payload_object
where day = %(day)s and state = any(%(states)s)
order by first_kind, first_tenant, first_id, first_at, object_key;

-- name: change_state
-- Has objects of a day be something else from now on.
update payload_object
set state = %(state)s, changed_at = clock_timestamp()
where day = %(day)s and state = any(%(states)s);

-- name: keep
-- Has a fold go on with an object as a block.
update payload_object set kept = true where object_key = %(object_key)s;

-- name: note_verified
-- Notes that objects were read back, and are what was written.
update payload_object set verified = true where object_key = any(%(object_keys)s);

-- name: activate
-- Has what a fold goes on with be the blocks of a day from now on, and nothing else.
update payload_object
set state = case when kept then 'block' else 'dead' end, kept = false, changed_at = clock_timestamp()
where day = %(day)s and state in ('live', 'staged', 'block');

-- name: unstage
-- Has a fold be as if it had not begun, for the objects of a day: those that a pointer leads to are alive.
update payload_object o
set state = case
        when exists (select from {day} p where p.object_key = o.object_key) then case o.state when 'block' then 'block' else 'live' end
        when state = 'block' then 'block'
        else 'dead'
    end,
    kept = false, changed_at = clock_timestamp()
where day = %(day)s and state <> 'pending';

-- name: give_up
-- Objects that were announced, and that no transaction will rely on any more: whoever announced them has lost the day, or
-- gave it back.
update payload_object o
set state = 'dead', changed_at = clock_timestamp()
where o.state = 'pending' and not exists (
    select from payload_day d
    where d.day = o.day and d.token = o.token and d.worker is not null and d.leased_until > clock_timestamp()
);

-- name: deletable
-- Objects that nothing has relied on for a while, and that no hold keeps; by name. Those that no payload ever needed go sooner.
select object_key, byte_count
from payload_object
where state = 'dead' and changed_at < least(
        clock_timestamp()
            - make_interval(secs => case when byte_count is null then %(delay_seconds)s else %(kept_seconds)s end),
        (select min(since) from hold where until > clock_timestamp() and table_id is null)
    )
    and object_key > %(after)s
    -- whoever works on the day may need it until that is done
    and not exists (select from payload_day d where d.day = payload_object.day and d.work is not null)
order by object_key
limit %(limit)s;

-- name: forget
-- Forgets objects that are deleted; those that a frozen writer may still write are looked at again.
delete from payload_object
where object_key = any(%(object_keys)s) and state = 'dead'
    and (byte_count is not null or changed_at < clock_timestamp() - make_interval(secs => %(writer_seconds)s));

-- name: known
-- Of some objects those that are payloads', or may be.
select object_key from payload_object where object_key = any(%(object_keys)s);

-- name: written
-- All objects that transactions have relied on, a page at a time, and whether payloads need them; not those that were needed
-- no more when the oldest hold began, as the copy of the database that it is for does not need them either.
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
-- How many objects wait for their deletion, or for their writer, and their bytes as far as they are known.
select count(*), coalesce(sum(byte_count), 0)::bigint from payload_object where state in ('pending', 'dead');
