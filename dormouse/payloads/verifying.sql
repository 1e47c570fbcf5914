-- name: pointers
-- The pointers of a day to an object, in the order of keys.
select tenant, id, inserted_at, kind, byte_start, byte_length, checksum
from {day}
where location = 'external' and object_key = %(object_key)s
order by kind, tenant, id, inserted_at;

-- name: lost_objects
-- The objects that pointers of a day lead to, but that are not recorded as in use. Leaves out objects that a fold has just
-- replaced: the old partition leads to them until the exchange.
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
