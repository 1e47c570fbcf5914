-- name: check_tree
-- Partitions of a tree with gaps or overlaps: each but the root is one half of its parent, whose halves are both there.
with p as materialized (
    select * from partition where table_id = %(table_id)s
), child as (
    select a.partition_id as parent_id, a.sealed_epoch, h.id, h.min_keys, h.max_keys
    from p a
    cross join lateral (
        values
        (a.left_id, a.min_keys, a.max_keys[: a.split_key] || array[a.split_point] || a.max_keys[a.split_key + 2 :]),
        (a.right_id, a.min_keys[: a.split_key] || array[a.split_point] || a.min_keys[a.split_key + 2 :], a.max_keys)
    ) as h (id, min_keys, max_keys)
    where a.sealed_epoch is not null
)
select %(root)s::text as partition_id, 'the root is lost' as detail
where not exists (select from p where partition_id = %(root)s)
    and exists (select from tables where table_id = %(table_id)s)
union all
select partition_id, 'its bounds are not those of the whole key space'
from p
where partition_id = %(root)s
    and (parent_id is not null or num_nonnulls(variadic min_keys) > 0 or num_nonnulls(variadic max_keys) > 0)
union all
select p.partition_id, format('its parent %s is lost, or was not divided into it', p.parent_id)
from p
where p.partition_id <> %(root)s and not exists (
    select from child c where c.id = p.partition_id and c.parent_id = p.parent_id
)
union all
select c.id, format('it is lost: %s was divided into it', c.parent_id)
from child c
where not exists (select from p where p.partition_id = c.id)
union all
select c.id, format('it is not the half of %s that it was made as: there is a gap, or an overlap', c.parent_id)
from child c
join p on p.partition_id = c.id
where p.min_keys is distinct from c.min_keys or p.max_keys is distinct from c.max_keys
    or p.created_epoch <> c.sealed_epoch
union all
select partition_id, 'it was divided at a point that is not inside it'
from p
where split_point <= min_keys[split_key + 1] or split_point >= max_keys[split_key + 1]
limit %(limit)s;

-- name: check_epochs
-- Epochs that are lost, or do not agree with the partitions that they made and ended.
with e as materialized (
    select epoch, sealed, created from epoch where table_id = %(table_id)s
), p as materialized (
    select partition_id, created_epoch, sealed_epoch from partition where table_id = %(table_id)s
), lost as (
    select lag(epoch, 1, -1) over (order by epoch) + 1 as first, epoch - 1 as last from e
    union all
    select coalesce(max(e.epoch), -1) + 1, max(t.epoch)
    from tables t
    left join e on true
    where t.table_id = %(table_id)s
), listed as (
    select epoch, unnest(created) as partition_id, true as made from e
    union all
    select epoch, unnest(sealed), false from e
), done as (
    -- those that were divided when the table was made are not told of
    select created_epoch as epoch, partition_id, true as made from p where created_epoch > 0 or sealed_epoch is distinct from 0
    union all
    select sealed_epoch, partition_id, false from p where sealed_epoch > 0
)
select null::text as partition_id,
    format('epoch %s is lost: its row is not there', case when first = last then first::text else first || ' to ' || last end) as detail
from lost
where first <= last
union all
select coalesce(l.partition_id, d.partition_id),
    format('epoch %s does not agree with what became of it', coalesce(l.epoch, d.epoch))
from listed l
full join done d using (epoch, partition_id, made)
where (l.partition_id is null or d.partition_id is null)
    -- of an epoch that is lost this was said
    and exists (select from e where e.epoch = coalesce(l.epoch, d.epoch))
    and exists (select from p where p.partition_id = coalesce(l.partition_id, d.partition_id))
limit %(limit)s;
