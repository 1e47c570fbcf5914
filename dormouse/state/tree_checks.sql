-- name: check_tree
-- Partitions with gaps or overlaps, at any epoch. Each partition but a root is one half of its parent. Several partitions can
-- be the same half one after another: the first was made when the parent was divided, each next one when the one before left
-- the tree, and the last one, which the parent names, leaves with the parent.
with {forgotten}, p as materialized (
    select *, lag(merged_epoch) over halves as before, lag(partition_id) over halves is null as is_first,
        lead(partition_id) over halves is null as is_last,
        -- the partitions before it may have been forgotten
        lag(partition_id) over halves is null and created_epoch <= (select epoch from forgotten) as may_follow
    from partition
    where table_id = %(table_id)s
    window halves as (partition by parent_id, is_upper order by created_epoch, partition_id)
), half as (
    select a.partition_id as parent_id, a.sealed_epoch, a.merged_epoch, h.*
    from p a
    cross join lateral (
        values
        (
            false, a.left_id, a.min_keys,
            a.max_keys[: a.split_key] || array[a.split_point] || a.max_keys[a.split_key + 2 :]
        ),
        (
            true, a.right_id,
            a.min_keys[: a.split_key] || array[a.split_point] || a.min_keys[a.split_key + 2 :], a.max_keys
        )
    ) as h (is_upper, id, min_keys, max_keys)
    where a.split_point is not null
)
select %(root)s::text as partition_id, 'the root is lost' as detail
where not exists (select from p where parent_id is null and merged_epoch is null)
    and exists (select from tables where table_id = %(table_id)s)
union all
select partition_id, 'its bounds are not those of the whole key space'
from p
where parent_id is null and (num_nonnulls(variadic min_keys) > 0 or num_nonnulls(variadic max_keys) > 0)
union all
select partition_id, 'it is a root, and not from when the one before it left the tree'
from p
where parent_id is null and created_epoch is distinct from case when is_first then 0 else before end and not may_follow
union all
select p.partition_id, format('its parent %s is lost, or was not divided into it', p.parent_id)
from p
where p.parent_id is not null and not exists (
    select from half h where h.parent_id = p.parent_id and h.is_upper = p.is_upper
)
union all
select h.id, format('it is lost: %s was divided into it', h.parent_id)
from half h
where not exists (select from p where p.partition_id = h.id)
union all
select p.partition_id, format('it is not the half of %s that it was made as: there is a gap, or an overlap', h.parent_id)
from half h
join p on p.parent_id = h.parent_id and p.is_upper = h.is_upper
where p.min_keys is distinct from h.min_keys or p.max_keys is distinct from h.max_keys
    or p.created_epoch is distinct from case when p.is_first then h.sealed_epoch else p.before end
        and not (p.may_follow and p.created_epoch >= h.sealed_epoch)
    or p.is_last and (p.partition_id <> h.id or p.merged_epoch is distinct from h.merged_epoch)
union all
select partition_id, format('%s, which took its place, is lost, or is of another epoch', merged_id)
from p
where merged_epoch is not null and not exists (
    select from p m where m.partition_id = p.merged_id and m.created_epoch = p.merged_epoch
)
union all
select partition_id, 'it was divided at a point that is not inside it'
from p
where split_point <= min_keys[split_key + 1] or split_point >= max_keys[split_key + 1]
limit %(limit)s;

-- name: forgotten
-- Part of a query: partitions that only epochs before this one had may have been forgotten.
forgotten as materialized (
    select coalesce(max(forgotten_epoch), 0) as epoch from truncation where table_id = %(table_id)s
)

-- name: check_epochs
-- Epochs that are lost, or do not agree with the partitions that they created and sealed.
with {forgotten}, e as materialized (
    select epoch, sealed, created from epoch where table_id = %(table_id)s
), p as materialized (
    select partition_id, created_epoch, sealed_epoch from partition where table_id = %(table_id)s
), lost as (
    select greatest(l.first, f.epoch) as first, l.last
    from forgotten f
    cross join (
        select lag(epoch, 1, -1) over (order by epoch) + 1 as first, epoch - 1 as last from e
        union all
        select coalesce(max(e.epoch), -1) + 1, max(t.epoch)
        from tables t
        left join e on true
        where t.table_id = %(table_id)s
    ) l
    union all
    -- of the epochs before, those that made a leaf are kept
    select distinct p.created_epoch, p.created_epoch
    from p
    cross join forgotten f
    where p.created_epoch < f.epoch and p.sealed_epoch is distinct from p.created_epoch
        and (p.sealed_epoch is null or p.sealed_epoch > f.epoch)
        and not exists (select from e where e.epoch = p.created_epoch)
), listed as (
    select epoch, unnest(created) as partition_id, true as made from e
    union all
    select epoch, unnest(sealed), false from e
), done as (
    -- an epoch does not list partitions that it divided itself
    select created_epoch as epoch, partition_id, true as made from p where sealed_epoch is distinct from created_epoch
    union all
    select sealed_epoch, partition_id, false from p where sealed_epoch > created_epoch
), summed as (
    select chunk, sum(splits) over chunks as splits, sum(merges) over chunks as merges, sum(sealed_rows) over chunks as sealed_rows,
        sum(sealed_bytes) over chunks as sealed_bytes
    from (
        select (epoch + 999) / 1000 as chunk, sum(splits) as splits, sum(merges) as merges, sum(sealed_rows) as sealed_rows,
            sum(sealed_bytes) as sealed_bytes
        from epoch
        where table_id = %(table_id)s
        group by 1
        union all
        select chunk, 0, 0, 0, 0 from history_chunk where table_id = %(table_id)s
    ) t
    window chunks as (order by chunk)
), beyond as (
    -- the part of each running total that comes from deleted epochs: the same as in the total before it; the first total has
    -- that of the forgotten epochs
    select chunk, has, lag(has) over (order by chunk) as had
    from (
        select distinct c.chunk, array[
                c.splits - s.splits, c.merges - s.merges, c.sealed_rows - s.sealed_rows, c.sealed_bytes - s.sealed_bytes
            ]::numeric[] as has
        from history_chunk c
        join summed s using (chunk)
        where c.table_id = %(table_id)s
    ) c
)
select null::text as partition_id,
    format('epoch %s is lost: its row is not there', case when first = last then first::text else first || ' to ' || last end) as detail
from lost
where first <= last
union all
select coalesce(l.partition_id, d.partition_id),
    format('epoch %s does not agree with the partitions that it created and sealed', coalesce(l.epoch, d.epoch))
from listed l
full join done d using (epoch, partition_id, made)
where (l.partition_id is null or d.partition_id is null)
    -- lost epochs are reported above
    and exists (select from e where e.epoch = coalesce(l.epoch, d.epoch))
    and exists (select from p where p.partition_id = coalesce(l.partition_id, d.partition_id))
union all
select null, format('the running totals up to epoch %s do not add up', b.chunk * 1000)
from beyond b
cross join forgotten f
where b.has is distinct from coalesce(b.had, case when f.epoch = 0 then array[0, 0, 0, 0]::numeric[] else b.has end)
limit %(limit)s;
